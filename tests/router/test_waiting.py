"""Requests wait in the router while workers are full, in the order of the queue, until their deadline."""

from collections import Counter

import pytest

from kvmesh.protocol.errors import DeadlineExceededError, InvalidRequestError, NoWorkerError, OverloadedError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.router.core import RESERVE_AFTER_S, RouterState
from kvmesh.router.load import Share
from kvmesh.router.policies import Policy
from kvmesh.router.queue import QueueRules
from kvmesh.router.rules import Saturation
from tests.support.routing import (
    NEVER,
    ONE_AT_A_TIME,
    TOKENS,
    P,
    at,
    busy,
    card,
    done,
    end,
    holds,
    order,
    place,
    prompt,
    request,
    results,
    router,
    submit,
)

# --- waiting -------------------------------------------------------------------------------------------------------


def test_no_request_waits_while_a_worker_has_room() -> None:
    state = router(*[card(f"d{n}") for n in range(3)], saturation=ONE_AT_A_TIME)
    for number in range(5):
        submit(state, f"r{number}", prompt(number))
    assert sorted(results(state.dispatch(0.0)).values()) == ["d0", "d1", "d2"]
    assert state.waiting == 2


def test_a_waiting_request_goes_when_a_worker_has_room() -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME)
    for number in range(3):
        submit(state, f"r{number}", prompt(number))
    first = results(state.dispatch(0.0))
    [waiting] = {"r0", "r1", "r2"} - set(first)
    assert state.dispatch(0.0) == []
    done(state, next(iter(first)))
    assert results(state.dispatch(0.0)) == {waiting: first[next(iter(first))]}
    assert state.waiting == 0


def test_a_new_request_goes_to_a_worker_that_joins() -> None:
    state = router(card("d1"), saturation=ONE_AT_A_TIME)
    submit(state, "r0", prompt(0))
    submit(state, "r1", prompt(1))
    state.dispatch(0.0)
    state.add_worker(card("d2"))
    assert results(state.dispatch(0.0)) == {"r1": "d2"}


def test_a_worker_gets_prompts_until_its_token_limit_is_passed() -> None:
    state = router(card("d"), saturation=Saturation(queued_tokens=1000))
    for number in range(10):
        submit(state, f"r{number}", prompt(number))  # 320 tokens each
    assert len(state.dispatch(0.0)) == 4


@pytest.mark.parametrize(("capacity", "requests"), [(0.5, 1), (1.0, 2), (2.0, 4)])
def test_the_limit_of_queued_tokens_grows_with_capacity(capacity: float, requests: int) -> None:
    state = router(card("usual"), card("other", capacity=capacity), saturation=Saturation(queued_tokens=640))
    for number in range(10):
        submit(state, f"r{number}", prompt(number))
    assert Counter(results(state.dispatch(0.0)).values()) == {"usual": 2, "other": requests}


def test_a_worker_with_all_its_sequences_running_is_given_nothing() -> None:
    state = router(card("d", max_num_seqs=2))
    for number in range(3):
        submit(state, f"r{number}", prompt(number))
    assert set(results(state.dispatch(0.0))) == {"r0", "r1"}
    done(state, "r0", "r1")
    assert state.dispatch(0.0) == []
    end(state, "r0")
    assert set(results(state.dispatch(0.0))) == {"r2"}


def test_a_worker_short_of_blocks_gets_only_what_fits() -> None:
    state = router(card("d", total_blocks=50))
    place(state, "r0", prompt(0, 30))
    done(state, "r0")
    submit(state, "r1", prompt(1, 20))  # with the answer's first block one more than is free
    assert (state.dispatch(0.0), state.waiting) == ([], 1)
    submit(state, "r2", prompt(2, 19))
    assert set(results(state.dispatch(0.0))) == {"r2"}
    end(state, "r0", "r2")
    assert set(results(state.dispatch(0.0))) == {"r1"}


