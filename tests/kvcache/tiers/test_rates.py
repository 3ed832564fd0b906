"""A load is made if it is faster than computing, and its estimate recovers."""

import pytest

from kvmesh.kvcache.tiers.rates import (
    TRIED_BLOCKS,
    TRY_EVERY,
    ComputeRate,
    LiveLine,
    TierRates,
    blocks_to_load,
    tried_anyway,
)

MB = 1_000_000


def tier(block_s: float, latency_s: float = 0.0) -> TierRates:
    rates = TierRates(MB)
    for blocks in (1, 8, 2, 9):
        rates.line.note(blocks * MB, latency_s + blocks * block_s)
    return rates


def computing(token_s: float) -> ComputeRate:
    rate = ComputeRate()
    rate.note_step(100, 0, 100 * token_s)
    return rate


def test_latency_and_slope_are_told_apart() -> None:
    line = tier(0.001, 0.25).line
    assert line.slope * MB == pytest.approx(0.001, rel=1e-3)
    assert line.latency_s == pytest.approx(0.25, rel=1e-3)
    assert line.seconds(5 * MB) == pytest.approx(0.255, rel=1e-3)


def test_observations_of_one_size_have_no_latency() -> None:
    line = LiveLine()
    for _ in range(3):
        line.note(MB, 0.5)
    assert (line.latency_s, line.seconds(2 * MB)) == (pytest.approx(0), pytest.approx(1.0))


def test_the_latest_observations_count_most() -> None:
    line = tier(0.001).line
    for _ in range(60):
        line.note(MB, 0.5)
    assert line.seconds(MB) == pytest.approx(0.5, rel=0.02)


def test_an_estimate_is_never_negative() -> None:
    line = LiveLine()
    line.note(1, 5.0)
    line.note(100, 0.001)
    assert line.slope >= 0
    assert line.latency_s >= 0
    assert LiveLine().seconds(10) == 0


def test_steps_that_mostly_decode_say_nothing_of_prompts() -> None:
    rate = ComputeRate()
    rate.note_step(8, 8, 1.0)
    assert rate.token_s == 0


@pytest.mark.parametrize(("block_s", "loaded"), [(0.015, 10), (0.017, 0)])
def test_the_faster_way_is_taken(block_s: float, loaded: int) -> None:
    """Computing a block of 16 tokens takes 16 ms."""
    assert blocks_to_load([(tier(block_s), 10)], computing(0.001), 16, 0) == loaded


def test_a_load_may_take_as_long_as_what_is_computed_before() -> None:
    assert blocks_to_load([(tier(0.017), 10)], computing(0.001), 16, backlog_tokens=20) == 10


def test_bytes_on_their_way_delay_a_load() -> None:
    rates = tier(0.010)
    rates.backlog_bytes = 7 * MB
    assert blocks_to_load([(rates, 10)], computing(0.001), 16, 0) == 0


def test_what_was_never_measured_is_tried() -> None:
    assert blocks_to_load([(TierRates(MB), 10)], computing(0.001), 16, 0) == 10
    assert blocks_to_load([(tier(9.0), 10)], ComputeRate(), 16, 0) == 10


def test_the_border_between_tiers_is_where_loading_stops_to_pay() -> None:
    fast, slow = tier(0.001), tier(0.050)
    assert blocks_to_load([(fast, 10), (slow, 10)], computing(0.001), 16, 0) == 10
    assert blocks_to_load([(slow, 1), (fast, 30)], computing(0.001), 16, 0) == 31, "past a slow part"


def test_now_and_then_a_refused_load_is_made() -> None:
    rates = tier(1.0)
    made = [tried_anyway(rates, 10) for _ in range(2 * TRY_EVERY)]
    assert [count for count in made if count] == [TRIED_BLOCKS] * 2


def test_steps_that_seem_to_cost_nothing_count_by_their_mean() -> None:
    compute = ComputeRate()
    compute.note_step(512, 0, 0.05)
    compute.note_step(200, 0, 0.06)
    assert compute.line.slope == 0
    assert compute.token_s == pytest.approx((0.05 * 0.9 + 0.06) / (512 * 0.9 + 200))


def test_noise_between_steps_of_much_the_same_size_makes_no_token_cheap() -> None:
    """A prompt of 1,922 tokens is computed in steps of 512 and one of 386, which took almost as long here."""
    compute = ComputeRate()
    for tokens, took_s in ((512, 0.020), (512, 0.021), (512, 0.020), (386, 0.0199)):
        compute.note_step(tokens, 0, took_s)
    assert compute.token_s > 0.8 * 0.02 / 512


def test_loads_stopped_because_they_are_late_are_refused_after_two() -> None:
    """Two of fifteen blocks took longer than computing six: one stall is forgiven, a slow tier is left alone."""
    rates, compute = TierRates(1000), ComputeRate()
    compute.line.note(256, 0.76)
    for _ in range(20):
        rates.line.note(15 * 1000, 0.02)
    rates.note_late(15, 2, 0.28)
    assert blocks_to_load([(rates, 15)], compute, 16, 0) == 15
    rates.note_late(15, 2, 0.28)
    assert blocks_to_load([(rates, 15)], compute, 16, 0) == 0


def test_a_late_load_that_brought_nothing_counts_as_if_all_had_come() -> None:
    rates = TierRates(1000)
    rates.note_late(10, 0, 0.5)
    assert rates.load_s(10) == pytest.approx(0.5)
