"""An explanation reports what was decided, and why."""

import pytest

from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import CandidateReport, Explanation, Placed
from kvmesh.router.core import RouterState
from kvmesh.router.explain import MAX_CANDIDATES
from kvmesh.router.index import Holder
from kvmesh.router.load import Share
from kvmesh.router.policies import Policy
from kvmesh.router.rules import Saturation
from kvmesh.router.selection import Weights
from tests.support.routing import TOKENS, P, card, holds, prompt, request, router


def explained(state: RouterState, name: str = "why", now: float = 0.0, **fields: object) -> Explanation:
    explanation = state.place(request(name, explain=True, **fields), now).explanation
    assert explanation is not None
    return explanation


def of(explanation: Explanation, worker: str, leg: str = "whole") -> CandidateReport:
    [report] = [one for one in explanation.candidates if (one.worker, one.leg) == (worker, leg)]
    return report


def chosen(explanation: Explanation, leg: str = "whole") -> str:
    [report] = [one for one in explanation.candidates if (one.note, one.leg) == ("chosen", leg)]
    return report.worker


def test_without_asking_no_explanation_is_given() -> None:
    assert router(card("d")).place(request(), 0.0).explanation is None


def test_all_candidates_are_reported_cheapest_first() -> None:
    state = router(card("a"), card("b"), card("c"))
    holds(state, "b", 10)
    state.load.set_elsewhere("two", {Holder(WorkerId("c"), 0): Share(50 * 16, 7, 3)}, 0.0)
    explanation = explained(state)
    assert [one.worker for one in explanation.candidates] == ["b", "a", "c"]
    assert chosen(explanation) == "b"
    costs = [one.cost for one in explanation.candidates]
    assert costs == sorted(costs)


def test_a_candidate_is_reported_with_overlap_per_tier_and_load() -> None:
    state = router(card("d", capacity=2.0, dp_size=2))
    for dp_rank, (blocks, medium) in enumerate([(12, "CPU"), (15, "DISK")]):
        holds(state, "d", blocks, dp_rank=dp_rank, medium=medium)
    holds(state, "d", 4, dp_rank=0)
    state.load.set_elsewhere("two", {Holder(WorkerId("d"), 0): Share(50, 7, 3)}, 0.0)
    first, second = sorted(explained(state).candidates, key=lambda one: one.dp_rank)
    assert (first.overlap_blocks, second.overlap_blocks) == ((4, 12, 12, 12), (0, 0, 15, 15))
    assert (first.queued_tokens, first.held_blocks, first.requests, first.capacity) == (50, 7, 3, 2.0)
    assert (second.queued_tokens, second.held_blocks, second.requests) == (0, 0, 0)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 3.0])
def test_the_terms_are_what_the_cost_is_made_of(capacity: float) -> None:
    weights = Weights(decode=0.2, request=0.5)
    state = router(card("p", P, capacity=capacity), card("d", capacity=capacity), card("e"), weights=weights)
    holds(state, "d", 3)
    elsewhere = {Holder(WorkerId(name), 0): Share(100, 10, 1) for name in "dpe"}
    state.load.set_elsewhere("two", elsewhere, 0.0)
    explanation = explained(state)
    assert {one.leg for one in explanation.candidates} == {"prefill", "decode"}
    for one in explanation.candidates:
        assert sum(one.terms.values()) == pytest.approx(one.cost * one.capacity, abs=0.01)
        assert set(one.terms) == ({"compute", "queue"} if one.leg == "prefill" else {"held", "requests", "transfer"})


def test_each_leg_of_a_disaggregated_request_is_explained() -> None:
    explanation = explained(router(card("p", P), card("d")))
    assert (chosen(explanation, "prefill"), chosen(explanation, "decode")) == ("p", "d")
    reason, prefill, decode = explanation.why.split("; ")
    assert reason == "320 of 320 prompt tokens are to compute"
    assert prefill == "prefill: p, the only one that may take it"
    assert decode == "decode: d, the only one that may take it"


