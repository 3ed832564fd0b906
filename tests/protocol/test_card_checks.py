"""A worker's card that cannot be right is refused by the name of its field."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.protocol.card_checks import MAX_FEATURES, MAX_LORAS, MAX_NAME_CHARS, MAX_RANKS, problem_of
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import CardTier, Role, WorkerCard

CARD = WorkerCard(
    worker_id=WorkerId("w1"), name="decode-0", role=Role.DECODE, model="m", model_path="/models/m",
    address="10.0.0.1:7000", block_size=16, total_blocks=512, context_tokens=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dp_size", 0),
        ("dp_size", 20_000),
        ("block_size", 0),
        ("block_size", -16),
        ("total_blocks", 0),
        ("total_blocks", 1 << 40),
        ("context_tokens", 0),
        ("max_num_seqs", 0),
        ("capacity", 0.0),
        ("capacity", float("nan")),
        ("capacity", float("inf")),
        ("rank_kv_events", (("tcp://a:1", ""),)),
        ("worker_id", "w2"),
        ("kv_key", "x" * 39),
        ("kv_key", " " * 40),
        ("loras", ("x",) * (MAX_LORAS + 1)),
        ("features", ("x",) * (MAX_FEATURES + 1)),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    assert field in problem_of(replace(CARD, **{field: value}), "w1")


@pytest.mark.parametrize("field", ["name", "model", "transfer", "tool_parser"])
def test_an_endless_name_is_refused(field: str) -> None:
    problem = problem_of(replace(CARD, **{field: "x" * (MAX_NAME_CHARS + 1)}), "w1")
    assert problem == f"a name in it has {MAX_NAME_CHARS + 1} characters, expected at most {MAX_NAME_CHARS}"


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_token_s": float("nan")},
        {"tiers": (CardTier(tier=1, blocks=1, block_s=float("inf")),)},
        {"tiers": (CardTier(tier=1, blocks=1), CardTier(tier=1, blocks=2))},
    ],
)
def test_tiers_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    assert "its tiers" in problem_of(replace(CARD, **fields), "w1")


def test_the_cards_of_real_deployments_pass() -> None:
    ranks = tuple((f"tcp://10.0.0.1:{port}", "") for port in range(MAX_RANKS - 1))
    large = replace(CARD, dp_size=MAX_RANKS, rank_kv_events=ranks, context_tokens=10_000_000, total_blocks=4_000_000)
    assert problem_of(large, "w1") == problem_of(CARD, "w1") == ""
