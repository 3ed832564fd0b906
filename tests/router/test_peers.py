"""A worker that lacks a prompt pulls it from one that has it, where that is cheaper than computing or waiting."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.core import RouterState
from kvmesh.router.peers import UNMEASURED_LATENCY_S, PeerFigures, PeerSource, kind_of, pull_of
from kvmesh.router.selection import PeerPull, Weights
from tests.support.candidates import prompt as cost_of
from tests.support.candidates import worker as candidate
from tests.support.routing import BLOCK, A, P, at, busy, card, holds, load_of, request, router, where

TOKEN_S = 0.001  # 16 ms for a block


def peer(name: str, **fields: object) -> WorkerCard:
    values = {"kv_print": "same", "prefill_token_s": TOKEN_S, "pull_block_s": 0.001, "pull_latency_s": 0.002}
    return card(name, fields.pop("role", A), **(values | fields))  # type: ignore[arg-type]


def source_of(state: RouterState, **fields: object) -> tuple[str, str | None, int]:
    """Return where a request runs, from where it pulls, and how many blocks."""
    placed = state.place(request(**fields), 0.0)
    source = placed.source
    return where(placed)[1], None if source is None else source.worker_id, 0 if source is None else source.blocks


def test_an_idle_worker_pulls_what_a_busy_one_has() -> None:
    state = router(peer("a"), peer("b"))
    holds(state, "a", 20)
    busy(state, "a")
    assert source_of(state) == ("b", "a", 20)
    assert load_of(state, "b").queued_tokens == 22, "the time of the pull, in tokens"


def test_an_idle_worker_that_has_the_prompt_keeps_it() -> None:
    state = router(peer("a"), peer("b"))
    holds(state, "a", 20)
    assert source_of(state) == ("a", None, 0)


def test_a_request_does_not_wait_for_a_full_worker_if_another_can_pull() -> None:
    state = router(peer("a"), peer("b"))
    holds(state, "a", 20)
    busy(state, "a", blocks=200)
    placed = state.try_place(request(), 0.0)
    assert placed is not None
    assert placed.source is not None
    assert (where(placed)[1], placed.source.worker_id) == ("b", "a")


def test_the_source_is_named_with_its_address_and_rank() -> None:
    state = router(peer("a", dp_size=2), peer("b"))
    holds(state, "a", 20, dp_rank=1)
    source = state.place(request(pin=WorkerId("b")), 0.0).source
    assert source is not None
    assert (source.worker_id, source.address, source.dp_rank, source.blocks) == ("a", "a:1", 1, 20)


def test_other_weights_or_transfers_are_no_source() -> None:
    for fields in ({"kv_print": "other"}, {"kv_print": ""}, {"transfer": "nixl"}, {"transfer": ""}):
        state = router(peer("a"), peer("b", **fields))
        holds(state, "a", 20)
        assert source_of(state, pin=WorkerId("b")) == ("b", None, 0)


def test_workers_that_failed_are_no_source() -> None:
    state = router(peer("a"), peer("b"))
    holds(state, "a", 20)
    assert source_of(state, exclude=(WorkerId("a"),)) == ("b", None, 0)
    assert source_of(state, request_id="r2", pin=WorkerId("b"))[1] is None, "it is avoided by others too"


def test_what_is_still_being_computed_cannot_be_pulled() -> None:
    state = router(peer("a"), peer("b"))
    state.place(request("first", pin=WorkerId("a")), 0.0)
    assert source_of(state, pin=WorkerId("b")) == ("b", None, 0)


def test_lower_tiers_of_a_peer_are_not_pulled_from() -> None:
    state = router(peer("a"), peer("b"))
    holds(state, "a", 20, medium="CPU")
    assert source_of(state, pin=WorkerId("b")) == ("b", None, 0)


def test_a_prefill_worker_pulls_too() -> None:
    state = router(peer("p1", role=P), peer("p2", role=P), peer("d"))
    holds(state, "p1", 20)
    placed = state.place(request(pin_prefill=WorkerId("p2")), 0.0)
    assert placed.source is not None
    assert (where(placed), placed.source.worker_id) == (("p2", "d"), "p1")


def test_a_decode_worker_that_can_pull_needs_no_prefill_worker() -> None:
    state = router(peer("p", role=P), peer("d1"), peer("d2"))
    holds(state, "d1", 20)
    placed = state.place(request(pin=WorkerId("d2")), 0.0)
    assert placed.source is not None
    assert (where(placed), placed.source.worker_id) == ((None, "d2"), "d1")


def test_an_explanation_names_the_source_and_its_cost() -> None:
    state = router(peer("a"), peer("b"))
    holds(state, "a", 20)
    explanation = state.preview(request(pin=WorkerId("b")), 0.0).explanation
    assert explanation is not None
    assert "pulls up to 20 blocks from a" in explanation.why
    assert explanation.candidates[0].terms["transfer"] == round((0.002 + 20 * 0.001) / (BLOCK * TOKEN_S), 3)


# --- what a pull costs ---------------------------------------------------------------------------------------------


def figures(*cards: WorkerCard, gone: str = "") -> PeerSource:
    known = PeerFigures()
    for one in cards:
        known.note(one)
    known.forget(WorkerId(gone))
    kind = kind_of(peer("a"))
    assert kind is not None
    return known.source(kind, at("a"), 20, 0.1)


def test_costs_are_those_that_workers_measured() -> None:
    measured = figures(peer("a"), peer("new", prefill_token_s=0.0, pull_block_s=0.0, pull_latency_s=0.0))
    assert (measured.block, measured.latency) == (0.001 / 0.016, 0.002 / 0.016)


def test_pulls_that_nobody_measured_cost_what_those_from_prefill_workers_do() -> None:
    found = figures(peer("a", pull_block_s=0.0, pull_latency_s=0.0))
    assert (found.block, found.latency) == (0.1, UNMEASURED_LATENCY_S / 0.016)


def test_a_card_replaces_the_one_before() -> None:
    """A worker whose measurements are old reports none, so pulls are tried again."""
    slow, silent = peer("a", pull_block_s=9.0), peer("a", pull_block_s=0.0, pull_latency_s=0.0)
    assert figures(peer("a"), slow).block == 9.0 / 0.016
    assert figures(slow, silent).block == 0.1


def test_workers_that_left_count_no_more() -> None:
    assert figures(peer("a"), peer("b", pull_block_s=0.003)).block == 0.002 / 0.016
    assert figures(peer("a"), peer("b", pull_block_s=0.003), gone="b").block == 0.001 / 0.016


def test_nothing_is_pulled_where_computing_was_not_measured() -> None:
    assert pull_of(figures(peer("a", prefill_token_s=0.0)), (0, 0, 0, 0), None, Weights(), 20) is None


def test_a_pull_has_to_save_more_than_its_latency() -> None:
    source = PeerSource(at("a"), 20, 0.1, 8.0)
    assert pull_of(source, (0,) * 4, None, Weights(), 20) == PeerPull(at("a"), 20, 10.0)
    assert pull_of(source, (4,) * 4, None, Weights(), 20) is None
    assert pull_of(source, (0,) * 4, None, Weights(), 15) is None


def test_slow_pulls_are_not_made() -> None:
    assert pull_of(PeerSource(at("a"), 20, 1.1, 0.0), (0,) * 4, None, Weights(), 20) is None


def test_blocks_in_own_tiers_need_not_be_pulled() -> None:
    assert pull_of(PeerSource(at("a"), 20, 0.5, 0.0), (0, 20, 20, 20), None, Weights(), 20) is None


@given(st.integers(0, 20), st.floats(0, 5))
def test_terms_of_a_pull_add_up_to_its_cost(blocks: int, work: float) -> None:
    pulling = candidate("x", pull=PeerPull(at("a"), blocks, work))
    for leg in ("whole", "prefill", "decode"):
        cost = cost_of(leg)  # type: ignore[arg-type]
        assert abs(cost.cost(pulling) - sum(cost.terms(pulling)) / pulling.capacity) < 1e-6
