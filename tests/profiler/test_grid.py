"""The points that are measured, and the tables of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.profiler.grid import (
    DecodePoint,
    PrefillPoint,
    WorkerLimits,
    decode_cells,
    decode_table,
    prefill_axis,
    prefill_table,
)
from kvmesh.protocol.profile import Profile, check_profile

any_limits = st.builds(
    WorkerLimits,
    context_tokens=st.integers(64, 1 << 20),
    total_kv_tokens=st.integers(256, 1 << 24),
    max_num_seqs=st.integers(1, 1024),
)


@given(any_limits, st.integers(1, 20))
def test_prompts_fit_the_worker_and_increase(limits: WorkerLimits, count: int) -> None:
    axis = prefill_axis(limits, count)
    assert 1 <= len(axis) <= count
    assert all(a < b for a, b in pairwise(axis))
    assert axis[0] >= 1
    assert axis[-1] + 1 < limits.context_tokens
    assert axis[-1] <= limits.total_kv_tokens


@given(any_limits, st.integers(1, 8), st.integers(1, 8), st.integers(1, 60))
def test_batches_fit_the_worker_and_include_one_sequence(
    limits: WorkerLimits, contexts: int, batches: int, answer: int
) -> None:
    cells = decode_cells(limits, contexts, batches, answer)
    assert 1 <= len(cells) <= contexts * batches
    assert len(set(cells)) == len(cells)
    for cell in cells:
        assert cell.batch <= limits.max_num_seqs
        assert cell.batch == 1 or cell.batch * (cell.context_tokens + answer) <= limits.total_kv_tokens
        assert cell.context_tokens <= limits.context_tokens
    if batches > 1:
        assert {c.context_tokens for c in cells if c.batch == 1} == {c.context_tokens for c in cells}


def decode_point(context: int, batch: int, itl_s: float) -> DecodePoint:
    return DecodePoint(context_tokens=context, batch=batch, kv_tokens=context * batch, itl_s=itl_s, spread=0, repeats=1)


def test_columns_with_batches_of_their_own_share_an_axis() -> None:
    table = decode_table([decode_point(100, 1, 1.0), decode_point(100, 4, 4.0), decode_point(200, 1, 2.0)])
    assert table is not None
    assert table.kv_tokens == [100, 200, 400]
    assert table.context_tokens == [100, 200]
    assert table.itl_s == [[1.0, 2.0], [2.0, 2.0], [4.0, 2.0]]


def test_beyond_the_largest_batch_a_step_gets_no_faster() -> None:
    table = decode_table([decode_point(100, 1, 3.0), decode_point(100, 2, 2.0), decode_point(900, 1, 1.0)])
    assert table is not None
    assert [row[0] for row in table.itl_s] == [3.0, 2.0, 2.0]


def test_no_points_make_no_table() -> None:
    assert decode_table([]) is None
    assert prefill_table([]) is None


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 4000), st.integers(1, 64)), st.floats(0, 10, allow_nan=False), min_size=1, max_size=30
    )
)
def test_any_points_make_a_valid_profile_that_has_their_values(cells: dict[tuple[int, int], float]) -> None:
    table = decode_table([decode_point(context, batch, itl) for (context, batch), itl in cells.items()])
    profile = Profile(model="m", engine="e", device="d", decode=table, total_kv_tokens=1 << 20)
    check_profile(profile, "here")
    for (context, batch), itl in cells.items():
        assert profile.decode_s(context * batch, context) == pytest.approx(itl, abs=1e-6)


def test_prompts_are_sorted() -> None:
    points = [PrefillPoint(isl_tokens=isl, ttft_s=isl / 100, spread=0, repeats=1) for isl in (50, 10)]
    table = prefill_table(points)
    assert table is not None
    assert (table.isl_tokens, table.ttft_s) == ([10, 50], [0.1, 0.5])
