"""Test how many batches may be held back, of one source and of all."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvevents.pending import PendingBatches, PendingBudget


def test_the_oldest_kept_makes_room() -> None:
    pending = PendingBatches(2, 100, PendingBudget())
    assert [pending.keep(seq, b"x") for seq in (7, 5, 6)] == [[], [], [7]]
    assert (list(pending), pending.highest, pending.latest_run()) == ([5, 6], 6, 5)


def test_a_batch_larger_than_the_bound_is_not_kept() -> None:
    pending = PendingBatches(9, 4, PendingBudget())
    pending.keep(1, b"xx")
    assert pending.keep(2, b"xxxxx") == [1, 2]
    assert (len(pending), pending.highest, pending.latest_run()) == (0, None, None)


def test_a_source_makes_room_for_itself_and_not_for_others() -> None:
    budget = PendingBudget(10)
    hog, other = PendingBatches(9, 100, budget), PendingBatches(9, 100, budget)
    hog.keep(1, b"x" * 10)
    assert other.keep(1, b"x") == [1]
    assert hog.get(1) is not None
    hog.clear()
    assert other.keep(1, b"x") == []


keeps = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 12)), max_size=40)


@given(keeps, st.integers(0, 9))
def test_bounds_hold_and_bytes_are_counted_right(keeps: list[tuple[int, int, int]], forget: int) -> None:
    budget = PendingBudget(30)
    sources = [PendingBatches(4, 20, budget) for _ in range(2)]
    for which, seq, size in keeps:
        sources[which].keep(seq, bytes(size))
        sources[1 - which].forget(forget)
        sizes = [[len(source.get(seq) or b"") for seq in source] for source in sources]
        assert budget.used_bytes == sum(map(sum, sizes)) <= 30
        assert all(sum(kept) <= 20 and len(kept) <= 4 for kept in sizes)
    for source in sources:
        source.clear()
    assert budget.used_bytes == 0
