"""Lines of one kind are limited, and counted where they are left out."""

from kvmesh.mesh.log_flood import BURST, MOST_KINDS, PER_S, LogFlood


def test_the_first_lines_of_a_kind_all_pass() -> None:
    flood = LogFlood()
    assert all(flood.passes("a", 0.0) for _ in range(BURST))
    assert not flood.passes("a", 0.0)
    assert flood.passes("b", 0.0), "another kind is not limited with it"


def test_a_kind_that_goes_on_gets_a_line_now_and_then() -> None:
    flood = LogFlood()
    passed = sum(flood.passes("a", n / 100) for n in range(10_000))  # 100 a second for 100 s
    assert BURST + 100 * PER_S - 2 <= passed <= BURST + 100 * PER_S + 2


def test_the_summary_counts_what_was_left_out_once() -> None:
    flood = LogFlood()
    left_out = sum(not flood.passes("a", 1.0) for _ in range(BURST + 7))
    assert left_out == 7
    assert flood.waits_for_summary
    assert flood.summary() == [("a", 7)]
    assert flood.summary() == [] and not flood.waits_for_summary


def test_the_number_of_kinds_is_bounded() -> None:
    flood = LogFlood()
    for n in range(3 * MOST_KINDS):
        flood.passes(n, n / 1000)
    assert len(flood._kinds) <= MOST_KINDS
