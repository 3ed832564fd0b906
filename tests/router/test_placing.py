"""A request runs on one worker or two, chosen by overlap, load and its wishes."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import NoWorkerError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import CardTier, Placed, WorkerCard
from kvmesh.protocol.tiers import Tier
from kvmesh.router.core import FEW_ASKED, RouterState
from kvmesh.router.disaggregation import LocalPrefill
from kvmesh.router.estimate import LEAST
from kvmesh.router.load import Share
from kvmesh.router.placing import plan
from kvmesh.router.policies import Policy
from kvmesh.router.queue import MAX_ASKED
from kvmesh.router.selection import Weights
from tests.support.routing import (
    BLOCK,
    ONE_AT_A_TIME,
    TOKENS,
    A,
    P,
    at,
    busy,
    card,
    done,
    end,
    holds,
    load_of,
    place,
    prompt,
    request,
    router,
    submit,
    where,
)

# --- one worker or two ---------------------------------------------------------------------------------------------


def test_prompt_here_and_answer_there() -> None:
    placed = router(card("p", P), card("a", A)).place(request(), 0.0)
    assert where(placed) == ("p", "a")
    assert (placed.prefill.address, placed.decode.address) == ("p:1", "a:1")  # type: ignore[union-attr]
    assert placed.reason == "320 of 320 prompt tokens are to compute"


def test_a_prefix_that_the_decode_worker_has_is_used_there() -> None:
    state = router(card("p", P), card("d1"), card("d2"))
    holds(state, "d2", 15)
    placed = state.place(request(), 0.0)
    assert where(placed) == (None, "d2")
    assert placed.decode.overlap_blocks == 15
    assert placed.reason == "only 80 of 320 prompt tokens are not cached on the decode worker"


def test_a_prefix_that_the_prefill_worker_has_is_used_there() -> None:
    state = router(card("p1", P), card("p2", P), card("d"))
    holds(state, "p2", 18)
    placed = state.place(request(), 0.0)
    assert where(placed) == ("p2", "d")
    assert placed.prefill is not None
    assert placed.prefill.overlap_blocks == 18
    assert load_of(state, "p2").queued_tokens == 2 * BLOCK


def test_the_wish_of_the_caller_counts() -> None:
    state = router(card("p", P), card("d"), local_prefill=LocalPrefill(10**6, 1.0))
    holds(state, "d", 20)
    assert where(state.place(request(disaggregate=True), 0.0)) == ("p", "d")
    assert where(state.place(request(disaggregate=False), 0.0)) == (None, "d")


def test_a_decode_worker_helps_out_full_prefill_workers() -> None:
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME)
    assert where(state.place(request("r1", prompt(1)), 0.0)) == ("p", "d")
    placed = state.place(request("r2", prompt(2)), 0.0)
    assert where(placed) == (None, "d")
    assert placed.reason.startswith("prefill workers are the bottleneck: 640 tokens to compute there")
    assert placed.reason.endswith("320 here")
    done(state, "r1")
    assert where(state.place(request("r3", prompt(3)), 0.0)) == ("p", "d")


def beside_a_full_prefill_worker(
    itl_s: float, *, answers: int = 1, measured: int = LEAST, **rules: object
) -> RouterState:
    """Return a router that has measured an ITL, with a full prefill worker and a decode worker with answers."""
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME, **rules)
    ends_s, answering = 10 * itl_s, "d"
    for number in range(measured):
        name = busy(state, "d", 100 + number)
        done(state, name)
        state.progress(RequestId(name), 11, ends_s)
        end(state, name, now=ends_s)
    for number in range(answers):
        done(state, busy(state, "d", 200 + number, now=ends_s), now=ends_s)
    if not answers:  # then the prompt on the prefill worker must not become one
        state.add_worker(card(answering := "e"))
    place(state, "on p", prompt(1), ends_s, disaggregate=True, pin=WorkerId(answering))
    return state


def helps(state: RouterState, now: float, name: str = "r", number: int = 2) -> bool:
    """Return whether the decode worker computes a new prompt at once. If not, the request waits."""
    submit(state, name, prompt(number), now)
    outcomes = state.dispatch(now)
    if not outcomes:
        assert state.waiting
        return False
    [(_, placed)] = outcomes
    assert isinstance(placed, Placed)
    return placed.prefill is None


def test_a_decode_worker_with_slow_answers_takes_no_prompt() -> None:
    state = beside_a_full_prefill_worker(0.09, slo_itl_s=0.1)
    assert not helps(state, 1.0)
    done(state, "on p", now=2.0)
    [(_, placed)] = state.dispatch(2.0)
    assert isinstance(placed, Placed)
    assert where(placed) == ("p", "d")


def test_a_decode_worker_with_fast_answers_takes_a_prompt() -> None:
    assert helps(beside_a_full_prefill_worker(0.02, slo_itl_s=0.1), 1.0)
    assert not helps(beside_a_full_prefill_worker(0.02, slo_itl_s=0.02), 1.0)


@pytest.mark.parametrize(
    "more",
    [{"answers": 0, "slo_itl_s": 0.1}, {"measured": LEAST - 1, "slo_itl_s": 0.1}, {"slo_itl_s": 0.0}],
    ids=["no answers", "nothing measured", "no limit"],
)
def test_without_answers_measurements_or_an_slo_help_has_no_limit(more: dict[str, Any]) -> None:
    assert helps(beside_a_full_prefill_worker(0.5, **more), 6.0)


def test_a_decode_worker_that_has_had_prompts_for_a_while_rests() -> None:
    state = beside_a_full_prefill_worker(0.02, slo_itl_s=0.1)
    assert helps(state, 1.0, "for long")
    done(state, "for long", now=21.0)
    assert not helps(state, 21.0, number=3)
    [(_, placed)] = state.dispatch(31.0)
    assert isinstance(placed, Placed)
    assert where(placed) == (None, "d")


def test_while_prefill_workers_are_full_a_dispatch_makes_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first token and every end is a dispatch, and hundreds of requests may wait."""
    state, plans = beside_a_full_prefill_worker(0.09, slo_itl_s=0.1), []
    for number in range(3 * MAX_ASKED):
        submit(state, f"r{number}", prompt(1000 + number), 1.0)
    monkeypatch.setattr("kvmesh.router.core.plan", lambda view: plans.append(view) or plan(view))
    assert not state.dispatch(1.0)
    assert len(plans) == FEW_ASKED
    done(state, "on p", now=2.0)
    assert len(state.dispatch(2.0)) == 1
    assert len(plans) == 1 + 2 * FEW_ASKED