def test_blocks_shared_with_a_running_request_count_once() -> None:
    state = router(card("d", total_blocks=50))
    place(state, "r0", prompt(0, 30))
    done(state, "r0")
    submit(state, "r1", prompt(0, 30) + prompt(1, 15))
    assert set(results(state.dispatch(0.0))) == {"r1"}


def test_an_idle_worker_takes_a_prompt_however_large() -> None:
    state = router(card("d", total_blocks=5), saturation=ONE_AT_A_TIME)
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d"}


def test_only_the_legs_that_a_worker_does_fill_it() -> None:
    """A prefill worker has no sequences to run out of, a decode worker no prompts to queue."""
    state = router(card("p", P, max_num_seqs=1, total_blocks=5), card("d"), saturation=Saturation(queued_tokens=1000))
    for number in range(3):
        submit(state, f"r{number}", prompt(number), disaggregate=True)
    assert len(state.dispatch(0.0)) == 3


def test_a_disaggregated_request_waits_for_both_its_workers() -> None:
    state = router(card("p", P), card("d", max_num_seqs=1), saturation=ONE_AT_A_TIME)
    for number in range(2):
        submit(state, f"r{number}", prompt(number), disaggregate=True)
    assert set(results(state.dispatch(0.0))) == {"r0"}
    done(state, "r0")
    assert state.dispatch(0.0) == []
    end(state, "r0")
    assert set(results(state.dispatch(0.0))) == {"r1"}


def test_a_worker_full_of_prompts_can_still_decode() -> None:
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    submit(state, "r", disaggregate=True)
    assert results(state.dispatch(0.0)) == {"r": "d"}


def test_without_room_to_pull_one_worker_does_both_halves() -> None:
    state = router(card("p", P), card("d1", max_num_seqs=1), card("d2", transfer="nixl"))
    done(state, busy(state, "d1"))
    submit(state, "r1", prompt(1))
    submit(state, "r2", prompt(2), disaggregate=True)
    assert results(state.dispatch(0.0)) == {"r1": "d2"}


def test_a_worker_has_room_again_as_time_passes() -> None:
    state = router(card("d"), saturation=Saturation(queued_tokens=160))
    done(state, busy(state, "d", 1, blocks=10), now=1.0)  # 160 tokens in a second
    busy(state, "d", 2, blocks=20, now=10.0)
    submit(state, "r", prompt(3), now=10.0)
    assert state.dispatch(10.9) == []
    assert results(state.dispatch(11.1)) == {"r": "d"}


def test_load_of_other_routers_saturates_too() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    state.load.set_elsewhere("two", {at("d"): Share(10, 0, 0)}, 0.0)
    submit(state, "r")
    assert state.dispatch(0.0) == []
    state.load.set_elsewhere("two", {}, 0.0)
    assert results(state.dispatch(0.0)) == {"r": "d"}


def test_without_saturation_no_request_waits() -> None:
    state = router(card("d", max_num_seqs=1, total_blocks=5), saturation=None)
    for number in range(50):
        submit(state, f"r{number}", prompt(number))
    assert len(state.dispatch(0.0)) == 50


def test_place_ignores_the_queue_and_full_workers() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    submit(state, "r0", prompt(0))
    assert place(state, "r1", prompt(1)) == "d"
    assert state.waiting == 1


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "power-of-two"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_request_waits_for_a_cheap_full_worker(policy: Policy, temperature: float) -> None:
    """The small worker has no sequence free, though it has next to nothing to do."""
    state = router(
        card("small1", max_num_seqs=1),
        card("small2", max_num_seqs=1),
        card("d"),
        policy=policy,
        temperature=temperature,
    )
    for name in ("small1", "small2"):
        done(state, busy(state, name, blocks=1))
    for number in range(5):
        busy(state, "d", number)
    for number in range(6, 12):
        submit(state, f"r{number}", prompt(number, 2))
    assert set(results(state.dispatch(0.0)).values()) == {"d"}
    assert state.waiting == 0


