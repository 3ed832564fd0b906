"""Requests that cannot be answered in time are refused at once, and none that can be."""

import random
from collections.abc import Callable

import pytest

from kvmesh.protocol.errors import OverloadedError
from kvmesh.protocol.ids import RequestId
from kvmesh.router.admission import AdmissionRules, RefusedError
from kvmesh.router.core import RouterState
from kvmesh.router.rules import RouterRules
from tests.support.overloaded import Asked, OverloadedMesh, poisson, tokens_per_s
from tests.support.routing import A, card, request

SECONDS = 30.0
Draw = Callable[[random.Random], Asked]


# --- what is refused, request by request --------------------------------------------------------------


def learned(**rules: object) -> RouterState:
    """Return a router of one worker with 4 seats, whose answers take 1 s."""
    state = RouterState(RouterRules(admission=AdmissionRules(**rules)))  # type: ignore[arg-type]
    state.add_worker(card("w0", A, max_num_seqs=4))
    for number in range(40):
        now = float(number)
        ask = request(f"l{number}", max_tokens=100)
        assert state.try_place(ask, now) is not None
        state.prefill_done(ask.request_id, now + 0.1)
        state.admission.finished(ask.request_id, 100)
        state.free(ask.request_id, now + 1.0)
    return state


def fill(state: RouterState, now: float) -> None:
    for number in range(4):
        assert state.try_place(request(f"f{number}", max_tokens=100), now) is not None
        state.prefill_done(RequestId(f"f{number}"), now)


def test_an_idle_mesh_refuses_nothing() -> None:
    state = learned()
    assert state.try_place(request("x", max_tokens=100), 50.0, 50.01) is not None


def test_a_request_that_would_be_late_is_refused_on_arrival() -> None:
    state = learned()
    fill(state, 50.0)
    ask = request("x", max_tokens=100, has_deadline=True)
    assert state.try_place(ask, 50.0, 50.5) is None
    with pytest.raises(RefusedError, match="would take about") as refusal:
        state.submit(ask, 50.0, 50.5)
    assert refusal.value.reason == "late"
    assert refusal.value.retry_after_s is not None
    assert state.waiting == 0
    state.submit(ask, 50.0, 53.0)
    assert state.waiting == 1


def test_the_refusal_is_an_overload_on_the_wire() -> None:
    assert RefusedError("late", "x").code == OverloadedError.code


def test_without_measurements_everything_is_taken() -> None:
    state = RouterState(RouterRules())
    state.add_worker(card("w0", A, max_num_seqs=4))
    fill(state, 1.0)
    state.submit(request("x", max_tokens=100), 1.0, 1.1)
    assert state.waiting == 1


def test_a_continued_answer_is_never_refused() -> None:
    state = learned()
    fill(state, 50.0)
    state.submit(request("x", max_tokens=100, is_continued=True), 50.0, 50.5)
    assert state.dispatch(50.3) == []
    assert state.waiting == 1


def test_a_waiting_request_that_has_become_hopeless_is_dropped() -> None:
    state = learned()
    fill(state, 50.0)
    state.submit(request("x", max_tokens=100, has_deadline=True), 50.0, 51.5)
    assert state.dispatch(50.1) == []
    [outcome] = state.dispatch(50.8)
    assert isinstance(outcome.result, RefusedError)
    assert outcome.result.reason == "hopeless"
    assert state.waiting == 0


def test_admission_can_be_switched_off() -> None:
    state = learned(is_on=False)
    fill(state, 50.0)
    state.submit(request("x", max_tokens=100), 50.0, 50.5)
    assert state.waiting == 1


def test_a_request_with_a_deadline_waits_no_longer_than_the_limit() -> None:
    state = learned(max_wait_s=2.0)
    fill(state, 50.0)
    with pytest.raises(RefusedError) as refusal:
        for number in range(100):
            state.submit(request(f"x{number}", max_tokens=100, has_deadline=True), 50.0)
    assert refusal.value.reason == "wait"
    assert 4 <= state.waiting <= 12  # four answers a second


