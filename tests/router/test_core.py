"""The router as a state machine: who gets a request, and what that changes."""

import pytest

from protocol.errors import NoWorkerError
from protocol.events import Stored
from protocol.hashing import pack_hashes, sequence_hashes
from protocol.ids import EngineHash, RequestId, WorkerId
from protocol.messages import Placed, Role, RouteRequest, WorkerCard
from router.core import RouterRules, RouterState
from router.disaggregation import LocalPrefill
from router.index import Holder

BLOCK = 16
TOKENS = list(range(1000, 1320))  # 20 blocks


def card(name: str, role: Role = Role.DECODE, **fields: object) -> WorkerCard:
    values = {"model": "m", "model_path": "/m", "address": f"{name}:1", "block_size": BLOCK, "transfer": "shm"}
    values |= {
        "total_blocks": 100,
        "context_tokens": 4096,
        "worker_id": WorkerId(name),
        "name": name.rstrip("0123456789"),
    }
    return WorkerCard(role=role, **(values | fields))  # type: ignore[arg-type]


def router(*cards: WorkerCard, **rules: object) -> RouterState:
    state = RouterState(RouterRules(**rules))  # type: ignore[arg-type]
    for one in cards:
        state.add_worker(one)
    return state


def request(name: str = "r", tokens: list[int] = TOKENS, **fields: object) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId(name),
        model="m",
        isl_tokens=len(tokens),
        sequence_hashes=pack_hashes(sequence_hashes(tokens, BLOCK)),
        **fields,  # type: ignore[arg-type]
    )


def holds(state: RouterState, worker: str, blocks: int, tokens: list[int] = TOKENS, dp_rank: int = 0) -> None:
    names = tuple(EngineHash(i) for i in range(blocks))
    state.on_kv_events(WorkerId(worker), dp_rank, [Stored(names, None, tuple(tokens[: blocks * BLOCK]), BLOCK)])


def where(placed: Placed) -> tuple[str | None, str]:
    return (placed.prefill.worker_id if placed.prefill else None, placed.decode.worker_id)


P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


def test_prompt_here_and_answer_there() -> None:
    state = router(card("p", P), card("d"), card("a", A))
    placed = state.place(request(), 0.0)
    assert where(placed) == ("p", "a")
    assert (placed.prefill.address, placed.decode.address) == ("p:1", "a:1")
    assert placed.reason == "320 of 320 prompt tokens are to compute"


def test_a_prefix_that_the_decode_worker_has_is_used_there() -> None:
    state = router(card("p", P), card("d1"), card("d2"))
    holds(state, "d2", 15)
    placed = state.place(request(), 0.0)
    assert where(placed) == (None, "d2")
    assert placed.decode.overlap_blocks == 15


def test_a_prefix_that_the_prefill_worker_has_is_used_there() -> None:
    state = router(card("p1", P), card("p2", P), card("d"))
    holds(state, "p2", 18)
    placed = state.place(request(), 0.0)
    assert where(placed) == ("p2", "d")
    assert placed.prefill.overlap_blocks == 18


def test_requests_in_flight_are_spread_and_their_end_is_noticed() -> None:
    state = router(card("d1"), card("d2"))
    placed = [where(state.place(request(f"r{i}", [i] * 160), 0.0))[1] for i in range(4)]
    assert sorted(placed) == ["d1", "d1", "d2", "d2"]
    for i, name in enumerate(placed):
        if name == "d2":
            state.free(RequestId(f"r{i}"))
    assert where(state.place(request("r5", [5] * 160), 0.0)) == (None, "d2")


def test_one_conversation_stays_together_and_others_go_elsewhere() -> None:
    state = router(card("d1"), card("d2"))
    first = where(state.place(request("r1"), 0.0))[1]
    other = where(state.place(request("r2", [7] * 160), 0.0))[1]
    assert {first, other} == {"d1", "d2"}
    holds(state, first, 20)
    state.free(RequestId("r1"))
    state.free(RequestId("r2"))
    assert where(state.place(request("r3", TOKENS + [1] * 16), 0.0))[1] == first


def test_prefill_work_counts_until_the_first_token() -> None:
    state = router(card("p1", P), card("p2", P), card("d"))
    assert where(state.place(request("r1", [1] * 320), 0.0))[0] == "p1"
    assert where(state.place(request("r2", [2] * 160), 0.0))[0] == "p2"
    assert where(state.place(request("r3", [3] * 16), 0.0))[0] == "p2"
    state.prefill_done(RequestId("r1"))
    assert where(state.place(request("r4", [4] * 16), 0.0))[0] == "p1"


def test_the_wish_of_the_caller_counts() -> None:
    state = router(card("p", P), card("d"), local_prefill=LocalPrefill(10**6, 1.0))
    holds(state, "d", 20)
    assert where(state.place(request(disaggregate=True), 0.0)) == ("p", "d")
    assert where(state.place(request(disaggregate=False), 0.0)) == (None, "d")