def test_prompts_of_other_routers_count_as_help() -> None:
    state = beside_a_full_prefill_worker(0.02, slo_itl_s=0.1)
    state.load.set_elsewhere("two", {at("d"): Share(100, 50, 1)}, 1.0)
    state.load.set_elsewhere("two", {at("d"): Share(0, 50, 1)}, 21.0)
    assert not helps(state, 21.0)


def test_a_fast_decode_worker_helps_out_despite_more_work() -> None:
    for capacity, expected in ((1.0, "p"), (4.0, None)):
        state = router(card("p", P), card("d", capacity=capacity), saturation=ONE_AT_A_TIME)
        busy(state, "d", 1, blocks=50)
        place(state, "busy p", prompt(2), disaggregate=True)
        assert where(state.place(request(), 0.0))[0] == expected


def test_kv_moves_only_between_workers_of_one_transfer() -> None:
    state = router(card("p", P, transfer="nixl"), card("d1"), card("d2", transfer="nixl"))
    for number in range(3):
        assert where(state.place(request(f"r{number}", prompt(number)), 0.0)) == ("p", "d2")
    state.remove_worker(WorkerId("d2"))
    placed = state.place(request("s"), 0.0)
    assert where(placed) == (None, "d1")
    assert placed.reason == "no decode worker can pull KV over 'nixl'"


def test_workers_that_can_move_no_kv_do_both_halves() -> None:
    state = router(card("p", P, transfer=""), card("d", transfer=""))
    assert where(state.place(request(disaggregate=True), 0.0)) == (None, "d")


def test_models_have_workers_of_their_own() -> None:
    state = router(card("d1"), card("d2", model="other", block_size=32))
    assert place(state, "r") == "d1"
    state.remove_worker(WorkerId("d1"))
    with pytest.raises(NoWorkerError, match="no worker of the model 'm' is ready; models with workers: other"):
        state.place(request(), 0.0)