# --- waiting for one's prefix --------------------------------------------------------------------------------------


def prefix_at_a_busy_worker(queue_blocks: int = 5, **rules: object) -> RouterState:
    """Return a router whose d1 has a prefix of 20 blocks and `queue_blocks` to compute, and whose d2 is idle."""
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME, **rules)
    holds(state, "d1", 20)
    busy(state, "d1", blocks=queue_blocks)
    return state


def test_a_request_waits_for_its_prefix_if_others_cost_more() -> None:
    state = prefix_at_a_busy_worker()
    submit(state, "r")
    assert (state.dispatch(0.0), state.waiting) == ([], 1)
    done(state, "busy d1 99")
    assert results(state.dispatch(0.0)) == {"r": "d1"}


def test_it_does_not_hold_up_others() -> None:
    state = prefix_at_a_busy_worker()
    for number in range(3):
        submit(state, f"sibling {number}")
    submit(state, "other", prompt(1))
    assert results(state.dispatch(0.0)) == {"other": "d2"}


def test_a_too_long_wait_sends_a_request_elsewhere() -> None:
    state = prefix_at_a_busy_worker(queue_blocks=30)
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_waiting_siblings_make_the_wait_longer() -> None:
    """The siblings have 10 blocks each to compute. Behind two of them it is better to compute all elsewhere."""
    state = prefix_at_a_busy_worker(recompute_price=1.0)
    for number in range(4):
        submit(state, f"r{number}", TOKENS + prompt(number + 1, 10), now=number / 100)
    assert results(state.dispatch(1.0)) == {"r2": "d2"}


def test_a_placement_does_not_lengthen_earlier_waits() -> None:
    """Waiting requests are tried again after it, and do not count as ahead of themselves."""
    state = prefix_at_a_busy_worker(recompute_price=1.0)
    state.add_worker(card("d3"))
    for number in range(2):
        submit(state, f"r{number}", TOKENS + prompt(number + 1, 10), now=number / 100)
    submit(state, "other", prompt(9), now=0.5)
    assert set(results(state.dispatch(1.0))) == {"other"}


def test_a_policy_without_caches_waits_for_no_prefix() -> None:
    state = router(card("d1"), card("d2"), policy="least-loaded", saturation=Saturation(queued_tokens=160))
    holds(state, "d1", 20)
    busy(state, "d1", blocks=10)
    for number in range(1, 6):
        done(state, busy(state, "d2", number, blocks=60))
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_no_prefix_is_worth_waiting_for_a_sequence() -> None:
    """A sequence may take as long as an answer, which no cost knows."""
    state = router(card("d1", max_num_seqs=1), card("d2"))
    holds(state, "d1", 20)
    done(state, busy(state, "d1", blocks=1))
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_without_a_prefix_no_request_waits_for_the_cheapest() -> None:
    state = router(card("d1"), card("d2"), saturation=Saturation(queued_tokens=320))
    busy(state, "d1", 1)  # its limit: 20 blocks to compute
    for number in range(2, 9):
        done(state, busy(state, "d2", number, blocks=60))  # holds so much more that it costs more
    explanation = state.preview(request(), 0.0).explanation
    assert explanation is not None
    assert [one.note for one in explanation.candidates] == ["full", "chosen"], "the cheapest is full"
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_waiting_for_decode_does_not_hold_the_prefill_worker() -> None:
    state = router(card("p", P), card("d1", max_num_seqs=1), card("d2"), saturation=ONE_AT_A_TIME)
    done(state, busy(state, "d1"))
    submit(state, "waits", prompt(1), pin=WorkerId("d1"), disaggregate=True)
    submit(state, "goes", prompt(2), now=1.0, disaggregate=True)
    assert results(state.dispatch(1.0)) == {"goes": "d2"}