def test_who_has_failed_a_request_does_not_get_it_again() -> None:
    state = router(card("d1"), card("d2"))
    assert where(state.place(request(exclude=(WorkerId("d1"),)), 0.0)) == (None, "d2")
    with pytest.raises(NoWorkerError, match="has failed this request"):
        state.place(request(exclude=(WorkerId("d1"), WorkerId("d2"))), 0.0)


def test_who_has_failed_one_request_is_avoided_by_others_for_a_while() -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    state.place(request("r1", exclude=(WorkerId("d1"),)), 10.0)
    assert where(state.place(request("r2"), 11.9)) == (None, "d2")
    for name in ("r1", "r2"):
        state.free(RequestId(name))
    assert where(state.place(request("r3"), 12.1)) == (None, "d1")


def test_a_suspect_is_better_than_nobody() -> None:
    state = router(card("d1"))
    with pytest.raises(NoWorkerError):
        state.place(request("r1", exclude=(WorkerId("d1"),)), 10.0)
    assert where(state.place(request("r2"), 10.1)) == (None, "d1")


def test_a_failed_prefill_worker_leaves_the_prompt_to_the_decode_worker() -> None:
    state = router(card("p", P), card("d"))
    placed = state.place(request(exclude=(WorkerId("p"),)), 0.0)
    assert where(placed) == (None, "d")
    assert placed.reason == "no prefill worker is ready"


def test_a_pin_is_obeyed_by_id_and_by_name() -> None:
    state = router(card("d1"), card("x2"))
    assert where(state.place(request("r1", pin=WorkerId("x2")), 0.0)) == (None, "x2")
    assert where(state.place(request("r2", pin=WorkerId("x")), 0.0)) == (None, "x2")
    with pytest.raises(NoWorkerError, match="'y'"):
        state.place(request("r3", pin=WorkerId("y")), 0.0)


def test_a_pin_to_a_prefill_worker_is_refused() -> None:
    with pytest.raises(NoWorkerError):
        router(card("p", P), card("d")).place(request(pin=WorkerId("p")), 0.0)


def test_kv_moves_only_between_workers_of_one_transfer() -> None:
    state = router(card("p", P, transfer="nixl"), card("d1"), card("d2", transfer="nixl"))
    for i in range(3):
        assert where(state.place(request(f"r{i}"), 0.0)) == ("p", "d2")
    state.remove_worker(WorkerId("d2"))
    placed = state.place(request("s"), 0.0)
    assert where(placed) == (None, "d1")
    assert "no decode worker can pull" in placed.reason


def test_models_have_workers_of_their_own() -> None:
    state = router(card("d1"), card("d2", model="other", block_size=32))
    assert where(state.place(request(), 0.0)) == (None, "d1")
    state.remove_worker(WorkerId("d1"))
    with pytest.raises(NoWorkerError, match="there are: none"):
        state.place(request(), 0.0)


def test_with_prefill_workers_alone_nothing_can_be_answered() -> None:
    with pytest.raises(NoWorkerError, match="there are: prefill"):
        router(card("p", P)).place(request(), 0.0)


def test_ranks_of_a_worker_are_chosen_between() -> None:
    state = router(card("d", dp_size=3))
    holds(state, "d", 20, dp_rank=2)
    placed = state.place(request(), 0.0)
    assert (placed.decode.dp_rank, placed.decode.overlap_blocks) == (2, 20)
    assert {state.place(request(f"r{i}", [i] * 160), 0.0).decode.dp_rank for i in range(2)} == {0, 1}


def test_a_worker_that_left_is_forgotten_and_its_late_events_do_not_bring_it_back() -> None:
    state = router(card("d1"), card("d2"))
    holds(state, "d1", 20)
    state.remove_worker(WorkerId("d1"))
    holds(state, "d1", 20)
    assert state.index.num_blocks == 0
    assert [c.worker_id for c in state.cards] == ["d2"]
    state.remove_worker(WorkerId("never there"))


def test_a_booking_outlives_its_worker_until_it_is_freed() -> None:
    state = router(card("d1"))
    state.place(request(), 0.0)
    state.remove_worker(WorkerId("d1"))
    state.prefill_done(RequestId("r"))
    state.free(RequestId("r"))
    assert len(state.load) == 0
    assert state.load.of(Holder(WorkerId("d1"), 0)).requests == 0


def test_a_placement_that_fails_books_nothing() -> None:
    state = router()
    with pytest.raises(NoWorkerError):
        state.place(request(), 0.0)
    assert len(state.load) == 0


def test_equal_histories_give_equal_placements() -> None:
    def play() -> list[tuple[str | None, str]]:
        state = router(*[card(f"d{i}") for i in range(5)], card("p", P), temperature=0.7)
        holds(state, "d3", 10)
        return [where(state.place(request(f"r{i}", TOKENS[: 16 * (i % 20 + 1)]), i)) for i in range(50)]

    assert play() == play()


def test_round_robin_takes_turns() -> None:
    state = router(*[card(f"d{i}") for i in range(3)], policy="round-robin")
    assert [where(state.place(request(f"r{i}"), 0.0))[1] for i in range(6)] == ["d0", "d1", "d2"] * 2