def test_with_prefill_workers_alone_nothing_can_be_answered() -> None:
    with pytest.raises(NoWorkerError, match="only prefill workers of the model 'm' are ready"):
        router(card("p", P)).place(request(), 0.0)


# --- reuse against load --------------------------------------------------------------------------------------------


def test_requests_in_flight_are_spread_and_their_end_is_noticed() -> None:
    state = router(card("d1"), card("d2"))
    placed = {f"r{number}": place(state, f"r{number}", prompt(number)) for number in range(4)}
    assert sorted(placed.values()) == ["d1", "d1", "d2", "d2"]
    end(state, *[name for name, worker in placed.items() if worker == "d2"])
    assert place(state, "r5", prompt(5)) == "d2"


def test_one_conversation_stays_together_and_others_go_elsewhere() -> None:
    state = router(card("d1"), card("d2"))
    first = place(state, "r1")
    other = place(state, "r2", prompt(2))
    assert {first, other} == {"d1", "d2"}
    holds(state, first, 20)
    end(state, "r1", "r2")
    assert place(state, "r3", TOKENS + prompt(3, 1)) == first


def test_prefill_work_counts_until_the_first_token() -> None:
    state = router(card("p1", P), card("p2", P), card("d"))
    assert where(state.place(request("r1", prompt(1)), 0.0))[0] == "p1"
    assert where(state.place(request("r2", prompt(2, 10)), 0.0))[0] == "p2"
    assert where(state.place(request("r3", prompt(3, 1)), 0.0))[0] == "p2"
    done(state, "r1")
    assert where(state.place(request("r4", prompt(4, 1)), 0.0))[0] == "p1"


def test_the_computed_part_of_a_prompt_counts_no_more() -> None:
    state = router(card("d1"), card("d2"))
    for number, name in enumerate(("d1", "d2")):
        done(state, busy(state, name, number, blocks=10), now=1.0)  # 160 tokens in a second
    end(state, "busy d1 0", "busy d2 1", now=1.0)
    busy(state, "d1", 2, blocks=100, now=10.0)
    busy(state, "d2", 3, blocks=60, now=10.0)
    assert place(state, "r1", prompt(4, 1), now=10.0) == "d2"
    end(state, "r1", "busy d2 3", now=10.0)
    busy(state, "d2", 5, blocks=60, now=19.0)
    assert place(state, "r2", prompt(6, 1), now=19.0) == "d1"


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
@pytest.mark.parametrize("capacity", [0.5, 2.0])
def test_work_is_shared_in_proportion_to_capacity(policy: Policy, capacity: float) -> None:
    state = router(card("usual"), card("other", capacity=capacity), saturation=None, policy=policy)
    for number in range(90):
        place(state, f"r{number}", prompt(number, 1 + number % 7))
    usual, other = (load_of(state, name).queued_tokens for name in ("usual", "other"))
    assert other == pytest.approx(capacity * usual, rel=0.1)


def test_a_prefix_is_worth_less_on_a_slow_worker() -> None:
    """The prefix saves 10 of 20 blocks. At half the speed the other 10 take as long as all 20 elsewhere."""
    for capacity, expected in ((0.4, "usual"), (0.6, "other")):
        state = router(card("usual"), card("other", capacity=capacity), weights=Weights(decode=0.0))
        holds(state, "other", 10)
        assert place(state, "r") == expected


@pytest.mark.parametrize(("medium", "queue_blocks"), [("GPU", 15), ("CPU", 11), ("DISK", 3), ("OBJECT", 1)])
def test_prefixes_in_faster_tiers_are_worth_longer_queues(medium: str, queue_blocks: int) -> None:
    """A prefix of 16 blocks saves the shares 1, 0.75, 0.25 and 0.1 of them, by tier."""
    weights = Weights(decode=0.0)
    for blocks, expected in ((queue_blocks, "d2"), (queue_blocks + 2, "d1")):
        state = router(card("d1"), card("d2"), weights=weights, saturation=None, recompute_price=1.0)
        holds(state, "d2", 16, medium=medium)
        busy(state, "d2", blocks=blocks)
        assert place(state, "r") == expected