def test_a_request_without_a_stated_deadline_is_not_refused_for_its_wait() -> None:
    """The time limit of the frontend alone (here 600 s) is no deadline that a client stated."""
    state = learned(max_wait_s=2.0)
    fill(state, 50.0)
    for number in range(1000):
        ask = request(f"x{number}", max_tokens=100)
        state.check(ask, 50.0, 650.0)
        state.submit(ask, 50.0, 650.0)
    assert state.dispatch(64.0) == []
    assert state.waiting == 1000


def test_a_waiting_request_is_not_begun_when_its_time_limit_leaves_no_time_for_the_answer() -> None:
    state = learned()
    fill(state, 50.0)
    state.submit(request("x", max_tokens=100), 50.0, 51.5)
    assert state.dispatch(50.8) == []
    for number in range(4):
        state.free(RequestId(f"f{number}"), 51.4)
    [outcome] = state.dispatch(51.4)
    assert isinstance(outcome.result, RefusedError)
    assert outcome.result.reason == "hopeless"


def test_a_burst_waits_only_where_answers_have_time_to_spare() -> None:
    """Answers of 1 s leave much of 10 s to wait in. Where most tokens are in answers of 8 s, a fifth may be waited."""

    def taken(long_answers: int) -> int:
        state = learned()
        for number in range(long_answers):
            now = 60.0 + 10 * number
            ask = request(f"long{number}", max_tokens=100)
            assert state.try_place(ask, now) is not None
            state.prefill_done(ask.request_id, now + 0.1)
            state.admission.finished(ask.request_id, 800)
            state.free(ask.request_id, now + 8.1)
        fill(state, 500.0)
        for number in range(100):
            try:
                state.submit(request(f"x{number}", max_tokens=100, has_deadline=True), 500.0, 510.0)
            except RefusedError:
                break
        return state.waiting

    assert taken(0) >= 8
    assert 1 <= taken(12) <= taken(0) / 2


def test_the_quick_look_refuses_what_the_queue_refuses() -> None:
    state = learned()
    ask = request("x", max_tokens=100, has_deadline=True)
    state.check(ask, 50.0, 50.5)  # nobody waits
    fill(state, 50.0)
    state.submit(request("y", max_tokens=100), 50.0, 60.0)
    with pytest.raises(RefusedError):
        state.check(ask, 50.0, 50.5)
    state.check(ask, 50.0, 60.0)


def test_nothing_is_remembered_of_requests_that_have_ended() -> None:
    state = learned()
    fill(state, 50.0)
    assert state.admission.gap_s("m") > 0
    for number in range(4):
        state.free(RequestId(f"f{number}"), 51.0)
    assert state.admission.gap_s("m") == 0
    state.remove_worker(card("w0").worker_id, 52.0)
    assert state.admission.estimate(request("x", max_tokens=9), 1) is None


def test_a_preview_says_what_the_request_would_take() -> None:
    explanation = learned().preview(request("x", max_tokens=100), 50.0).explanation
    assert explanation is not None
    assert explanation.first_s == pytest.approx(0.1, abs=0.02)
    assert explanation.total_s == pytest.approx(1.0, abs=0.05)


# --- a mesh under load, in simulated time -------------------------------------------------------------


def mix(rng: random.Random) -> Asked:
    isl, most = rng.choice((20, 60, 150, 400)), rng.choice((16, 40, 80, 160))
    if rng.random() < 0.6:
        return Asked(0.0, isl, most, most, 10.0)
    return Asked(0.0, isl, max(1, min(400, int(rng.expovariate(1 / 80)))), 400, 10.0)


def deadlines(rng: random.Random) -> Asked:
    one = mix(rng)
    one.deadline_s = rng.choice((2.0, 5.0, 10.0, 30.0, 60.0))
    return one


def no_deadline(rng: random.Random) -> Asked:
    one = mix(rng)
    one.deadline_s = None
    return one


def cancels(rng: random.Random) -> Asked:
    one = mix(rng)
    if rng.random() < 0.3:
        one.leaves_s = rng.uniform(0.05, 2.0)
    return one


def long_prompts(rng: random.Random) -> Asked:
    return Asked(0.0, rng.choice((1500, 3000, 6000)), 16, 16, 10.0)


