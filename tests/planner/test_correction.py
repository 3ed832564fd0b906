"""Correction of profiles by observed times."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.correction import HIGHEST, LOWEST, Corrections, corrected
from kvmesh.planner.sizing import Demand, mean_wait_s, prefill_time_s
from tests.support.planning import an_8b

PROFILE = an_8b()
DEMAND = Demand(20.0, 2000, 200)
WORKERS = (4, 4)
TTFT_S = prefill_time_s(PROFILE, 2000) + mean_wait_s(4, 20.0, prefill_time_s(PROFILE, 2000))


def settled_itl_s(workers: int, slower: float = 1.0) -> float:
    """Return the ITL of workers that take `slower` times the profile's time: the batch grows with the step."""
    itl_s = 0.01
    for _ in range(200):
        held_tokens = DEMAND.rps * DEMAND.osl_tokens * itl_s / workers * DEMAND.context_tokens
        itl_s = slower * PROFILE.decode_s(held_tokens, DEMAND.context_tokens)
    return itl_s


ITL_S = settled_itl_s(4)


def after(intervals: int, ttft_s: float | None, itl_s: float | None, requests: float = 1000.0) -> Corrections:
    corrections = Corrections()
    for _ in range(intervals):
        corrections = corrected(corrections, (PROFILE, PROFILE), DEMAND, requests, WORKERS, (ttft_s, itl_s))
    return corrections


def test_workers_as_profiled_need_no_correction() -> None:
    corrections = after(10, TTFT_S, ITL_S)
    assert (corrections.ttft, corrections.itl) == pytest.approx((1.0, 1.0))


def test_slower_workers_are_learnt_gradually() -> None:
    slow_itl_s = settled_itl_s(4, 1.5)
    once, often = after(1, 1.5 * TTFT_S, slow_itl_s), after(40, 1.5 * TTFT_S, slow_itl_s)
    assert 1.0 < once.ttft < 1.2 and 1.0 < once.itl < 1.2
    assert often.itl == pytest.approx(1.5, rel=0.01)
    assert often.ttft == pytest.approx(1.5, rel=0.01)


def test_slow_steps_are_not_counted_twice() -> None:
    assert settled_itl_s(4, 1.2) > 1.25 * ITL_S
    assert after(40, None, settled_itl_s(4, 1.2)).itl == pytest.approx(1.2, rel=0.01)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 60))
def test_corrections_are_bounded(ttft_s: float, itl_s: float, intervals: int) -> None:
    corrections = after(intervals, ttft_s, itl_s)
    assert LOWEST <= corrections.ttft <= HIGHEST
    assert LOWEST <= corrections.itl <= HIGHEST


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 0.0, -1.0])
def test_unknown_latencies_change_nothing(value: float | None) -> None:
    assert after(5, value, value) == Corrections()


def test_a_few_requests_change_nothing() -> None:
    corrections = after(5, 10.0, 10.0, requests=3)
    assert (corrections.ttft, corrections.itl) == (1.0, 1.0)
    assert "too few" in corrections.note


def test_a_ttft_that_is_mostly_waiting_changes_nothing() -> None:
    busy = Demand(70.0, 2000, 200)  # 3.4 erlangs on 4 workers
    corrections = corrected(Corrections(), (PROFILE, PROFILE), busy, 1000, (4, 40), (5.0, None))
    assert corrections.ttft == 1.0
    assert "mostly waiting" in corrections.note


def test_the_itl_of_full_decode_workers_changes_nothing() -> None:
    corrections = corrected(Corrections(), (PROFILE, PROFILE), DEMAND, 1000, (40, 0), (None, 5.0))
    crowded = Demand(500.0, 2000, 200)
    corrections = corrected(Corrections(), (PROFILE, PROFILE), crowded, 1000, (400, 1), (None, 5.0))
    assert corrections.itl == 1.0
    assert "decode is full" in corrections.note