def test_a_block_in_a_slow_tier_is_booked_for_what_it_costs() -> None:
    state = router(card("d"))
    holds(state, "d", 12, medium="DISK")
    placed = state.place(request(), 0.0)
    assert load_of(state, "d").queued_tokens == (20 - 0.25 * 12) * BLOCK
    assert placed.decode.overlap_blocks == 0, "what is on the device"


def measured(name: str, block_s: float, latency_s: float = 0.0, **fields: object) -> WorkerCard:
    """Return a card of a worker that computes a block in 10 ms, and loads one from host memory in `block_s`."""
    host = CardTier(tier=Tier.HOST, blocks=1000, block_s=block_s, latency_s=latency_s)
    return card(name, tiers=(host,), prefill_token_s=0.01 / BLOCK, **fields)


@pytest.mark.parametrize(
    ("block_s", "latency_s", "computed"), [(0.001, 0.0, 9.2), (0.001, 0.02, 11.2), (0.009, 0.0, 18.8), (0.02, 0.0, 20)]
)
def test_a_measured_tier_saves_what_it_is_faster_by(block_s: float, latency_s: float, computed: float) -> None:
    """Twelve of 20 blocks lie in host memory. Each saves 1 - load / compute, and the latency counts once."""
    state = router(measured("d", block_s, latency_s))
    holds(state, "d", 12, medium="CPU")
    state.place(request(), 0.0)
    assert load_of(state, "d").queued_tokens == pytest.approx(computed * BLOCK, abs=1)


def test_of_two_tiers_the_faster_one_is_chosen() -> None:
    state = router(measured("d1", 0.009), measured("d2", 0.001), saturation=None, predict_ttl_s=0.0)
    for name in ("d1", "d2"):
        holds(state, name, 16, medium="CPU")
    assert {place(state, f"r{n}") for n in range(2)} == {"d2"}


def test_a_tier_that_was_never_measured_counts_by_the_weights() -> None:
    state = router(measured("d", 0.0))
    holds(state, "d", 12, medium="CPU")
    state.place(request(), 0.0)
    assert load_of(state, "d").queued_tokens == (20 - 0.75 * 12) * BLOCK


def test_a_fast_tier_of_a_decode_worker_needs_no_prefill_worker() -> None:
    for block_s, expected in ((0.001, (None, "d")), (0.02, ("p", "d"))):
        state = router(card("p", P), measured("d", block_s))
        holds(state, "d", 19, medium="CPU")
        assert where(state.place(request(), 0.0)) == expected


def test_requests_wait_in_the_order_of_what_they_save() -> None:
    """A prompt that lies in a slow tier is no short prompt: the other one came first."""
    state = router(measured("d", 0.0099), saturation=ONE_AT_A_TIME)
    holds(state, "d", 20, medium="CPU")
    place(state, "running", prompt(2))
    submit(state, "slow")
    [queue] = state._queues.values()
    [waiting] = queue._waiting.values()
    assert waiting.item.uncached_tokens > 19 * BLOCK


def test_ranks_of_a_worker_are_chosen_between() -> None:
    state = router(card("d", dp_size=3))
    holds(state, "d", 20, dp_rank=2)
    placed = state.place(request(), 0.0)
    assert (placed.decode.dp_rank, placed.decode.overlap_blocks) == (2, 20)
    assert {state.place(request(f"r{n}", prompt(n + 1)), 0.0).decode.dp_rank for n in range(2)} == {0, 1}


def test_equal_histories_give_equal_placements() -> None:
    def play() -> list[tuple[str | None, str]]:
        state = router(*[card(f"d{n}") for n in range(5)], card("p", P), temperature=0.7, seed=3)
        holds(state, "d3", 10)
        return [where(state.place(request(f"r{n}", TOKENS[: 16 * (n % 20 + 1)]), n)) for n in range(50)]

    assert play() == play()


# --- what a copy of a prefix is worth ------------------------------------------------------------------------------


def asked_for(state: RouterState, tokens: list[int], worker: str, times: int, now: float) -> None:
    for number in range(times):
        place(state, f"asked {number}", tokens, now, pin=WorkerId(worker))
        end(state, f"asked {number}", now=now)


