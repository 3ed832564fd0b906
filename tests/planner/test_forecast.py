"""Forecasts of a series."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.forecast import (
    PLAIN,
    CannotForecastError,
    Forecaster,
    Method,
    Remembered,
    find_period,
    seasonal,
    trend,
    without_gaps,
)

METHODS: tuple[Method, ...] = ("auto", "constant", "average", "mean", "trend", "seasonal")


def fed(method: Method, values: Sequence[float | None], steps: int = 2, period: int = 0) -> Forecaster:
    """Return a forecaster that has forecast at every sample, as in operation."""
    forecaster = Forecaster(method, 0.9, period)
    for value in values:
        forecaster.add(value)
        if forecaster.samples:
            forecaster.forecast(steps)
    return forecaster


def noisy(shape: Callable[[int], float], count: int, noise: float, seed: int) -> list[float | None]:
    rng = random.Random(seed)
    return [max(0.0, shape(k) + rng.gauss(0, noise)) for k in range(count)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_a_constant(method: Method) -> None:
    forecast = fed(method, [7.0] * 40).forecast(3)
    assert forecast.path == pytest.approx((7.0, 7.0, 7.0), rel=1e-3)
    assert forecast.upper == pytest.approx(forecast.path, rel=0.01)


@pytest.mark.parametrize("method", ["trend", "auto"])
def test_a_ramp_is_followed(method: Method) -> None:
    forecast = fed(method, noisy(lambda k: 10 + 2.0 * k, 40, 0.5, seed=1)).forecast(2)
    assert forecast.path[1] == pytest.approx(10 + 2 * 41, abs=4.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_is_no_trend(seed: int) -> None:
    """A line through a jump is steep. Only the jump itself explains the samples better. All windows contain it here."""
    samples = [3.0 if value is None else value for value in noisy(lambda k: 2.0 if k < 20 else 6.0, 40, 0.4, seed)]
    for count in range(22, 27):
        with pytest.raises(CannotForecastError):
            trend(samples[:count], 15)


def test_chance_is_rarely_taken_for_a_trend() -> None:
    rng = random.Random(5)
    shown = 0
    for _ in range(400):
        try:
            trend([rng.gauss(10, 1) for _ in range(40)], 6)
            shown += 1
        except CannotForecastError:
            pass
    assert shown <= 40


def test_a_trend_goes_on_for_as_long_as_it_has_lasted() -> None:
    path = trend([float(k) for k in range(8)], 20)
    assert path[7] == pytest.approx(15.0)
    assert path[7:] == [path[7]] * 13


def test_the_slow_beginning_of_a_rise_adds_nothing_at_its_top() -> None:
    """All forecasts of the rise were too low by its later steepness. The last samples scatter by far less."""
    values = noisy(lambda k: 10 + k * k / 20, 40, 0.1, seed=1)
    forecast = fed("trend", values, steps=8).forecast(8)
    assert forecast.method == "trend"
    assert forecast.highest - max(forecast.path) < forecast.high - max(forecast.path)


def test_a_season_is_found_and_repeated() -> None:
    values = noisy(lambda k: 20 + 10 * math.sin(2 * math.pi * k / 24), 96, 0.5, seed=2)
    assert find_period(without_gaps(values)) == 24
    forecast = fed("seasonal", values).forecast(6)
    expected = [20 + 10 * math.sin(2 * math.pi * k / 24) for k in range(96, 102)]
    assert forecast.path == pytest.approx(expected, abs=2.5)


def test_a_given_season_is_taken() -> None:
    forecast = fed("seasonal", [10.0, 10, 10, 50] * 6, steps=4, period=4).forecast(4)
    assert forecast.method == "seasonal"
    assert forecast.note == ""


def test_a_season_is_the_mean_of_several_periods() -> None:
    """One day alone has the chance of that day; a level of four times the usual one is followed."""
    day, odd = [40.0, 20.0, *[10.0] * 10], [80.0, 20.0, *[10.0] * 10]
    usual, alone = (max(seasonal(samples, 12, 12)) for samples in (day * 4, [*day, *odd]))
    assert max(seasonal([*day * 3, *odd], 12, 12)) == pytest.approx(usual + (alone - usual) / 3)
    high = [*day * 3, *day[:-4], *[40.0] * 4]
    assert seasonal(high, 12, 12)[2:6] == pytest.approx([4 * rate for rate in seasonal(day * 4, 12, 12)[2:6]])


def test_noise_and_a_trend_have_no_season() -> None:
    assert find_period(without_gaps(noisy(lambda k: 10.0, 200, 2.0, seed=3))) == 0
    assert find_period([float(k) for k in range(100)]) == 0


def test_auto_believes_a_season_that_keeps_its_word() -> None:
    values = noisy(lambda k: 20 + 15 * math.sin(2 * math.pi * k / 12), 72, 0.5, seed=4)
    forecaster = fed("auto", values, steps=3)
    assert forecaster.skills()["seasonal"] > 0.5
    expected = [20 + 15 * math.sin(2 * math.pi * k / 12) for k in range(72, 75)]
    assert forecaster.forecast(3).path == pytest.approx(expected, abs=4)


def test_auto_leaves_a_pattern_that_did_worse_than_the_plain_forecasts() -> None:
    """Every rise ends as soon as it shows: what the trend promises for nine samples ahead never comes."""
    forecaster = fed("auto", [float(10 + k % 10) for k in range(120)], steps=9, period=200)
    assert forecaster.skills()["trend"] < 0
    assert forecaster.forecast(9).method in PLAIN


def test_a_method_is_judged_at_the_horizon_of_its_forecasts() -> None:
    """The highest of the next 15 is far above a load that bursts once in 20: only forecasts of 15 learn that."""
    values: list[float | None] = [30.0 if k % 20 == 0 else 5.0 for k in range(1, 200)]
    far, near = (fed("average", values, steps).forecast(steps).highest for steps in (15, 1))
    assert far > 25 > 10 > near


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_covers_its_quantile(seed: int) -> None:
    values = noisy(lambda k: 50 + 10 * math.sin(k / 15), 240, 4.0, seed)
    forecaster, below, cases = Forecaster("average", 0.9), 0, 0
    for number, value in enumerate(values):
        if number > 40:
            assert value is not None
            below += value <= forecaster.forecast(1).upper[0]
            cases += 1
        elif forecaster.samples:
            forecaster.forecast(1)
        forecaster.add(value)
    assert 0.82 <= below / cases <= 0.98


def test_zeros_before_the_first_request_are_left_out() -> None:
    forecaster = fed("average", [0.0, 0.0, 0.0, 8.0, 8.0])
    assert forecaster.samples == 2
    assert forecaster.forecast(1).path == (8.0,)


def test_a_value_that_is_not_a_number_is_a_gap() -> None:
    forecaster = fed("constant", [5.0, math.nan, -1.0, math.inf, None, 5.0])
    assert forecaster.samples == 2
    assert forecaster.forecast(1).path == (5.0,)


def test_a_gap_is_bridged_by_a_line_between_known_samples() -> None:
    assert without_gaps([1.0, None, None, 4.0, None]) == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_without_a_sample_there_is_no_forecast() -> None:
    with pytest.raises(CannotForecastError):
        Forecaster().forecast(1)


@pytest.mark.parametrize("method", ["trend", "seasonal"])
def test_a_method_that_cannot_forecast_falls_back_with_a_note(method: Method) -> None:
    forecast = fed(method, [5.0, 6.0]).forecast(1)
    assert forecast.method == "average"
    assert forecast.note.startswith(f"{method}: ")


@given(
    st.sampled_from(METHODS),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=30),
    st.integers(1, 5),
)
def test_a_forecast_is_finite_not_negative_and_bounded(method: Method, values: list[float], steps: int) -> None:
    forecaster = Forecaster(method, 0.9, period=4)
    for value in values:
        forecaster.add(value)
    if not forecaster.samples:
        return
    forecast = forecaster.forecast(steps)
    assert len(forecast.path) == len(forecast.upper) == steps
    for low, high in zip(forecast.path, forecast.upper, strict=True):
        assert 0 <= low <= 2 * max(values) + 1e-6
        assert low <= high < math.inf


def test_a_remembered_mean_ignores_unknown_values() -> None:
    mean = Remembered(60.0)
    for value in (None, 10.0, math.nan, -1.0, math.inf, 10.0):
        mean.add(value, 5, 5.0)
    mean.add(1000.0, 0, 5.0)
    assert mean.value == pytest.approx(10.0)


def test_requests_count_alike_and_less_as_they_grow_old() -> None:
    mean = Remembered(60.0)
    mean.add(10.0, 1, 1.0)
    mean.add(20.0, 3, 0.0)
    assert mean.value == pytest.approx(17.5)
    mean.add(40.0, 4, 60.0)
    assert mean.value == pytest.approx((4 * 17.5 / math.e + 4 * 40.0) / (4 / math.e + 4))


def test_the_number_of_pieces_does_not_matter() -> None:
    whole, pieces = Remembered(180.0), Remembered(180.0)
    for mean in (3000.0, 2000.0, 2500.0):
        whole.add(mean, 120, 60.0)
        for _ in range(12):
            pieces.add(mean, 10, 5.0)
    assert pieces.value == pytest.approx(whole.value)
