"""The price of a block to compute follows load, spread and demand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.router.pressure import (
    BUSY_WINDOW_S,
    DEMAND_WINDOW_S,
    MAX_BUSY_SHARE,
    MAX_SPREAD,
    BusyShare,
    PrefixDemand,
    WorkSpread,
    recompute_price,
)

A, B = b"aaaaaaaa", b"bbbbbbbb"

# --- the price -----------------------------------------------------------------------------------------------------


def test_on_idle_workers_the_price_is_one() -> None:
    assert recompute_price(0.0, 1.0, 0.0, 0) == 1.0


def test_the_price_rises_with_load() -> None:
    idle, some, half, most, near = (recompute_price(busy, 1.0, 0.0, 1) for busy in (0.0, 0.25, 0.5, 0.75, 0.9))
    assert 0 < some - idle < half - some < most - half < near - most


def test_requests_that_would_use_a_copy_share_its_price() -> None:
    assert recompute_price(0.5, 1.0, 3.0, 1) == pytest.approx(recompute_price(0.5, 1.0, 0.0, 1) / 4)


def test_what_counts_is_the_demand_for_each_copy_there_is() -> None:
    assert recompute_price(0.5, 1.0, 6.0, 3) == recompute_price(0.5, 1.0, 2.0, 1)


def test_demand_without_holders_counts_as_for_one() -> None:
    assert recompute_price(0.5, 1.0, 2.0, 0) == recompute_price(0.5, 1.0, 2.0, 1)


def test_above_a_share_the_estimate_has_no_meaning_and_stays() -> None:
    assert recompute_price(1.0, 1.0, 0.0, 1) == recompute_price(MAX_BUSY_SHARE, 1.0, 0.0, 1)


def test_unequal_requests_raise_the_price() -> None:
    equal, unequal = (recompute_price(0.5, spread, 0.0, 1) for spread in (0.0, 4.0))
    assert 1 < equal < unequal
    assert recompute_price(0.0, 4.0, 0.0, 1) == 1.0, "on idle workers there are no others"


shares, demands = st.floats(0, 1), st.floats(0, 1e6)


@given(shares, shares, demands, demands, st.integers(0, 1000))
def test_the_price_follows_load_and_demand_within_bounds(
    busy: float, more_busy: float, asked: float, asked_more: float, holders: int
) -> None:
    busy, more_busy = sorted((busy, more_busy))
    asked, asked_more = sorted((asked, asked_more))
    price = recompute_price(busy, 1.0, asked, holders)
    assert 0 < price <= recompute_price(more_busy, 1.0, asked, holders)
    assert price >= recompute_price(busy, 1.0, asked_more, holders)
    assert price <= recompute_price(busy, 1.0, asked, holders + 1) <= recompute_price(1.0, 1.0, 0.0, 1)


# --- how unequal requests are --------------------------------------------------------------------------------------


def spread_of(*tokens: int) -> float:
    spread = WorkSpread()
    for one in tokens:
        spread.add(one)
    return spread.value


def test_the_spread_starts_at_one() -> None:
    assert spread_of() == spread_of(1, 1000, 1) == 1.0
    assert spread_of(*[0] * 100) == 1.0, "nothing was to compute"


def test_equal_requests_have_no_spread() -> None:
    assert spread_of(*[700] * 100) == pytest.approx(0.0)


def test_the_spread_is_variance_over_squared_mean() -> None:
    assert spread_of(*[0, 1000] * 1000) == pytest.approx(1.0, abs=0.01)
    assert spread_of(*[0, 0, 0, 1000] * 1000) == pytest.approx(3.0, abs=0.1)


def test_the_spread_is_bounded() -> None:
    assert spread_of(*[1] * 100, 10**6) == MAX_SPREAD


def test_what_was_long_ago_is_forgotten() -> None:
    assert spread_of(*[0, 1000] * 1000, *[500] * 3000) < 0.01


@given(st.lists(st.integers(0, 10**6), max_size=60))
def test_the_spread_is_never_negative_nor_above_its_bound(tokens: list[int]) -> None:
    assert 0.0 <= spread_of(*tokens) <= MAX_SPREAD


# --- how busy the workers are --------------------------------------------------------------------------------------


def test_without_placements_the_share_is_zero() -> None:
    assert BusyShare().of(4, 100.0) == 0.0
    assert BusyShare().of(0, 100.0) == 0.0


def test_from_the_start_it_is_the_share_so_far() -> None:
    """The share means something long before the first window is over."""
    busy = BusyShare()
    busy.change(+1, 100.0)
    assert busy.of(2, 100.5) == pytest.approx(0.5)
    busy.change(-1, 101.0)
    assert busy.of(2, 102.0) == pytest.approx(0.25, rel=0.02)


def test_always_busy_workers_have_a_share_of_one() -> None:
    busy = BusyShare()
    busy.change(+3, 0.0)
    assert busy.of(4, 1e5) == pytest.approx(0.75)


def test_what_was_fades_over_the_window() -> None:
    busy = BusyShare()
    busy.change(+1, 0.0)
    busy.change(-1, 1e5)
    assert busy.of(1, 1e5 + BUSY_WINDOW_S) == pytest.approx(math.exp(-1), rel=0.01)
    assert busy.of(1, 1e5 + 20 * BUSY_WINDOW_S) < 1e-8


def test_how_often_one_asks_does_not_matter() -> None:
    asked, unasked = BusyShare(), BusyShare()
    for busy in (asked, unasked):
        busy.change(+1, 0.0)
        busy.change(-1, 10.0)
    for second in range(300):
        asked.of(1, second / 10)
    assert asked.of(1, 30.0) == pytest.approx(unasked.of(1, 30.0))


def test_the_busy_share_is_at_most_one() -> None:
    busy = BusyShare()
    busy.change(+4, 0.0)
    assert busy.of(2, 10.0) == 1.0


def test_time_that_goes_back_changes_nothing() -> None:
    busy = BusyShare()
    busy.change(+1, 100.0)
    before = busy.of(2, 110.0)
    assert busy.of(2, 50.0) == before
    assert busy.of(2, 110.0) == before


changes = st.lists(st.tuples(st.floats(0, 1000), st.sampled_from([0, 1, 2])), max_size=30)


@given(changes, st.floats(0, 10_000))
def test_it_is_a_share_whatever_happens(changes: list[tuple[float, int]], pause_s: float) -> None:
    busy, now, count = BusyShare(), 0.0, 0
    for elapsed_s, target in changes:
        now += elapsed_s
        busy.change(target - count, now)
        count = target
        assert 0.0 <= busy.of(2, now) <= 1.0
    assert 0.0 <= busy.of(2, now + pause_s) <= 1.0


# --- how often a prefix is asked for -------------------------------------------------------------------------------


def test_each_request_counts_once_and_fades() -> None:
    demand = PrefixDemand()
    assert demand.of(A, 0.0) == 0.0
    demand.asked(A, 0.0)
    demand.asked(A, 0.0)
    assert demand.of(A, 0.0) == 2.0
    assert demand.of(A, DEMAND_WINDOW_S) == pytest.approx(2 / math.e)
    assert demand.of(B, 0.0) == 0.0


def test_a_steady_demand_is_what_comes_in_a_window() -> None:
    demand = PrefixDemand()
    for second in range(1000):
        demand.asked(A, float(second))
    assert demand.of(A, 999.0) == pytest.approx(DEMAND_WINDOW_S, rel=0.01)


def test_reading_demand_does_not_raise_it() -> None:
    demand = PrefixDemand()
    demand.of(A, 0.0)
    assert len(demand) == 0


def test_the_prefixes_asked_for_last_are_kept() -> None:
    demand = PrefixDemand(max_prefixes=2)
    for prefix in (A, B, A, b"cccccccc"):
        demand.asked(prefix, 0.0)
    assert len(demand) == 2
    assert (demand.of(A, 0.0), demand.of(B, 0.0)) == (2.0, 0.0)