def test_hot_prefixes_are_copied_private_ones_stay() -> None:
    state = router(card("d1"), card("d2"), weights=Weights(decode=0.0), saturation=None, predict_ttl_s=0.0)
    hot, private = prompt(1), prompt(2)
    for tokens in (hot, private):
        holds(state, "d1", 20, tokens)
    asked_for(state, hot, "d1", times=20, now=0.0)
    busy(state, "d1", blocks=10)
    assert place(state, "hot", hot) == "d2"
    assert place(state, "private", private, exclude=()) == "d1"


def test_a_hot_prefix_with_enough_copies_is_not_copied() -> None:
    state = router(*[card(f"d{n}") for n in range(6)], weights=Weights(decode=0.0), predict_ttl_s=0.0)
    for worker in ("d1", "d2", "d3", "d4", "d5"):
        holds(state, worker, 20)
        busy(state, worker, blocks=12)
    asked_for(state, TOKENS, "d1", times=2, now=0.0)
    assert place(state, "r", TOKENS) in ("d1", "d2", "d3", "d4", "d5")


def test_busy_workers_make_a_private_prefix_worth_waiting_for() -> None:
    state = router(card("d1"), card("d2"), weights=Weights(decode=0.0), saturation=None)
    holds(state, "d1", 20)
    busy(state, "d1", 1, blocks=30)
    assert place(state, "idle") == "d2"
    end(state, "idle", ok=False)
    busy(state, "d2", 2, blocks=1)
    assert place(state, "busy", now=300.0) == "d1", "both have computed all the time"


def test_retries_are_no_demand() -> None:
    state = router(card("d1"), card("d2"), card("d3"), predict_ttl_s=0.0)
    holds(state, "d1", 20)
    for number in range(5):
        place(state, f"r{number}", exclude=(WorkerId("d3"),))
        end(state, f"r{number}")
    explanation = state.preview(request(), 0.0).explanation
    assert explanation is not None
    assert explanation.asked_before == 0.0


# --- policies ------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    state = router(*[card(f"d{n}") for n in range(3)], policy="round-robin")
    holds(state, "d2", 20)
    assert [place(state, f"r{n}") for n in range(6)] == ["d0", "d1", "d2"] * 2


def test_random_and_power_of_two_use_all_workers() -> None:
    for policy in ("random", "power-of-two"):
        state = router(*[card(f"d{n}") for n in range(4)], policy=policy, saturation=None)
        seen = Counter(place(state, f"r{n}") for n in range(80))
        assert min(seen[f"d{n}"] for n in range(4)) > 5


def test_least_loaded_looks_past_a_prefix() -> None:
    for policy, expected in (("least-loaded", "d2"), ("kv", "d1")):
        state = router(card("d1"), card("d2"), policy=policy)
        holds(state, "d1", 20)
        busy(state, "d1", blocks=1)
        assert place(state, "r") == expected


def test_with_a_temperature_not_only_the_cheapest_gets_work() -> None:
    state = router(card("d1"), card("d2"), temperature=1.0)
    holds(state, "d1", 20)
    seen = Counter[str]()
    for number in range(100):
        seen[place(state, f"r{number}")] += 1
        end(state, f"r{number}")
    assert seen["d1"] > seen["d2"] > 5


@pytest.mark.parametrize("policy", ["round-robin", "random"])
def test_policies_without_load_let_no_request_wait(policy: Policy) -> None:
    state = router(card("d1"), card("d2"), policy=policy, saturation=ONE_AT_A_TIME)
    for number in range(10):
        submit(state, f"r{number}", prompt(number))
    assert len(state.dispatch(0.0)) == 10


# --- who may take it -----------------------------------------------------------------------------------------------


def test_a_pin_is_obeyed_by_id_and_by_name() -> None:
    state = router(card("d1"), card("x2"))
    assert place(state, "r1", pin=WorkerId("x2")) == "x2"
    assert place(state, "r2", pin=WorkerId("x")) == "x2"
    with pytest.raises(NoWorkerError, match=r"no worker 'y' decodes the model 'm'; there are: d, x"):
        state.place(request("r3", pin=WorkerId("y")), 0.0)


def test_an_impossible_pin_is_refused_with_its_reason() -> None:
    state = router(card("d1", dp_size=3), card("x2"))
    with pytest.raises(NoWorkerError, match="the worker 'd1' has no rank 3; it has 3, counted from 0"):
        state.place(request("r1", pin=WorkerId("d1"), pin_rank=3), 0.0)
    with pytest.raises(NoWorkerError, match="the worker 'x2' has failed this request"):
        state.place(request("r2", pin=WorkerId("x2"), exclude=(WorkerId("x2"),)), 0.0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.booleans())