def test_a_pinned_request_waits_without_holding_up_others() -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME)
    busy(state, "d1")
    submit(state, "pinned", prompt(1), pin=WorkerId("d1"), priority=5)
    submit(state, "other", prompt(2))
    assert results(state.dispatch(0.0)) == {"other": "d2"}
    done(state, "busy d1 99")
    assert results(state.dispatch(0.0)) == {"pinned": "d1"}


@pytest.mark.parametrize("disaggregate", [False, True])
def test_a_large_request_is_not_starved_by_small_ones(disaggregate: bool) -> None:
    state = router(card("p", P), card("d", total_blocks=50), queue=QueueRules(order="fcfs"))
    place(state, "r0", prompt(0, 30))
    done(state, "r0")
    submit(state, "large", prompt(1, 40), disaggregate=disaggregate)
    for now, goes in ((RESERVE_AFTER_S, True), (RESERVE_AFTER_S + 0.1, False)):
        submit(state, "small", prompt(2, 2), now=now, disaggregate=disaggregate)
        assert results(state.dispatch(now)) == ({"small": "d"} if goes else {})
        end(state, "small")
    submit(state, "small", prompt(2, 2), now=9.0, disaggregate=disaggregate)
    end(state, "r0")
    assert list(results(state.dispatch(9.0))) == ["large", "small"]


@pytest.mark.parametrize("reason", ["prefix", "session"])
def test_no_request_waits_for_a_reserved_worker(reason: str) -> None:
    state = router(card("d1", total_blocks=60), card("d2"), affinity_ttl_s=60.0, recompute_price=10.0)
    for name, tokens in (("session", prompt(8, 1)), ("r0", prompt(0, 30))):
        place(state, name, tokens, session=name, pin=WorkerId("d1"))
        done(state, name)
    end(state, "session")
    submit(state, "large", prompt(1, 40), pin=WorkerId("d1"))
    assert state.dispatch(6.0) == []
    tokens, session = (prompt(0, 30), "") if reason == "prefix" else (prompt(9, 2), "session")
    submit(state, "small", tokens, now=6.0, session=session)
    assert results(state.dispatch(6.0)) == {"small": "d2"}


def test_no_worker_is_reserved_while_another_has_room() -> None:
    state = router(card("d1", max_num_seqs=1), card("d2"))
    done(state, busy(state, "d1"))
    submit(state, "pinned", prompt(1), pin=WorkerId("d1"))
    submit(state, "other", prompt(2), now=60.0)
    assert results(state.dispatch(60.0)) == {"other": "d2"}


def test_waiting_for_a_prompt_reserves_nothing() -> None:
    """Otherwise a decode worker would idle until a prefill worker is free."""
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME)
    place(state, "busy p", prompt(8), disaggregate=True)
    submit(state, "waits", prompt(1), disaggregate=True)
    submit(state, "goes", prompt(2), now=60.0, disaggregate=False)
    assert results(state.dispatch(60.0)) == {"goes": "d"}


def test_after_a_dispatch_no_placeable_request_waits() -> None:
    """The rule holds also if many requests go and some before them cannot."""
    state = router(card("busy"), *[card(f"d{n}") for n in range(60)], saturation=ONE_AT_A_TIME)
    busy(state, "busy")
    for number in range(3):
        submit(state, f"pinned {number}", prompt(number), pin=WorkerId("busy"), priority=1)
    for number in range(10, 70):
        submit(state, f"r{number}", prompt(number))
    assert len(results(state.dispatch(0.0))) == 60
    assert state.waiting == 3
    assert state.dispatch(0.0) == []


# --- who is next ---------------------------------------------------------------------------------------------------


def test_short_prompts_go_first_long_ones_in_time() -> None:
    rules = QueueRules(order="wspt", aging_tokens_per_s=320.0)
    state = router(card("d"), saturation=ONE_AT_A_TIME, queue=rules)
    submit(state, "long", prompt(1, 40), now=0.0)  # 2 s of aging
    submit(state, "short", prompt(2, 2), now=0.5)
    submit(state, "late", prompt(3, 2), now=2.0)
    assert order(state, ["long", "short", "late"]) == ["short", "long", "late"]


