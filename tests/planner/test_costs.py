"""The price of a missed request, and what follows from it and the time of a start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.costs import LEAST_EVIDENCE_S, MOST_EVIDENCE_S, Horizon, quantile_of


def test_a_dearer_miss_asks_for_a_higher_quantile() -> None:
    assert quantile_of(2.0) == 0.5
    assert quantile_of(10.0) == pytest.approx(0.9)


def test_a_long_start_waits_until_the_misses_cost_as_much() -> None:
    assert Horizon(60.0, 3.0).evidence_s == LEAST_EVIDENCE_S
    assert Horizon(300.0, 3.0).evidence_s == pytest.approx(100.0)
    assert Horizon(7200.0, 3.0).evidence_s == MOST_EVIDENCE_S


def test_a_worker_is_kept_for_what_its_absence_would_cost() -> None:
    assert Horizon(60.0, 3.0).break_even_s == pytest.approx(60 + 3 * 80)


@given(
    st.floats(1, 900),
    st.floats(1.1, 20),
    st.lists(st.booleans(), min_size=1, max_size=300),
)
def test_keeping_until_the_break_even_costs_at_most_twice_the_best(
    start_s: float, miss_cost: float, needed: list[bool]
) -> None:
    """A worker costs its idle minutes until it is needed again, or the break-even if it has been taken away."""
    break_even_s, minute_s = Horizon(start_s, miss_cost).break_even_s, 60.0
    kept_s = best_s = idle_s = 0.0
    for is_needed in needed:
        if not is_needed:
            idle_s += minute_s
            continue
        kept_s += idle_s if idle_s <= break_even_s else 2 * break_even_s
        best_s += min(idle_s, break_even_s)
        idle_s = 0.0
    assert kept_s <= 2 * best_s + 1e-6


def test_a_queue_that_will_be_gone_orders_nothing() -> None:
    """Ten workers work off 200 worker seconds, beside the work of six that arrives, in 50 s: a start takes 60."""
    assert Horizon(60.0, 3.0).catch_up(work=6.0, backlog_s=200.0, ready=10, starting=0) == 0


def test_a_queue_that_will_be_there_orders_workers() -> None:
    assert Horizon(60.0, 3.0).catch_up(work=6.0, backlog_s=200.0, ready=4, starting=0) > 7


def test_starting_workers_count_against_a_queue() -> None:
    horizon = Horizon(60.0, 3.0)
    without, beside = (horizon.catch_up(6.0, 200.0, 4, starting) for starting in (0, 12))
    assert beside < without


@given(st.floats(0, 50), st.floats(0, 5000), st.floats(0, 5000), st.integers(0, 40))
def test_a_longer_queue_never_orders_fewer(work: float, backlog_s: float, more_s: float, ready: int) -> None:
    horizon = Horizon(120.0, 3.0)
    short, long = (horizon.catch_up(work, queue_s, ready, 0) for queue_s in (backlog_s, backlog_s + more_s))
    assert long >= short