def test_try_place_places_like_submit_and_dispatch(starts: list[int], disaggregated: bool) -> None:
    """The short cut `try_place` decides as the queue would."""
    cards = [*([card("p1", P)] if disaggregated else []), card("d1"), card("d2")]
    waiting, at_once = router(*cards), router(*cards)
    for number, start in enumerate(starts):
        name = f"r{number}"
        submit(waiting, name, prompt(start))
        placed = at_once.try_place(request(name, prompt(start)), 0.0)
        [outcome] = waiting.dispatch(0.0)
        assert placed == outcome.result
        assert at_once.load.shares() == waiting.load.shares()


def test_try_place_places_nothing_that_must_wait() -> None:
    state = router(card("d1"), saturation=ONE_AT_A_TIME)
    assert state.try_place(request("r1", prompt(1)), 0.0) is not None
    assert state.try_place(request("r2", prompt(2)), 0.0) is None
    submit(state, "r3", prompt(3))
    end(state, "r1")
    assert state.try_place(request("r2", prompt(2)), 0.0) is None, "another one waits"


def test_a_pin_to_a_rank_is_obeyed() -> None:
    state = router(card("d1", dp_size=3), card("d2", dp_size=3))
    assert {state.place(request(f"r{n}", pin=WorkerId("d1"), pin_rank=2), 0.0).decode.dp_rank for n in range(3)} == {2}
    with pytest.raises(NoWorkerError):
        state.place(request("r", pin=WorkerId("d1"), pin_rank=3), 0.0)


def test_a_rank_without_a_pin_says_nothing() -> None:
    state = router(card("d1", dp_size=2))
    assert {state.place(request(f"r{n}", prompt(n), pin_rank=1), 0.0).decode.dp_rank for n in range(2)} == {0, 1}


def test_a_pin_to_a_prefill_worker_is_obeyed() -> None:
    state = router(card("p1", P), card("p2", P), card("d"))
    holds(state, "d", 20)
    for number in range(3):
        assert where(state.place(request(f"r{number}", pin_prefill=WorkerId("p2")), 0.0)) == ("p2", "d")
    with pytest.raises(NoWorkerError, match="no prefill worker 'p3'"):
        state.place(request("r", pin_prefill=WorkerId("p3")), 0.0)


def test_a_pinned_rank_is_the_decode_workers() -> None:
    state = router(card("p", P), card("d", dp_size=2))
    placed = state.place(request(pin=WorkerId("d"), pin_rank=1, pin_prefill=WorkerId("p")), 0.0)
    assert placed.prefill is not None
    assert (placed.prefill.dp_rank, placed.decode.dp_rank) == (0, 1)


def test_pinning_a_prefill_worker_nobody_can_pull_from_fails() -> None:
    state = router(card("p", P, transfer="nixl"), card("d"))
    with pytest.raises(NoWorkerError, match="can pull KV over 'nixl' from 'p'"):
        state.place(request(pin_prefill=WorkerId("p")), 0.0)


def test_to_decode_on_a_prefill_worker_is_refused() -> None:
    with pytest.raises(NoWorkerError):
        router(card("p", P), card("d")).place(request(pin=WorkerId("p")), 0.0)


def test_only_the_allowed_workers_decode() -> None:
    state = router(*[card(f"d{number}") for number in range(40)], card("p", P))
    assert {place(state, f"r{n}", prompt(n), among=(WorkerId("d7"), WorkerId("gone"))) for n in range(5)} == {"d7"}
    with pytest.raises(NoWorkerError, match="none of the 1 workers that the caller allows"):
        state.place(request("r", among=(WorkerId("gone"),)), 0.0)
    with pytest.raises(NoWorkerError, match="allows"):
        state.place(request("r", among=()), 0.0)


def test_a_worker_that_failed_a_request_is_excluded() -> None:
    state = router(card("d1"), card("d2"))
    assert place(state, "r", exclude=(WorkerId("d1"),)) == "d2"
    with pytest.raises(NoWorkerError, match="has failed this request"):
        state.place(request(exclude=(WorkerId("d1"), WorkerId("d2"))), 0.0)