def test_the_price_of_recomputing_is_reported_with_its_inputs() -> None:
    state = router(card("a"), card("b"))
    holds(state, "a", 10)
    for number in range(3):
        state.place(request(f"r{number}"), 0.0)
    state.free(RequestId("r0"), 100.0)
    explanation = explained(state, now=100.0)
    assert explanation.busy_share > 0
    assert explanation.asked_before > 0
    assert 0 < explanation.recompute_price != 1.0
    assert explained(router(card("a"), recompute_price=2.5)).recompute_price == 2.5


def test_the_busy_share_is_that_of_all_workers() -> None:
    state = router(card("a"), card("b"))
    state.place(request("r", pin=WorkerId("a")), 0.0)
    for fields in ({}, {"pin": WorkerId("b")}, {"exclude": (WorkerId("a"),)}):
        explanation = state.preview(request(**fields), 100.0).explanation  # type: ignore[arg-type]
        assert explanation is not None
        assert explanation.busy_share == 0.5


def test_workers_that_compute_for_another_router_are_busy() -> None:
    state = router(card("a"), card("b"))
    state.load.set_elsewhere("two", {Holder(WorkerId("a"), 0): Share(50, 0, 0)}, 0.0)
    state.preview(request(), 0.0)
    explanation = state.preview(request(), 100.0).explanation
    assert explanation is not None
    assert explanation.busy_share == 0.5


def test_workers_that_have_computed_all_are_no_longer_busy() -> None:
    state = router(card("a"))
    state.place(request("r"), 0.0)
    state.prefill_done(RequestId("r"), 100.0)
    assert explained(state, now=2000.0).busy_share == 0.0


def test_the_time_in_the_queue_is_reported() -> None:
    state = router(card("d"), saturation=Saturation(queued_tokens=100))
    state.place(request("first"), 0.0)
    state.submit(request("second", explain=True), 1.0)
    assert state.dispatch(1.0) == []
    state.free(RequestId("first"), 3.5)
    [(_, placed)] = state.dispatch(3.5)
    assert isinstance(placed, Placed)
    assert placed.explanation is not None
    assert placed.explanation.waited_s == 2.5


# --- the reason in words is true -----------------------------------------------------------------------------------


def test_the_reason_names_the_next_cheapest_cost() -> None:
    state = router(card("a"), card("b"), recompute_price=1.0)
    holds(state, "b", 10)
    explanation = explained(state)
    costs = {one.worker: one.cost for one in explanation.candidates}
    assert costs["b"] < costs["a"]
    assert explanation.why.endswith(f"whole: b, cost {costs['b']:.1f}, the next {costs['a']:.1f}")


def test_equal_workers_take_turns() -> None:
    state = router(card("a"), card("b"))
    holds(state, "a", 20)
    holds(state, "b", 20)
    for name in ("r1", "r2"):
        explanation = explained(state, name)
        state.free(RequestId(name))
        assert "chosen longest ago" in explanation.why
    assert chosen(explanation) == "b"


def test_one_worker_alone_is_the_only_one_that_may() -> None:
    assert explained(router(card("a"))).why.endswith("a, the only one that may take it")
    pinned = explained(router(card("a"), card("b")), pin=WorkerId("b"))
    assert pinned.why.endswith("b, the only one that may take it")
    assert [one.worker for one in pinned.candidates] == ["b"]


def test_a_session_is_the_reason_where_it_decides() -> None:
    state = router(card("a"), card("b"), affinity_ttl_s=60.0)
    first = chosen(explained(state, "r1", session="s"))
    explanation = explained(state, "r2", tokens=prompt(1), session="s")
    assert chosen(explanation) == first
    assert explanation.why.endswith(f"{first}, its session runs there")