def test_what_is_cached_anywhere_makes_a_prompt_short() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    holds(state, "d", 38, prompt(1, 40))
    submit(state, "uncached", prompt(2, 5))
    submit(state, "cached", prompt(1, 40))
    assert order(state, ["uncached", "cached"]) == ["cached", "uncached"]


def test_first_come_first_served_can_be_asked_for() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME, queue=QueueRules(order="fcfs"))
    for number, blocks in enumerate((40, 2, 10)):
        submit(state, f"r{number}", prompt(number, blocks), now=number / 10)
    assert order(state, ["r0", "r1", "r2"]) == ["r0", "r1", "r2"]


def test_a_higher_priority_goes_first() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    for number, priority in enumerate((0, -1, 7, 3)):
        submit(state, f"r{number}", prompt(number), priority=priority)
    assert order(state, ["r0", "r1", "r2", "r3"]) == ["r2", "r3", "r0", "r1"]


def test_tenants_take_turns() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME, queue=QueueRules(order="fcfs"))
    for number in range(3):
        submit(state, f"many {number}", prompt(number), tenant="many", now=0.0)
    submit(state, "few 0", prompt(9), tenant="few", now=0.5)
    names = order(state, ["many 0", "many 1", "many 2", "few 0"])
    assert names.index("few 0") == 1


def test_tenants_pay_for_their_answers_too() -> None:
    for osl_tokens, first in ((0, "a"), (10_000, "b")):
        state = router(card("d"), saturation=ONE_AT_A_TIME, queue=QueueRules(order="fcfs"))
        place(state, "answer", prompt(8), tenant="a")
        submit(state, "a", prompt(1), now=0.0, tenant="a")
        submit(state, "b", prompt(2), now=0.5, tenant="b")
        state.progress(RequestId("answer"), osl_tokens, 0.5)
        done(state, "answer")
        assert order(state, ["a", "b"])[0] == first


# --- who waits no longer -------------------------------------------------------------------------------------------


def test_a_request_whose_deadline_passes_fails() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    submit(state, "r0", now=1.0, deadline_s=9.0)
    submit(state, "r1", prompt(1), now=2.0, deadline_s=8.0)
    assert state.next_deadline() == 8.0
    assert state.dispatch(7.9) == []
    [(name, error)] = state.dispatch(8.0)
    assert name == "r1"
    assert isinstance(error, DeadlineExceededError)
    assert "waited 6.0 s" in str(error)
    assert results(state.dispatch(100.0)) == {"r0": "deadline_exceeded"}
    assert (state.waiting, state.next_deadline()) == (0, None)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME, queue=QueueRules(max_requests=2))
    busy(state, "d")
    submit(state, "r0", prompt(0))
    submit(state, "r1", prompt(1))
    with pytest.raises(OverloadedError) as refused:
        submit(state, "r2", prompt(2), now=5.0)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1
    assert state.waiting == 2


def test_a_higher_priority_displaces_a_lower_one() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME, queue=QueueRules(max_requests=1))
    busy(state, "d")
    submit(state, "low", prompt(0))
    [(name, error)] = state.submit(request("high", prompt(1), priority=1), 1.0)
    assert name == "low"
    assert isinstance(error, OverloadedError)
    assert state.waiting == 1


def test_a_request_that_waits_can_be_cancelled() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    submit(state, "r", deadline_s=50.0)
    end(state, "r")
    assert (state.waiting, state.next_deadline()) == (0, None)
    end(state, "busy d 99")
    assert state.dispatch(0.0) == []


