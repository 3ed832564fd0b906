"""Candidates for a placement, and what placing a prompt of ten blocks costs on them."""

from hypothesis import strategies as st

from kvmesh.protocol.ids import WorkerId
from kvmesh.router.index import Holder
from kvmesh.router.selection import Candidate, LegKind, PlacementCost, Weights

BLOCK = 16
ISL = 160  # 10 blocks
EQUAL = Weights(prefill=1.0, decode=1.0)  # so that costs can be added up by hand


def worker(name: str, cached: int = 0, dp_rank: int = 0, **fields: object) -> Candidate:
    """Return a candidate that has the first `cached` blocks of the prompt on its device."""
    values = {"overlap": (cached,) * 4} | fields
    return Candidate(Holder(WorkerId(name), dp_rank), **values)  # type: ignore[arg-type]


def prompt(leg: LegKind = "whole", isl: int = ISL, weights: Weights = EQUAL, price: float = 1.0) -> PlacementCost:
    return PlacementCost(isl, BLOCK, leg, weights, price)


depths = st.lists(st.integers(0, 12), min_size=4, max_size=4).map(lambda d: tuple(sorted(d)))
candidates = st.builds(
    Candidate,
    st.builds(Holder, st.sampled_from("abcdef"), st.integers(0, 1)),
    depths,
    st.integers(0, 10_000),
    st.integers(0, 500),
    st.integers(0, 12),
    st.integers(0, 64),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 100),
)
