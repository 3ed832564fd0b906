"""No more than the limit of a key is used in any minute."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.keys.window import SLOT_S, WINDOW_S, SlidingWindow, slot_of

STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(1, 30), st.integers(0, 100)), max_size=60)


@given(STEPS, st.integers(1, 50))
def test_no_minute_holds_more_than_the_limit(steps: list[tuple[float, int, int]], limit: int) -> None:
    """Also where a part of what was taken is given back later."""
    window, now, uses = SlidingWindow(limit), 0.0, list[tuple[float, int]]()
    for pause_s, amount, returned_percent in steps:
        now += pause_s
        if not window.take(now, amount):
            continue
        uses.append((now, amount - amount * returned_percent // 100))
        window.give_back(slot_of(now), amount * returned_percent // 100)
    for start, _ in uses:
        assert sum(amount for time, amount in uses if start <= time < start + WINDOW_S) <= limit


@given(STEPS, st.integers(1, 50), st.integers(1, 50))
def test_after_the_wait_that_is_named_the_amount_is_free(
    steps: list[tuple[float, int, int]], limit: int, wanted: int
) -> None:
    window, now = SlidingWindow(limit), 0.0
    for pause_s, amount, _ in steps:
        now += pause_s
        window.take(now, amount)
    wait_s = window.wait_s(now, wanted)
    assert 0 <= wait_s <= WINDOW_S + SLOT_S
    if wait_s:
        assert window.free(max(now, now + wait_s - SLOT_S / 2)) < min(wanted, limit)
    assert window.free(now + wait_s + 1e-6) >= min(wanted, limit)


def test_the_whole_limit_can_be_used_at_once_and_again_a_minute_later() -> None:
    window = SlidingWindow(10)
    assert window.take(0.0, 10)
    assert not window.take(60.0, 1)
    assert window.take(60.5, 10)


def test_what_was_charged_beyond_the_limit_is_waited_for() -> None:
    window = SlidingWindow(10)
    window.charge(0.0, 25)
    assert window.free(59.0) == 0
    assert window.wait_s(59.0, 1) == 1.5
    assert window.free(61.0) == 10


@given(st.integers(0, 10_000), st.floats(0, 1e6))
def test_what_is_spread_over_the_minute_returns_evenly(amount: int, now: float) -> None:
    window = SlidingWindow(10_000)
    window.spread(now, amount)
    assert window.used == amount
    for passed_s in (0.0, 15.0, 30.0, 45.0, 61.0):
        expected = 10_000 - amount * max(0.0, 1 - passed_s / WINDOW_S)
        assert abs(window.free(now + passed_s) - expected) <= amount * 2 * SLOT_S / WINDOW_S + 1