def test_a_pinned_worker_that_failed_the_request_is_excluded() -> None:
    state = router(card("d1"), card("d2"))
    with pytest.raises(NoWorkerError):
        state.place(request(pin=WorkerId("d1"), exclude=(WorkerId("d1"),)), 0.0)


def test_without_its_prefill_worker_the_decode_worker_computes() -> None:
    placed = router(card("p", P), card("d")).place(request(exclude=(WorkerId("p"),)), 0.0)
    assert where(placed) == (None, "d")
    assert placed.reason == "no prefill worker is ready"


def test_a_worker_that_failed_is_avoided_for_a_while() -> None:
    state = router(card("d1"), card("d2"), suspect_s=2.0)
    holds(state, "d1", 20)
    place(state, "r1", now=10.0, exclude=(WorkerId("d1"),))
    assert place(state, "r2", now=11.9) == "d2"
    end(state, "r1", "r2", ok=False)
    assert place(state, "r3", now=12.1) == "d1"


def test_an_avoided_worker_is_used_if_it_is_alone() -> None:
    state = router(card("d1"))
    with pytest.raises(NoWorkerError):
        state.place(request("r1", exclude=(WorkerId("d1"),)), 10.0)
    assert place(state, "r2", now=10.1) == "d1"


def test_decode_workers_compute_while_the_only_prefill_worker_is_avoided() -> None:
    """Its card may stand for a dead process: each request would try it first."""
    state = router(card("p", P), card("d"), suspect_s=2.0)
    asked = request("r0", prompt(1, 40), exclude=(WorkerId("p"),))
    state.place(asked, 10.0)
    assert where(state.place(request("r1", prompt(2, 40), disaggregate=None), 10.1)) == (None, "d")
    assert where(state.place(request("r2", prompt(3, 40), disaggregate=True), 10.1)) == ("p", "d"), "as asked for"
    assert where(state.place(request("r3", prompt(4, 40), pin_prefill=WorkerId("p")), 10.1)) == ("p", "d")
    end(state, "r0", "r1", "r2", "r3", ok=False)
    assert where(state.place(request("r4", prompt(5, 40), disaggregate=None), 12.2)) == ("p", "d")


def test_a_placement_that_fails_books_nothing() -> None:
    state = router()
    with pytest.raises(NoWorkerError):
        state.place(request(), 0.0)
    assert len(state.load) == 0


# --- adapters --------------------------------------------------------------------------------------------------------


def test_only_workers_that_have_the_adapter_are_given_its_requests() -> None:
    state = router(card("a", A), card("b", A, loras=("poet", "critic")), card("c", A, loras=("critic",)))
    holds(state, "a", 20)
    assert {place(state, f"r{i}", lora="poet") for i in range(5)} == {"b"}
    assert {place(state, f"s{i}", lora="critic") for i in range(5)} <= {"b", "c"}
    assert place(state, "plain") == "a"


def test_both_legs_need_the_adapter() -> None:
    without = router(card("p", P), card("d", loras=("poet",)))
    assert where(without.place(request(lora="poet"), 0.0)) == (None, "d")
    both = router(card("p1", P), card("p2", P, loras=("poet",)), card("d", loras=("poet",)))
    assert where(both.place(request(lora="poet"), 0.0)) == ("p2", "d")


def test_an_unknown_adapter_is_named_with_the_known_ones() -> None:
    state = router(card("a", A, loras=("poet", "critic")), card("b", A), card("p", P, loras=("painter",)))
    with pytest.raises(
        NoWorkerError, match="decodes the model 'm' with the adapter 'painter' is ready; adapters: critic, poet"
    ):
        place(state, "r", lora="painter")
    with pytest.raises(NoWorkerError, match="with the adapter 'painter'"):
        submit(state, "r", lora="painter")
    with pytest.raises(
        NoWorkerError, match="no worker 'b' decodes the model 'm' with the adapter 'poet'; there are: a"
    ):
        place(state, "r", lora="poet", pin=WorkerId("b"))
    with pytest.raises(NoWorkerError, match="'m' with the adapter 'poet' that could decode has failed"):
        place(state, "r", lora="poet", exclude=(WorkerId("a"),))
