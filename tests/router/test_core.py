"""The router as a state machine: who gets a request, who waits, and what that changes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.formats import encode_payload
from protocol.errors import DeadlineExceededError, InvalidRequestError, NoWorkerError, OverloadedError
from protocol.events import Cleared
from protocol.ids import RequestId, WorkerId
from router.core import RESERVE_AFTER_S, RouterState
from router.disaggregation import LocalPrefill
from router.index import Holder
from router.load import Share
from router.policies import Policy
from router.queue import QueueRules
from router.rules import Saturation
from router.selection import Weights
from tests.support.routing import (
    BLOCK,
    TOKENS,
    A,
    P,
    card,
    holds,
    prompt,
    request,
    results,
    router,
    where,
)

ONE_AT_A_TIME = Saturation(queued_tokens=1)  # a worker that computes a prompt is given no other
NEVER: float = 1e9


def at(worker: str, dp_rank: int = 0) -> Holder:
    return Holder(WorkerId(worker), dp_rank)


def load_of(state: RouterState, worker: str) -> Share:
    return state.load.of(at(worker)).own


def place(state: RouterState, name: str, tokens: list[int] = TOKENS, now: float = 0.0, **fields: object) -> str:
    """Where it decodes."""
    return where(state.place(request(name, tokens, **fields), now))[1]


def submit(state: RouterState, name: str, tokens: list[int] = TOKENS, now: float = 0.0, **fields: object) -> None:
    deadline_s = fields.pop("deadline_s", NEVER)
    state.submit(request(name, tokens, **fields), now, deadline_s)  # type: ignore[arg-type]


def end(state: RouterState, *names: str, now: float = 0.0, ok: bool = True) -> None:
    for name in names:
        state.free(RequestId(name), now, ok=ok)


def done(state: RouterState, *names: str, now: float = 0.0) -> None:
    """Their first tokens are there."""
    for name in names:
        state.prefill_done(RequestId(name), now)


def busy(state: RouterState, worker: str, number: int = 99, blocks: int = 20, now: float = 0.0) -> str:
    """Give a worker a prompt of its own to compute."""
    fields = {"pin": WorkerId(worker), "disaggregate": False}
    place(state, f"busy {worker} {number}", prompt(number, blocks), now, **fields)
    return f"busy {worker} {number}"


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


def test_a_decode_worker_helps_out_where_the_prefill_workers_are_full() -> None:
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME)
    assert where(state.place(request("r1", prompt(1)), 0.0)) == ("p", "d")
    placed = state.place(request("r2", prompt(2)), 0.0)
    assert where(placed) == (None, "d")
    assert placed.reason.startswith("prefill workers are the bottleneck: 640 tokens to compute there")
    assert placed.reason.endswith("320 here")
    done(state, "r1")
    assert where(state.place(request("r3", prompt(3)), 0.0)) == ("p", "d")


def test_a_fast_decode_worker_helps_out_though_it_has_more_to_compute() -> None:
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
    with pytest.raises(NoWorkerError, match="there are: none"):
        state.place(request(), 0.0)


def test_with_prefill_workers_alone_nothing_can_be_answered() -> None:
    with pytest.raises(NoWorkerError, match="there are: prefill"):
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


def test_the_part_of_a_prompt_that_must_have_been_computed_by_now_counts_no_more() -> None:
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
def test_a_worker_twice_as_fast_gets_about_twice_the_work(policy: Policy) -> None:
    state = router(card("slow"), card("fast", capacity=2.0), saturation=None, policy=policy)
    for number in range(90):
        place(state, f"r{number}", prompt(number, 1 + number % 7))
    shares = [load_of(state, name).queued_tokens for name in ("slow", "fast")]
    assert shares[1] == pytest.approx(2 * shares[0], rel=0.1)


@pytest.mark.parametrize(("medium", "queue_blocks"), [("GPU", 15), ("CPU", 11), ("DISK", 3), ("OBJECT", 1)])
def test_a_prefix_is_worth_the_longer_a_queue_the_faster_the_tier_that_holds_it(medium: str, queue_blocks: int) -> None:
    """Of 16 blocks, less than the shares 1, 0.75, 0.25 and 0.1 of them is saved by queueing there."""
    weights = Weights(decode=0.0)
    for blocks, expected in ((queue_blocks, "d2"), (queue_blocks + 2, "d1")):
        state = router(card("d1"), card("d2"), weights=weights, saturation=None, recompute_price=1.0)
        holds(state, "d2", 16, medium=medium)
        busy(state, "d2", blocks=blocks)
        assert place(state, "r") == expected


def test_a_prompt_in_a_slow_tier_is_not_to_be_computed() -> None:
    state = router(card("d"))
    holds(state, "d", 12, medium="DISK")
    placed = state.place(request(), 0.0)
    assert load_of(state, "d").queued_tokens == 8 * BLOCK
    assert placed.decode.overlap_blocks == 0, "what is on the device"


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


def test_a_hot_prefix_is_copied_while_a_private_conversation_stays_where_it_is() -> None:
    state = router(card("d1"), card("d2"), weights=Weights(decode=0.0), saturation=None, predict_ttl_s=0.0)
    hot, private = prompt(1), prompt(2)
    for tokens in (hot, private):
        holds(state, "d1", 20, tokens)
    asked_for(state, hot, "d1", times=20, now=0.0)
    busy(state, "d1", blocks=10)
    assert place(state, "hot", hot) == "d2"
    assert place(state, "private", private, exclude=()) == "d1"


def test_a_hot_prefix_that_has_copies_enough_is_not_copied_again() -> None:
    state = router(*[card(f"d{n}") for n in range(6)], weights=Weights(decode=0.0), predict_ttl_s=0.0)
    for worker in ("d1", "d2", "d3", "d4", "d5"):
        holds(state, worker, 20)
        busy(state, worker, blocks=12)
    asked_for(state, TOKENS, "d1", times=2, now=0.0)
    assert place(state, "r", TOKENS) in ("d1", "d2", "d3", "d4", "d5")


def test_the_busier_the_workers_the_longer_one_waits_for_a_private_prefix() -> None:
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
def test_policies_that_look_at_nothing_let_nobody_wait(policy: Policy) -> None:
    state = router(card("d1"), card("d2"), policy=policy, saturation=ONE_AT_A_TIME)
    for number in range(10):
        submit(state, f"r{number}", prompt(number))
    assert len(state.dispatch(0.0)) == 10


# --- who may take it -----------------------------------------------------------------------------------------------


def test_a_pin_is_obeyed_by_id_and_by_name() -> None:
    state = router(card("d1"), card("x2"))
    assert place(state, "r1", pin=WorkerId("x2")) == "x2"
    assert place(state, "r2", pin=WorkerId("x")) == "x2"
    with pytest.raises(NoWorkerError, match=r"no decode worker 'y' serves 'm'; there are: d, x"):
        state.place(request("r3", pin=WorkerId("y")), 0.0)


def test_a_pin_that_cannot_be_obeyed_is_refused_for_its_own_reason() -> None:
    state = router(card("d1", dp_size=3), card("x2"))
    with pytest.raises(NoWorkerError, match="the worker 'd1' has no rank 3; it has 3, counted from 0"):
        state.place(request("r1", pin=WorkerId("d1"), pin_rank=3), 0.0)
    with pytest.raises(NoWorkerError, match="the worker 'x2' has failed this request"):
        state.place(request("r2", pin=WorkerId("x2"), exclude=(WorkerId("x2"),)), 0.0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.booleans())
def test_who_comes_alone_is_placed_as_if_it_had_waited_for_a_dispatch(starts: list[int], disaggregated: bool) -> None:
    """`try_place` is a short cut, not another policy."""
    cards = [*([card("p1", P)] if disaggregated else []), card("d1"), card("d2")]
    waiting, at_once = router(*cards), router(*cards)
    for number, start in enumerate(starts):
        name = f"r{number}"
        submit(waiting, name, prompt(start))
        placed = at_once.try_place(request(name, prompt(start)), 0.0)
        [outcome] = waiting.dispatch(0.0)
        assert placed == outcome.result
        assert at_once.load.shares() == waiting.load.shares()


def test_who_would_have_to_wait_is_not_placed_at_once() -> None:
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


def test_the_rank_of_a_pin_is_that_of_the_decode_worker() -> None:
    state = router(card("p", P), card("d", dp_size=2))
    placed = state.place(request(pin=WorkerId("d"), pin_rank=1, pin_prefill=WorkerId("p")), 0.0)
    assert placed.prefill is not None
    assert (placed.prefill.dp_rank, placed.decode.dp_rank) == (0, 1)


def test_a_pin_to_a_prefill_worker_that_no_decode_worker_can_pull_from_fails() -> None:
    state = router(card("p", P, transfer="nixl"), card("d"))
    with pytest.raises(NoWorkerError, match="can pull KV over 'nixl' from 'p'"):
        state.place(request(pin_prefill=WorkerId("p")), 0.0)


def test_to_decode_on_a_prefill_worker_is_refused() -> None:
    with pytest.raises(NoWorkerError):
        router(card("p", P), card("d")).place(request(pin=WorkerId("p")), 0.0)


def test_who_has_failed_a_request_does_not_get_it_again() -> None:
    state = router(card("d1"), card("d2"))
    assert place(state, "r", exclude=(WorkerId("d1"),)) == "d2"
    with pytest.raises(NoWorkerError, match="has failed this request"):
        state.place(request(exclude=(WorkerId("d1"), WorkerId("d2"))), 0.0)


def test_a_pinned_worker_that_has_failed_the_request_does_not_get_it_again() -> None:
    state = router(card("d1"), card("d2"))
    with pytest.raises(NoWorkerError):
        state.place(request(pin=WorkerId("d1"), exclude=(WorkerId("d1"),)), 0.0)


def test_a_failed_prefill_worker_leaves_the_prompt_to_the_decode_worker() -> None:
    placed = router(card("p", P), card("d")).place(request(exclude=(WorkerId("p"),)), 0.0)
    assert where(placed) == (None, "d")
    assert placed.reason == "no prefill worker is ready"


def test_who_has_failed_one_request_is_avoided_by_others_for_a_while() -> None:
    state = router(card("d1"), card("d2"), suspect_s=2.0)
    holds(state, "d1", 20)
    place(state, "r1", now=10.0, exclude=(WorkerId("d1"),))
    assert place(state, "r2", now=11.9) == "d2"
    end(state, "r1", "r2", ok=False)
    assert place(state, "r3", now=12.1) == "d1"


def test_a_suspect_is_better_than_nobody() -> None:
    state = router(card("d1"))
    with pytest.raises(NoWorkerError):
        state.place(request("r1", exclude=(WorkerId("d1"),)), 10.0)
    assert place(state, "r2", now=10.1) == "d1"


def test_a_placement_that_fails_books_nothing() -> None:
    state = router()
    with pytest.raises(NoWorkerError):
        state.place(request(), 0.0)
    assert len(state.load) == 0


# --- waiting -------------------------------------------------------------------------------------------------------


def test_nobody_waits_while_a_worker_can_take_it() -> None:
    state = router(*[card(f"d{n}") for n in range(3)], saturation=ONE_AT_A_TIME)
    for number in range(5):
        submit(state, f"r{number}", prompt(number))
    assert sorted(results(state.dispatch(0.0)).values()) == ["d0", "d1", "d2"]
    assert state.waiting == 2


def test_who_has_waited_goes_as_soon_as_somebody_has_room() -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME)
    for number in range(3):
        submit(state, f"r{number}", prompt(number))
    first = results(state.dispatch(0.0))
    [waiting] = {"r0", "r1", "r2"} - set(first)
    assert state.dispatch(0.0) == []
    done(state, next(iter(first)))
    assert results(state.dispatch(0.0)) == {waiting: first[next(iter(first))]}
    assert state.waiting == 0


def test_who_comes_when_a_worker_joins_goes_there() -> None:
    state = router(card("d1"), saturation=ONE_AT_A_TIME)
    submit(state, "r0", prompt(0))
    submit(state, "r1", prompt(1))
    state.dispatch(0.0)
    state.add_worker(card("d2"))
    assert results(state.dispatch(0.0)) == {"r1": "d2"}


def test_a_worker_is_given_prompts_up_to_its_limit_of_queued_tokens_and_one_more() -> None:
    state = router(card("d"), saturation=Saturation(queued_tokens=1000))
    for number in range(10):
        submit(state, f"r{number}", prompt(number))  # 320 tokens each
    assert len(state.dispatch(0.0)) == 4


def test_a_worker_twice_as_fast_is_given_twice_as_much_before_others_wait() -> None:
    state = router(card("slow"), card("fast", capacity=2.0), saturation=Saturation(queued_tokens=640))
    for number in range(10):
        submit(state, f"r{number}", prompt(number))
    assert Counter(results(state.dispatch(0.0)).values()) == {"slow": 2, "fast": 4}


def test_a_worker_with_all_its_sequences_running_is_given_nothing() -> None:
    state = router(card("d", max_num_seqs=2))
    for number in range(3):
        submit(state, f"r{number}", prompt(number))
    assert set(results(state.dispatch(0.0))) == {"r0", "r1"}
    done(state, "r0", "r1")
    assert state.dispatch(0.0) == []
    end(state, "r0")
    assert set(results(state.dispatch(0.0))) == {"r2"}


def test_a_worker_whose_blocks_are_taken_is_given_what_fits_and_nothing_more() -> None:
    state = router(card("d", total_blocks=50))
    place(state, "r0", prompt(0, 30))
    done(state, "r0")
    submit(state, "r1", prompt(1, 20))  # with the answer's first block one more than is free
    assert (state.dispatch(0.0), state.waiting) == ([], 1)
    submit(state, "r2", prompt(2, 19))
    assert set(results(state.dispatch(0.0))) == {"r2"}
    end(state, "r0", "r2")
    assert set(results(state.dispatch(0.0))) == {"r1"}


def test_blocks_that_are_shared_with_a_running_request_are_not_needed_again() -> None:
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


def test_a_worker_with_prompts_to_compute_can_take_one_more_to_decode() -> None:
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    submit(state, "r", disaggregate=True)
    assert results(state.dispatch(0.0)) == {"r": "d"}


def test_where_no_worker_that_could_pull_has_room_another_does_both_halves() -> None:
    state = router(card("p", P), card("d1", max_num_seqs=1), card("d2", transfer="nixl"))
    done(state, busy(state, "d1"))
    submit(state, "r1", prompt(1))
    submit(state, "r2", prompt(2), disaggregate=True)
    assert results(state.dispatch(0.0)) == {"r1": "d2"}


def test_a_worker_has_room_again_once_it_must_have_computed_enough() -> None:
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


def test_without_saturation_nobody_waits() -> None:
    state = router(card("d", max_num_seqs=1, total_blocks=5), saturation=None)
    for number in range(50):
        submit(state, f"r{number}", prompt(number))
    assert len(state.dispatch(0.0)) == 50


def test_to_place_at_once_asks_neither_who_waits_nor_who_is_full() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    submit(state, "r0", prompt(0))
    assert place(state, "r1", prompt(1)) == "d"
    assert state.waiting == 1


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "power-of-two"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_worker_that_costs_less_is_no_reason_to_wait_while_another_has_room(
    policy: Policy, temperature: float
) -> None:
    """By sequences the small one is full, though it has next to nothing to do."""
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
    """d1 has a prefix of 20 blocks, and so much to compute; d2 is idle."""
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME, **rules)
    holds(state, "d1", 20)
    busy(state, "d1", blocks=queue_blocks)
    return state


def test_a_request_waits_for_the_busy_worker_that_has_its_prefix_if_others_cost_more() -> None:
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


def test_it_goes_elsewhere_if_the_wait_costs_more_than_the_prefix_saves() -> None:
    state = prefix_at_a_busy_worker(queue_blocks=30)
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_siblings_that_wait_before_it_make_the_wait_longer() -> None:
    """Each has 10 blocks of its own to compute: behind two of them it is better to compute all of it elsewhere."""
    state = prefix_at_a_busy_worker(recompute_price=1.0)
    for number in range(4):
        submit(state, f"r{number}", TOKENS + prompt(number + 1, 10), now=number / 100)
    assert results(state.dispatch(1.0)) == {"r2": "d2"}


def test_a_placement_makes_the_wait_of_those_before_it_no_longer() -> None:
    """They are asked anew after it, and are not ahead of themselves."""
    state = prefix_at_a_busy_worker(recompute_price=1.0)
    state.add_worker(card("d3"))
    for number in range(2):
        submit(state, f"r{number}", TOKENS + prompt(number + 1, 10), now=number / 100)
    submit(state, "other", prompt(9), now=0.5)
    assert set(results(state.dispatch(1.0))) == {"other"}


def test_a_policy_that_knows_of_no_cache_waits_for_no_prefix() -> None:
    state = router(card("d1"), card("d2"), policy="least-loaded", saturation=Saturation(queued_tokens=160))
    holds(state, "d1", 20)
    busy(state, "d1", blocks=10)
    for number in range(1, 6):
        done(state, busy(state, "d2", number, blocks=60))
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_nobody_waits_for_a_sequence_to_end_because_of_a_prefix() -> None:
    """That may take as long as an answer, which no cost knows."""
    state = router(card("d1", max_num_seqs=1), card("d2"))
    holds(state, "d1", 20)
    done(state, busy(state, "d1", blocks=1))
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_who_has_no_prefix_there_does_not_wait_for_the_worker_that_costs_least() -> None:
    state = router(card("d1"), card("d2"), saturation=Saturation(queued_tokens=320))
    busy(state, "d1", 1)  # its limit: 20 blocks to compute
    for number in range(2, 9):
        done(state, busy(state, "d2", number, blocks=60))  # holds so much more that it costs more
    explanation = state.preview(request(), 0.0).explanation
    assert explanation is not None
    assert [one.note for one in explanation.candidates] == ["full", "chosen"], "the cheapest is full"
    submit(state, "r")
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_one_that_waits_for_a_decode_worker_does_not_hold_the_prefill_worker() -> None:
    state = router(card("p", P), card("d1", max_num_seqs=1), card("d2"), saturation=ONE_AT_A_TIME)
    done(state, busy(state, "d1"))
    submit(state, "waits", prompt(1), pin=WorkerId("d1"), disaggregate=True)
    submit(state, "goes", prompt(2), now=1.0, disaggregate=True)
    assert results(state.dispatch(1.0)) == {"goes": "d2"}


def test_a_pinned_request_waits_for_its_worker_and_does_not_hold_up_others() -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME)
    busy(state, "d1")
    submit(state, "pinned", prompt(1), pin=WorkerId("d1"), priority=5)
    submit(state, "other", prompt(2))
    assert results(state.dispatch(0.0)) == {"other": "d2"}
    done(state, "busy d1 99")
    assert results(state.dispatch(0.0)) == {"pinned": "d1"}


@pytest.mark.parametrize("disaggregate", [False, True])
def test_a_large_request_that_has_waited_long_is_not_starved_by_small_ones(disaggregate: bool) -> None:
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
def test_a_worker_that_is_kept_for_another_is_not_waited_for(reason: str) -> None:
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


def test_a_worker_is_kept_for_nobody_while_another_has_room() -> None:
    state = router(card("d1", max_num_seqs=1), card("d2"))
    done(state, busy(state, "d1"))
    submit(state, "pinned", prompt(1), pin=WorkerId("d1"))
    submit(state, "other", prompt(2), now=60.0)
    assert results(state.dispatch(60.0)) == {"other": "d2"}


def test_nothing_is_kept_for_one_that_waits_for_a_prompt_to_be_computed() -> None:
    """Else a decode worker would idle until a prefill worker is free."""
    state = router(card("p", P), card("d"), saturation=ONE_AT_A_TIME)
    place(state, "busy p", prompt(8), disaggregate=True)
    submit(state, "waits", prompt(1), disaggregate=True)
    submit(state, "goes", prompt(2), now=60.0, disaggregate=False)
    assert results(state.dispatch(60.0)) == {"goes": "d"}


def test_after_a_dispatch_nobody_waits_who_could_go() -> None:
    """Also where many go, and some of those before them cannot."""
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


def order(state: RouterState, names: list[str]) -> list[str]:
    """In which order they go to a worker that computes one prompt at a time."""
    went: list[str] = []
    for _ in names:
        [(name, _)] = state.dispatch(1.0)
        went.append(name)
        end(state, name, now=1.0)
    return went


def test_short_prompts_go_first_and_long_ones_later_but_in_time() -> None:
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


def test_a_higher_priority_displaces_and_the_displaced_is_told() -> None:
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


def test_one_request_cannot_wait_twice() -> None:
    state = router(card("d"))
    submit(state, "r")
    with pytest.raises(InvalidRequestError, match="waits in the queue already"):
        submit(state, "r")


@pytest.mark.parametrize(
    "fields",
    [{"pin": "d9"}, {"pin_prefill": "d1"}, {"pin": "d1", "pin_rank": 1}, {"exclude": ("d1", "d2")}, {"model": "x"}],
)
def test_who_can_be_served_by_nobody_is_refused_at_once(fields: dict[str, object]) -> None:
    state = router(card("d1"), card("d2"))
    with pytest.raises(NoWorkerError):
        submit(state, "r", **fields)
    assert state.waiting == 0


@pytest.mark.parametrize(
    "fields", [{"pin": "d1"}, {"pin": "d1", "pin_rank": 0}, {"pin_prefill": "p1"}, {"exclude": ("d2", "p1")}]
)
def test_a_request_whose_workers_leave_while_it_waits_fails_however_full_the_others_are(
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


def test_if_the_last_worker_of_a_model_leaves_all_that_waits_fails_and_the_model_is_forgotten() -> None:
    state = router(card("d"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    for number in range(3):
        submit(state, f"r{number}", prompt(number))
    state.remove_worker(WorkerId("d"))
    assert set(results(state.dispatch(0.0)).values()) == {"no_worker"}
    assert (state.waiting, state.fleet.indexes) == (0, {})


def test_a_model_without_workers_is_forgotten_with_the_last_that_waited_for_it() -> None:
    state = router(card("d"))
    submit(state, "r")
    state.remove_worker(WorkerId("d"))
    assert (set(state.fleet.indexes), state.waiting) == (set(), 1)
    end(state, "r")
    assert state.fleet.indexes == {}


def test_a_worker_that_comes_back_serves_who_still_waits() -> None:
    state = router(card("d1"))
    submit(state, "r")
    state.remove_worker(WorkerId("d1"))
    state.add_worker(card("d2"))
    assert results(state.dispatch(0.0)) == {"r": "d2"}


def test_a_request_that_waits_goes_to_a_suspect_once_that_is_trusted_again() -> None:
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME, suspect_s=2.0)
    busy(state, "d2")
    place(state, "failed", prompt(8, 0), now=10.0, exclude=(WorkerId("d1"),))
    submit(state, "r", now=10.0)
    assert state.dispatch(10.0) == []
    assert state.next_deadline() == 12.0
    assert results(state.dispatch(12.0)) == {"r": "d1"}
    assert state.next_deadline() is None


def test_a_deadline_that_was_met_is_not_asked_for_again() -> None:
    """Else the shell would come back at once, for ever."""
    state = router(card("d1"), card("d2"), saturation=ONE_AT_A_TIME, suspect_s=2.0)
    busy(state, "d1")
    busy(state, "d2")
    submit(state, "r", now=10.0, exclude=(WorkerId("d1"),))
    state.dispatch(12.0)
    assert state.next_deadline() == NEVER


# --- sessions ------------------------------------------------------------------------------------------------------


def test_a_session_stays_with_its_worker() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    first = place(state, "r0", prompt(0), session="s")
    for number in range(1, 4):
        assert place(state, f"r{number}", prompt(number), session="s") == first
    assert place(state, "other", prompt(9), session="t") != first


def test_sessions_are_not_kept_unless_that_is_asked_for() -> None:
    state = router(card("d1"), card("d2"))
    assert {place(state, f"r{n}", prompt(n), session="s") for n in range(2)} == {"d1", "d2"}


def test_tenants_and_requests_without_a_session_have_none_in_common() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    assert place(state, "r0", prompt(0), session="s", tenant="a") == "d1"
    assert place(state, "r1", prompt(1), session="s", tenant="b") == "d2"
    assert place(state, "r2", prompt(2, 1)) == "d1"
    assert place(state, "r3", prompt(3, 1)) == "d2"


def test_a_session_is_given_up_where_its_worker_is_full() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0, saturation=ONE_AT_A_TIME)
    first = place(state, "r0", prompt(0), session="s")
    submit(state, "r1", prompt(1), session="s")
    [moved] = results(state.dispatch(0.0)).values()
    assert moved != first
    done(state, "r0", "r1")
    assert place(state, "r2", prompt(2), session="s") == moved


def test_a_session_ends_with_its_worker_and_with_its_time() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    assert place(state, "r0", prompt(0), session="s") == "d1"
    state.remove_worker(WorkerId("d1"))
    state.add_worker(card("d1"))
    busy(state, "d1", 1)
    assert place(state, "r1", prompt(2), session="s") == "d2"
    busy(state, "d2", 3)
    assert place(state, "r2", prompt(4), now=59.0, session="s") == "d2"
    assert place(state, "r3", prompt(5), now=119.0, session="s") == "d1"


def test_a_session_goes_not_where_its_request_may_not() -> None:
    state = router(card("d1"), card("d2"), affinity_ttl_s=60.0)
    assert place(state, "r0", prompt(0), session="s") == "d1"
    assert place(state, "r1", prompt(1), session="s", exclude=(WorkerId("d1"),)) == "d2"


# --- newcomers -----------------------------------------------------------------------------------------------------


def test_a_newcomer_is_given_one_request_before_it_has_shown_that_it_works() -> None:
    state = router(card("old"), ramp_s=10.0)
    busy(state, "old", now=100.0)
    state.add_worker(card("new"), 100.0)
    seen = Counter(place(state, f"r{n}", prompt(n), now=100.0) for n in range(6))
    assert seen == {"new": 1, "old": 5}
    assert place(state, "later", prompt(9), now=110.0) == "new"


def test_a_newcomer_that_completes_requests_gets_more() -> None:
    state = router(card("old"), ramp_s=1e9)
    for number in range(20):
        busy(state, "old", number, now=2e9)
    state.add_worker(card("new"), 2e9)
    for number in range(30, 46):
        assert place(state, f"r{number}", prompt(number), now=2e9) == "new"
        end(state, f"r{number}", now=2e9)
    assert Counter(place(state, f"r{n}", prompt(n), now=2e9) for n in range(50, 55)) == {"new": 5}


def test_a_newcomer_that_fails_requests_gets_no_more_for_it() -> None:
    state = router(card("old"), ramp_s=1e9, suspect_s=0.0)
    for number in range(20):
        busy(state, "old", number, now=2e9)
    state.add_worker(card("new"), 2e9)
    for number in range(30, 46):
        place(state, f"r{number}", prompt(number), now=2e9)
        end(state, f"r{number}", now=2e9, ok=False)
    assert Counter(place(state, f"r{n}", prompt(n), now=2e9) for n in range(50, 55)) == {"new": 1, "old": 4}


def test_a_new_prefill_worker_is_not_stampeded_either() -> None:
    state = router(card("old", P), card("d"), saturation=None)
    for number in range(8):
        place(state, f"busy {number}", prompt(number), now=100.0, disaggregate=True)
    state.add_worker(card("new", P), 100.0)
    prefills = Counter(
        where(state.place(request(f"r{n}", prompt(n), disaggregate=True), 100.0))[0] for n in range(10, 16)
    )
    assert prefills == {"new": 1, "old": 5}
    for number in range(16):
        busy_name = f"s{number}"
        place(state, busy_name, prompt(number + 20), now=100.0, pin_prefill=WorkerId("new"))
        done(state, busy_name, now=100.0)
    placed = state.place(request("settled", prompt(99), disaggregate=True), 100.0)
    assert where(placed)[0] == "new", "its prefills have ended well"


def test_where_all_workers_are_new_none_is_held_back() -> None:
    state = router(card("d1"), card("d2"))
    assert Counter(place(state, f"r{n}", prompt(n)) for n in range(6)) == {"d1": 3, "d2": 3}


def test_a_card_that_changes_makes_no_newcomer() -> None:
    state = router(card("d1"), card("d2"))
    place(state, "r", prompt(0), now=100.0)
    state.add_worker(card("d2", max_num_seqs=7), 100.0)
    assert Counter(place(state, f"r{n}", prompt(n), now=100.0) for n in range(1, 6)) == {"d1": 2, "d2": 3}


# --- what is believed to be cached ---------------------------------------------------------------------------------


def test_a_prompt_in_flight_counts_as_cached_where_it_runs() -> None:
    state = router(card("d1"), card("d2"), recompute_price=2.0)
    first = place(state, "r0")
    placed = state.place(request("r1", TOKENS + prompt(1, 1)), 0.0)
    assert (placed.decode.worker_id, placed.decode.overlap_blocks) == (first, 20)


def test_a_prompt_in_flight_counts_as_cached_where_it_is_prefilled() -> None:
    state = router(card("p1", P), card("p2", P), card("d"), recompute_price=2.0)
    first = where(state.place(request("r0", disaggregate=True), 0.0))[0]
    placed = state.place(request("r1", TOKENS + prompt(1, 1), disaggregate=True), 0.0)
    assert placed.prefill is not None
    assert (placed.prefill.worker_id, placed.prefill.overlap_blocks) == (first, 20)


def test_siblings_follow_a_prefix_before_the_events_tell_of_it() -> None:
    state = router(card("p1", P), card("p2", P), card("d"), predict_ttl_s=5.0)
    first = where(state.place(request("r0", disaggregate=True), 0.0))[0]
    done(state, "r0", now=1.0)
    end(state, "r0", now=1.0)
    for now, overlap in ((5.9, 20), (6.0, 0)):
        placed = state.place(request("r1", disaggregate=True), now)
        assert placed.prefill is not None
        assert placed.prefill.overlap_blocks == overlap
        assert overlap == 0 or placed.prefill.worker_id == first
        end(state, "r1", ok=False)


def test_a_request_that_failed_leaves_no_prefix_behind() -> None:
    state = router(card("d1"))
    place(state, "r0")
    done(state, "r0")
    end(state, "r0", ok=False)
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_predictions_can_be_turned_off() -> None:
    state = router(card("d1"), predict_ttl_s=0.0)
    place(state, "r0")
    done(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_what_a_worker_tells_is_believed_over_what_was_predicted_of_it() -> None:
    for tell in (
        lambda state: state.fleet.on_kv_events(WorkerId("d1"), 0, [Cleared()]),
        lambda state: state.fleet.on_kv_batch(WorkerId("d1"), 0, encode_payload([Cleared()], 0.0)),
    ):
        state = router(card("d1"))
        place(state, "r0")
        done(state, "r0")
        end(state, "r0")
        assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {at("d1"): (20,) * 4}
        tell(state)
        assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_a_prediction_does_not_hide_what_lies_deeper_in_a_slower_tier() -> None:
    state = router(card("d1"))
    holds(state, "d1", 15, medium="CPU")
    place(state, "r0", TOKENS[: 10 * BLOCK])
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {at("d1"): (10, 15, 15, 15)}


@pytest.mark.parametrize("kv_events", ["tcp://d:1", ""])
def test_what_was_predicted_of_a_worker_is_forgotten_when_it_leaves(kv_events: str) -> None:
    state = router(card("d", kv_events=kv_events))
    place(state, "r0")
    done(state, "r0")
    end(state, "r0")
    state.remove_worker(WorkerId("d"))
    state.add_worker(card("d", kv_events=kv_events))
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


def test_of_a_worker_without_events_its_placements_tell_what_it_has() -> None:
    state = router(card("d1", kv_events=""), card("d2", kv_events=""), approximate_ttl_s=120.0)
    first = place(state, "r0")
    done(state, "r0")
    end(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 119.0) == {at(first): (20,) * 4}
    busy(state, first, blocks=1, now=119.0)
    assert place(state, "r1", now=119.0) == first
    end(state, "r1", ok=False)
    assert state.fleet.overlaps("m", request("r2").sequence_hashes, 120.0) == {}


def test_a_worker_without_events_is_not_believed_to_have_more_than_its_pool() -> None:
    state = router(card("d1", kv_events="", total_blocks=30), saturation=None)
    for number in range(3):
        place(state, f"r{number}", prompt(number))
        end(state, f"r{number}")
    cached = [state.fleet.overlaps("m", request(tokens=prompt(n)).sequence_hashes, 0.0) for n in range(3)]
    assert cached == [{}, {at("d1"): (10,) * 4}, {at("d1"): (20,) * 4}]


def test_both_workers_of_a_disaggregated_request_will_have_its_prompt() -> None:
    state = router(card("p", P, kv_events=""), card("d", kv_events=""))
    place(state, "r", disaggregate=True)
    done(state, "r")
    end(state, "r")
    assert set(state.fleet.overlaps("m", request().sequence_hashes, 0.0)) == {at("p"), at("d")}


def test_a_worker_without_events_of_which_nothing_may_be_guessed_has_nothing() -> None:
    state = router(card("d1", kv_events=""), approximate_ttl_s=0.0)
    place(state, "r0")
    done(state, "r0")
    end(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}


# --- load ----------------------------------------------------------------------------------------------------------


def test_a_request_counts_until_it_ends_however_it_ends() -> None:
    for ok in (True, False):
        state = router(card("p", P), card("d"))
        place(state, "r")
        assert state.load.shares() == {at("p"): Share(320, 0, 0), at("d"): Share(0, 21, 1)}
        done(state, "r")
        assert state.load.shares() == {at("d"): Share(0, 21, 1)}
        end(state, "r", ok=ok)
        end(state, "r", ok=ok)
        assert (state.load.shares(), len(state.load)) == ({}, 0)


def test_an_answer_takes_a_block_for_each_block_of_tokens_begun() -> None:
    state = router(card("d"))
    place(state, "r")
    for osl_tokens, blocks in ((1, 1), (BLOCK - 1, 1), (BLOCK, 2), (5 * BLOCK + 3, 6)):
        state.progress(RequestId("r"), osl_tokens, 1.0)
        assert load_of(state, "d").held_blocks == 20 + blocks


def test_a_worker_that_dies_takes_the_load_of_its_requests_with_it_on_both_workers() -> None:
    for gone, left in (("p", "d"), ("d", "p")):
        state = router(card("p", P), card("d"))
        place(state, "r")
        state.remove_worker(WorkerId(gone))
        assert load_of(state, left) == Share()
        done(state, "r")
        state.progress(RequestId("r"), 100, 1.0)
        end(state, "r")
        assert (len(state.load), load_of(state, left)) == (0, Share())


def test_a_prefill_worker_that_leaves_after_its_part_takes_no_stream_with_it() -> None:
    state = router(card("p", P), card("d"))
    place(state, "r")
    done(state, "r")
    state.remove_worker(WorkerId("p"))
    done(state, "r")
    state.progress(RequestId("r"), 100, 1.0)
    assert load_of(state, "d") == Share(0, 20 + 7, 1)
    end(state, "r")
    assert state.load.shares() == {}


def test_a_booking_of_which_nothing_is_heard_ends_and_is_counted() -> None:
    state = router(card("d"), lease_s=10.0)
    place(state, "silent", prompt(0), now=0.0)
    place(state, "alive", prompt(1), now=0.0)
    state.progress(RequestId("alive"), 1, 9.0)
    assert state.sweep(9.9) == []
    assert state.sweep(10.0) == ["silent"]
    assert load_of(state, "d").requests == 1
    assert state.sweep(19.0) == ["alive"]
    assert (state.load.shares(), state.stats["expired"]) == ({}, 2)


def test_a_booking_that_expires_lets_others_go_and_leaves_no_prefix() -> None:
    state = router(card("d", kv_events=""), saturation=ONE_AT_A_TIME, lease_s=10.0)
    place(state, "silent")
    submit(state, "r", prompt(1))
    assert state.dispatch(5.0) == []
    state.sweep(10.0)
    assert results(state.dispatch(10.0)) == {"r": "d"}
    assert state.fleet.overlaps("m", request().sequence_hashes, 10.0) == {}


def test_a_request_that_is_placed_anew_counts_once() -> None:
    state = router(card("d1"), card("d2"))
    first = place(state, "r")
    second = place(state, "r", exclude=(WorkerId(first),))
    assert state.load.shares() == {at(second): Share(320, 21, 1)}


def test_what_other_routers_have_placed_moves_the_choice_until_they_leave() -> None:
    state = router(card("d1"), card("d2"))
    state.load.set_elsewhere("two", {at("d1"): Share(1000, 50, 3)}, 0.0)
    assert [place(state, f"r{n}", prompt(n, 1)) for n in range(3)] == ["d2"] * 3
    state.load.set_elsewhere("two", {at("d2"): Share(1000, 50, 3)}, 0.0)
    assert [place(state, f"s{n}", prompt(n + 5, 1)) for n in range(3)] == ["d1"] * 3
    state.load.set_elsewhere("two", {}, 0.0)
    end(state, "r0", "r1", "r2", "s0", "s1", "s2")
    assert {place(state, f"t{n}", prompt(n + 10, 1)) for n in range(2)} == {"d1", "d2"}


# --- workers that come, change and leave ---------------------------------------------------------------------------


def test_a_worker_that_left_is_forgotten_and_its_late_events_do_not_bring_it_back() -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    state.remove_worker(WorkerId("d1"))
    holds(state, "d1", 20)
    assert state.fleet.on_kv_batch(WorkerId("d1"), 0, b"") == 0
    assert state.fleet.digest(WorkerId("d1"), 0) is None
    state.fleet.forget_kv(WorkerId("d1"), 0)
    assert state.fleet.indexes["m"].num_blocks == 0
    assert [one.worker_id for one in state.fleet.cards] == ["d2"]
    state.remove_worker(WorkerId("never there"))


def test_what_a_holder_has_can_be_forgotten_to_be_told_anew() -> None:
    state = router(card("d", dp_size=2))
    for dp_rank in (0, 1):
        holds(state, "d", 20, dp_rank=dp_rank)
    state.fleet.forget_kv(WorkerId("d"), 1)
    assert set(state.fleet.overlaps("m", request().sequence_hashes, 0.0)) == {at("d", 0)}


def test_a_card_that_changes_keeps_what_is_known_of_the_worker() -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    place(state, "r")
    state.add_worker(card("d1", address="elsewhere:1"))
    placed = state.place(request("s"), 0.0)
    assert (placed.decode.address, placed.decode.overlap_blocks) == ("elsewhere:1", 20)
    assert load_of(state, "d1").requests == 2


@pytest.mark.parametrize("fields", [{"role": P}, {"model": "other"}, {"dp_size": 2}])
def test_a_card_of_another_kind_is_another_worker(fields: dict) -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    place(state, "r")
    state.add_worker(card("d1", **fields))
    assert len(state.load) == 0
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}
    assert place(state, "s", pin=WorkerId("d2")) == "d2"


def test_the_block_size_is_that_of_the_model() -> None:
    state = router(card("d1"), card("d2", model="other", block_size=32))
    assert (state.fleet.block_size_of("m"), state.fleet.block_size_of("other"), state.fleet.block_size_of("none")) == (
        16,
        32,
        1,
    )


# --- models --------------------------------------------------------------------------------------------------------


def test_models_do_not_see_each_others_prefixes() -> None:
    state = router(card("d1"), card("x1", model="x", kv_events=""), card("x2", model="x"))
    holds(state, "x2", 20)
    place(state, "r0", model="x", pin=WorkerId("x1"))
    done(state, "r0")
    assert state.fleet.overlaps("m", request().sequence_hashes, 0.0) == {}
    placed = state.place(request("r1"), 0.0)
    assert placed.decode.overlap_blocks == 0
    assert load_of(state, "d1").queued_tokens == 320


def test_what_is_cached_for_another_model_makes_no_prompt_shorter_in_the_queue() -> None:
    state = router(card("d"), card("x", model="x"), saturation=ONE_AT_A_TIME)
    busy(state, "d")
    place(state, "r0", prompt(1, 40), model="x")
    submit(state, "long", prompt(1, 40))
    submit(state, "short", prompt(2, 5))
    end(state, "busy d 99")
    assert order(state, ["long", "short"]) == ["short", "long"]


def test_models_do_not_see_each_others_demand_and_load() -> None:
    state = router(card("d1"), card("d2"), card("x", model="x"), weights=Weights(decode=0.0), predict_ttl_s=0.0)
    holds(state, "d1", 20)
    holds(state, "x", 20)
    for number in range(20):
        place(state, f"x{number}", model="x")
        end(state, f"x{number}")
    busy_x = state.place(request("busy x", prompt(9), model="x"), 0.0)
    explanation = state.preview(request(), 50.0).explanation
    assert explanation is not None
    assert (explanation.asked_before, explanation.busy_share) == (0.0, 0.0)
    assert busy_x.decode.worker_id == "x"


def test_models_have_queues_of_their_own() -> None:
    state = router(card("d"), card("x", model="x"), saturation=ONE_AT_A_TIME, queue=QueueRules(max_requests=1))
    for name, model in (("d", "m"), ("x", "x")):
        place(state, f"busy {name}", prompt(1), model=model)
        submit(state, f"waits {name}", prompt(2), model=model)
    assert state.waiting == 2
    end(state, "busy x")
    assert results(state.dispatch(0.0)) == {"waits x": "x"}


# --- a router that is gone -----------------------------------------------------------------------------------------


def test_what_another_router_placed_can_be_booked_again() -> None:
    ours, theirs = (router(card("p", P), card("d")) for _ in range(2))
    placed = theirs.place(request(), 0.0)
    ours.resume(request(), placed, 5.0, is_prefilling=True)
    assert ours.load.shares() == theirs.load.shares()
    done(theirs, "r")
    ours.resume(request(), placed, 6.0, is_prefilling=False)
    assert ours.load.shares() == theirs.load.shares() == {at("d"): Share(0, 21, 1)}
    end(ours, "r")
    assert ours.load.shares() == {}


def test_what_another_router_placed_on_unknown_workers_cannot() -> None:
    placed = router(card("d1")).place(request(), 0.0)
    ours = router(card("d2"))
    with pytest.raises(NoWorkerError, match="no worker 'd1'"):
        ours.resume(request(), placed, 0.0, is_prefilling=True)
    assert len(ours.load) == 0


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


def test_an_adapter_that_nobody_has_is_named_with_those_there_are() -> None:
    state = router(card("a", A, loras=("poet", "critic")), card("b", A), card("p", P, loras=("painter",)))
    with pytest.raises(
        NoWorkerError, match="decodes the model 'm' with the adapter 'painter' is ready; adapters: critic, poet"
    ):
        place(state, "r", lora="painter")
    with pytest.raises(NoWorkerError, match="with the adapter 'painter'"):
        submit(state, "r", lora="painter")
    with pytest.raises(NoWorkerError, match="no decode worker 'b' serves 'm' with the adapter 'poet'; there are: a"):
        place(state, "r", lora="poet", pin=WorkerId("b"))
    with pytest.raises(NoWorkerError, match="'m' with the adapter 'poet' that could decode has failed"):
        place(state, "r", lora="poet", exclude=(WorkerId("a"),))