@pytest.mark.parametrize("waited_s", [0.0, RESERVE_AFTER_S + 1])
def test_after_a_cancelled_pinned_request_the_next_one_goes(waited_s: float) -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME)
    busy(state, "d1")
    busy(state, "d2")
    submit(state, "pinned", prompt(1), pin=WorkerId("d1"), priority=5)
    submit(state, "next", prompt(2), pin=WorkerId("d1"))
    submit(state, "other", prompt(3))
    assert state.dispatch(waited_s) == []
    end(state, "pinned")
    done(state, "busy d1 99")
    assert results(state.dispatch(waited_s)) == {"next": "d1"}
    done(state, "busy d2 99")
    assert results(state.dispatch(waited_s)) == {"other": "d2"}


def test_one_request_cannot_wait_twice() -> None:
    state = router(card("d"))
    submit(state, "r")
    with pytest.raises(InvalidRequestError, match="waits in the queue already"):
        submit(state, "r")


@pytest.mark.parametrize(
    "fields",
    [{"pin": "d9"}, {"pin_prefill": "d1"}, {"pin": "d1", "pin_rank": 1}, {"exclude": ("d1", "d2")}, {"model": "x"}],
)
def test_a_request_without_a_possible_worker_is_refused_at_once(fields: dict[str, object]) -> None:
    state = router(card("d1"), card("d2"))
    with pytest.raises(NoWorkerError):
        submit(state, "r", **fields)
    assert state.waiting == 0


@pytest.mark.parametrize(
    "fields", [{"pin": "d1"}, {"pin": "d1", "pin_rank": 0}, {"pin_prefill": "p1"}, {"exclude": ("d2", "p1")}]
)
def test_a_waiting_request_fails_when_its_workers_leave(
    fields: dict[str, object],
) -> None:
    state = router(card("p1", P), card("d1"), card("d2"), saturation=ONE_AT_A_TIME)
    for number, worker in enumerate(("d1", "d2")):
        busy(state, worker, number + 1)
    for number in (8, 9):
        place(state, f"busy p1 {number}", prompt(number), disaggregate=True, pin=WorkerId("d2"))
    submit(state, "r", **fields)
    assert state.dispatch(0.0) == []
    for worker in ("p1", "d1"):
        state.remove_worker(WorkerId(worker))
    assert results(state.dispatch(0.0)) == {"r": "no_worker"}
    assert state.waiting == 0


def test_the_last_worker_leaving_fails_all_waiting_requests() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    for number in range(3):
        submit(state, f"r{number}", prompt(number))
    state.remove_worker(WorkerId("d"))
    assert set(results(state.dispatch(0.0)).values()) == {"no_worker"}
    assert (state.waiting, state.fleet.indexes) == (0, {})


def test_an_empty_model_is_forgotten_with_its_last_request() -> None:
    state = router(card("d"))
    submit(state, "r")
    state.remove_worker(WorkerId("d"))
    assert (set(state.fleet.indexes), state.waiting) == (set(), 1)
    end(state, "r")
    assert state.fleet.indexes == {}


def test_a_worker_that_comes_back_serves_waiting_requests() -> None:
    state = router(card("d1"))
    submit(state, "r")
    state.remove_worker(WorkerId("d1"))
    state.add_worker(card("d2"))
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_a_waiting_request_goes_to_a_worker_trusted_again() -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME, suspect_s=2.0)
    busy(state, "d2")
    place(state, "failed", prompt(8, 0), now=10.0, exclude=(WorkerId("d1"),))
    submit(state, "r", now=10.0)
    assert state.dispatch(10.0) == []
    assert state.next_deadline() == 12.0
    assert results(state.dispatch(12.0)) == {"r": "d1"}
    assert state.next_deadline() is None


def test_a_deadline_that_was_met_is_not_asked_for_again() -> None:
    """Otherwise the shell would come back at once, again and again."""
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME, suspect_s=2.0)
    busy(state, "d1")
    busy(state, "d2")
    submit(state, "r", now=10.0, exclude=(WorkerId("d1"),))
    state.dispatch(12.0)
    assert state.next_deadline() == NEVER