def test_a_held_back_newcomer_is_reported_but_no_rival() -> None:
    state = router(card("old"))
    state.place(request("r0", prompt(1)), 100.0)
    state.add_worker(card("new"), 100.0)
    state.place(request("r1", prompt(2)), 100.0)
    state.place(request("r2", prompt(3), pin=WorkerId("old")), 100.0)
    explanation = explained(state, now=100.0)
    assert (of(explanation, "new").note, of(explanation, "old").note) == ("new: held back", "chosen")
    assert of(explanation, "new").cost < of(explanation, "old").cost
    assert explanation.why.endswith("old, the only one that may take it now")


def test_a_full_worker_is_reported_but_no_rival() -> None:
    state = router(card("small", max_num_seqs=1), card("large"))
    state.place(request("r0", prompt(1, 1), pin=WorkerId("small")), 0.0)
    state.place(request("r1", prompt(2), pin=WorkerId("large")), 0.0)
    explanation = explained(state)
    assert (of(explanation, "small").note, of(explanation, "large").note) == ("full", "chosen")
    assert of(explanation, "small").cost < of(explanation, "large").cost


def test_each_passed_over_worker_is_reported_with_its_reason() -> None:
    state = router(card("small", max_num_seqs=1), card("large"))
    for number, worker in enumerate(("small", "large", "large")):
        state.place(request(f"r{number}", prompt(number + 1), pin=WorkerId(worker)), 100.0)
    state.add_worker(card("new"), 100.0)
    state.place(request("r3", prompt(4), pin=WorkerId("new")), 100.0)
    explanation = explained(state, now=100.0)
    notes = {one.worker: one.note for one in explanation.candidates}
    assert notes == {"small": "full", "large": "chosen", "new": "new: held back"}


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("least-loaded", "the least loaded"),
        ("power-of-two", "the less loaded of two that were drawn"),
        ("round-robin", "whose turn it is"),
        ("random", "drawn"),
    ],
)
def test_a_policy_without_costs_gives_no_cost_as_reason(policy: Policy, why: str) -> None:
    state = router(card("a"), card("b"), policy=policy)
    holds(state, "b", 20)
    explanation = explained(state)
    assert explanation.policy == policy
    assert explanation.why.endswith(f"{chosen(explanation)}, {why}")


def test_with_a_temperature_the_choice_is_drawn() -> None:
    state = router(card("a"), card("b"), temperature=100.0)
    holds(state, "b", 20)
    whys = {}
    for number in range(20):
        explanation = explained(state, f"r{number}")
        state.free(RequestId(f"r{number}"))
        whys[chosen(explanation)] = explanation.why
    assert set(whys) == {"a", "b"}
    assert all(", drawn; the others cost" in why for why in whys.values())


# --- it is bounded -------------------------------------------------------------------------------------------------


def test_the_cheapest_of_many_candidates_are_reported() -> None:
    state = router(*[card(f"d{number}") for number in range(MAX_CANDIDATES + 10)])
    holds(state, "d70", 20)
    explanation = explained(state)
    assert len(explanation.candidates) == MAX_CANDIDATES
    assert explanation.candidates[0].note == "chosen"


def test_the_chosen_candidate_is_always_reported() -> None:
    """A policy that does not go by cost may choose the dearest."""
    state = router(card("a"), *[card(f"d{number}") for number in range(MAX_CANDIDATES + 10)], policy="round-robin")
    for number in range(MAX_CANDIDATES + 10):
        holds(state, f"d{number}", 20)
    explanation = explained(state, tokens=TOKENS)
    assert len(explanation.candidates) == MAX_CANDIDATES
    assert chosen(explanation) == "a"


# --- a preview -----------------------------------------------------------------------------------------------------


def test_a_preview_is_explained_and_changes_nothing() -> None:
    state = router(card("p", P), *[card(f"d{n}") for n in range(9)], policy="random", affinity_ttl_s=60.0)
    previews = [state.preview(request("same", session="s"), 0.0) for _ in range(3)]
    assert previews[0].explanation is not None
    assert previews == previews[:1] * 3
    assert (len(state.load), state.load.shares(), state.waiting) == (0, {}, 0)
    assert state.place(request("same", session="s", explain=True), 0.0) == previews[0]
