"""A decode worker gets KV only of a prefill worker with the same weights, dtypes and adapter."""

from typing import Any

import pytest

from kvmesh.protocol.errors import NoWorkerError, OtherWeightsError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.kv_content import PENDING
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.core import RouterState
from kvmesh.router.metrics import FeedFacts, read_state
from kvmesh.router.pairing import UNKNOWN_PAIRS, why_apart
from tests.support.routing import P, card, prompt, request, router, where

EQUAL: dict[str, Any] = {"content_fingerprint": "old"}
NEW: dict[str, Any] = {"content_fingerprint": "new"}


def adapted(own: str, weights: str = "w") -> dict[str, Any]:
    return {"content_fingerprint": weights, "loras": ("poet",), "adapter_fingerprints": (("poet", own),)}


@pytest.mark.parametrize(
    ("prefill", "decode", "lora", "why"),
    [
        (EQUAL, EQUAL, None, ""),
        (EQUAL, NEW, None, "content"),
        ({}, EQUAL, None, ""),
        (EQUAL, {}, None, ""),
        ({}, {}, None, ""),
        ({"content_fingerprint": PENDING}, EQUAL, None, "pending"),
        (EQUAL, {"content_fingerprint": PENDING}, None, "pending"),
        ({"content_fingerprint": PENDING}, {"content_fingerprint": PENDING}, None, "pending"),
        ({"content_fingerprint": PENDING}, {}, None, "pending"),
        (EQUAL, EQUAL | {"transfer": "nixl"}, None, "transfer"),
        (adapted("a"), adapted("a"), "poet", ""),
        (adapted("a"), adapted("b"), "poet", "adapter"),
        (adapted("a"), adapted("b"), None, ""),
        (adapted("a", "v"), adapted("b", "w"), "poet", "content"),
        (adapted("a"), adapted(PENDING), "poet", "pending"),
        (adapted("a"), adapted("a") | {"adapter_fingerprints": ()}, "poet", "adapter"),
    ],
)
def test_which_workers_are_paired(prefill: dict[str, Any], decode: dict[str, Any], lora: str | None, why: str) -> None:
    assert why_apart(card("p", P, **prefill), card("d", **decode), lora) == why


def test_a_worker_with_other_weights_computes_nothing_for_others() -> None:
    state = router(card("p", P, **NEW), card("d", **EQUAL))
    placed = state.place(request(), 0.0)
    assert where(placed) == (None, "d")
    assert placed.reason == (
        "no decode worker can pull KV: d cannot take KV of p: other weights, quantisation or KV dtype"
    )
    assert counted(state)["content"] == 1


def test_a_pinned_prefill_worker_with_other_weights_is_an_error() -> None:
    state = router(card("p", P, **NEW), card("d", **EQUAL))
    with pytest.raises(NoWorkerError, match=r"other weights.*from 'p'.*equal weights"):
        state.place(request(pin_prefill="p"), 0.0)


def test_each_half_of_a_rollout_is_paired_with_its_own() -> None:
    state = router(card("p1", P, **EQUAL), card("p2", P, **NEW), card("d1", **EQUAL), card("d2", **NEW))
    for number in range(8):
        prefill, decode = where(state.place(request(str(number), prompt(number)), 0.0))
        assert (prefill, decode) in (("p1", "d1"), ("p2", "d2"))
    assert counted(state)["content"] == 8


def test_a_prefill_worker_that_has_a_partner_is_chosen_where_the_first_has_none() -> None:
    state = router(card("p1", P, **NEW), card("p2", P, **EQUAL), card("d", **EQUAL))
    assert [where(state.place(request(str(number), prompt(number)), 0.0)) for number in range(4)] == [("p2", "d")] * 4


def test_the_explanation_says_why_a_pair_was_not_taken() -> None:
    state = router(card("p", P, **EQUAL), card("d1", **EQUAL), card("e1", **NEW))
    explanation = state.preview(request(), 0.0).explanation
    assert explanation is not None
    assert explanation.why.endswith("; e cannot take KV of p: other weights, quantisation or KV dtype")
    assert counted(state)["content"] == 0, "a preview is no placement"


def test_a_worker_of_the_release_before_is_paired_and_counted() -> None:
    state = router(card("p", P), card("d", **EQUAL))
    assert where(state.place(request(), 0.0)) == ("p", "d")
    assert state.stats[UNKNOWN_PAIRS] == 1


def test_new_weights_on_a_card_count_from_then_on() -> None:
    state = router(card("p", P, **EQUAL), card("d", **EQUAL))
    assert where(state.place(request("1"), 0.0)) == ("p", "d")
    state.add_worker(card("d", **NEW))
    assert where(state.place(request("2"), 0.0)) == (None, "d")


def test_of_many_workers_those_with_other_weights_are_not_left_out_of_sight() -> None:
    cards: list[WorkerCard] = [card(f"d{number}", **NEW) for number in range(40)]
    state = router(card("p", P, **EQUAL), *cards, card("last", **EQUAL))
    assert where(state.place(request(), 0.0)) == ("p", "last")


def counted(state: RouterState) -> dict[str, float]:
    """Return what the metric says, by reason."""
    facts = FeedFacts(0, 0, 0, {})
    readings = list(read_state(state, facts, 0))
    return {one.labels[0]: one.value for one in readings if one.name == "kvmesh_router_unpaired_total"}


@pytest.mark.parametrize(("began", "may"), [("", True), ("old", True), ("new", False), (PENDING, False)])
def test_an_answer_continues_on_equal_weights_alone(began: str, may: bool) -> None:
    state = router(card("d", **EQUAL))
    if may:
        assert where(state.place(request(content=began), 0.0)) == (None, "d")
        return
    with pytest.raises(OtherWeightsError, match=r"weights with which this answer began.*send the request again"):
        state.place(request(content=began), 0.0)


def test_a_worker_that_names_no_weights_continues_any_answer() -> None:
    assert where(router(card("d")).place(request(content="old"), 0.0)) == (None, "d")


def test_a_worker_that_failed_is_not_counted_among_those_with_equal_weights() -> None:
    state = router(card("d1", **EQUAL), card("d2", **NEW))
    with pytest.raises(OtherWeightsError):
        state.place(request(content="old", exclude=(WorkerId("d1"),)), 0.0)


def test_of_two_workers_the_one_with_equal_weights_continues() -> None:
    state = router(card("d1", **NEW), card("d2", **EQUAL), card("p", P, **NEW))
    placed = state.place(request(content="old"), 0.0)
    assert (where(placed), placed.decode.content) == ((None, "d2"), "old")


def test_a_placement_names_the_weights_of_the_adapter() -> None:
    placed = router(card("d", **adapted("a"))).place(request(lora="poet"), 0.0)
    assert placed.decode.content == "a"