SHAPES: dict[str, tuple[Draw, float, float]] = {  # with the requests and tokens per second that the mesh can do
    "mix": (mix, 8.1, 588.0),
    "deadlines": (deadlines, 8.2, 608.0),
    "no deadline": (no_deadline, 8.1, 588.0),
    "cancels": (cancels, 8.2, 602.0),
    "long prompts": (long_prompts, 4.5, 71.0),
}


def asked_of(shape: str, load: float, *, routers: int = 1, rules: RouterRules | None = None) -> list[Asked]:
    draw, rate, _ = SHAPES[shape]
    asked = poisson(load * rate, SECONDS, draw, seed=2, routers=routers)
    OverloadedMesh(rules, routers).run(asked)
    return asked


@pytest.mark.parametrize(
    ("load", "routers"), [(3.0, 1), (3.0, 2), (10.0, 1), pytest.param(10.0, 2, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_overloaded_mesh_does_what_it_can_do(shape: str, load: float, routers: int) -> None:
    asked = asked_of(shape, load, routers=routers)
    assert tokens_per_s(asked, 3.0, SECONDS) >= 0.9 * SHAPES[shape][2]
    begun_in_vain = sum(one.missed and one.first_s >= 0 for one in asked)
    assert begun_in_vain <= 0.07 * sum(one.first_s >= 0 for one in asked)


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("load", [0.3, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mesh_that_can_do_it_refuses_nothing(shape: str, load: float, routers: int) -> None:
    assert [one for one in asked_of(shape, load, routers=routers) if one.refused_s >= 0] == []


@pytest.mark.long
def test_without_admission_most_of_the_work_is_in_vain() -> None:
    asked = asked_of("mix", 10.0, rules=RouterRules(admission=AdmissionRules(is_on=False)))
    assert tokens_per_s(asked, 3.0, SECONDS) < 0.6 * SHAPES["mix"][2]


def test_a_standing_queue_of_requests_with_deadlines_is_short() -> None:
    """Requests of the second half of an overload begin within a second or two, instead of at their deadlines."""
    late = [one.first_s for one in asked_of("mix", 3.0) if one.at_s > SECONDS / 2 and one.end_s >= 0]
    assert sorted(late)[len(late) // 2] < 1.5


@pytest.mark.parametrize("load", [0.8, 3.0])
def test_requests_without_deadlines_are_all_answered(load: float) -> None:
    assert all(one.end_s >= 0 for one in asked_of("no deadline", load))


def test_after_an_overload_requests_begin_as_before() -> None:
    asked = poisson(10 * 8.1, 20.0, mix, seed=5)
    after = poisson(0.5 * 8.1, 20.0, mix, seed=6)
    for one in after:
        one.at_s += 20.0
    OverloadedMesh().run([*asked, *after])
    assert all(one.end_s >= 0 for one in after if one.at_s > 22.0)
    assert max(one.first_s for one in after if one.at_s > 22.0) < 1.0


def test_a_light_tenant_is_served_beside_a_flood() -> None:
    flood, light = poisson(60.0, 20.0, mix, seed=7), poisson(1.0, 20.0, mix, seed=8)
    for one in flood:
        one.tenant = "flood"
    for one in light:
        one.tenant = "light"
    OverloadedMesh().run(sorted([*flood, *light], key=lambda one: one.at_s))
    assert sum(one.end_s >= 0 for one in light) >= 0.85 * len(light)


def test_estimates_recover_after_a_stall() -> None:
    """Answers that took very long once do not keep later requests out for ever."""
    state = learned()
    for number in range(20):
        ask = request(f"s{number}", max_tokens=100)
        assert state.try_place(ask, 100.0 + 30 * number, 100.0 + 30 * number + 600) is not None
        state.prefill_done(ask.request_id, 110.0 + 30 * number)
        state.admission.finished(ask.request_id, 100)
        state.free(ask.request_id, 125.0 + 30 * number)
    taken = 0
    for number in range(100):
        now = 800.0 + 2 * number
        ask = request(f"n{number}", max_tokens=100)
        if state.try_place(ask, now, now + 5.0) is not None:
            taken += 1
            state.prefill_done(ask.request_id, now + 0.1)
            state.admission.finished(ask.request_id, 100)
            state.free(ask.request_id, now + 1.0)
    assert taken == 100
