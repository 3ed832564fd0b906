"""Forecasts of a series."""

import math
import random
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.forecast import (
    CannotForecastError,
    Forecaster,
    Method,
    Remembered,
    damped_holt,
    find_period,
    kalman,
    without_gaps,
)

METHODS: tuple[Method, ...] = ("auto", "constant", "average", "kalman", "seasonal", "holt-winters", "arima")


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


@pytest.mark.parametrize("method", ["kalman", "holt-winters", "arima", "auto"])
def test_methods_with_a_slope_follow_a_ramp(method: Method) -> None:
    forecast = fed(method, noisy(lambda k: 10 + 2.0 * k, 40, 0.5, seed=1)).forecast(2)
    assert forecast.path[1] == pytest.approx(10 + 2 * 41, abs=4.0)


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


def test_noise_and_a_trend_have_no_season() -> None:
    assert find_period(without_gaps(noisy(lambda k: 10.0, 200, 2.0, seed=3))) == 0
    assert find_period([float(k) for k in range(100)]) == 0


def test_auto_takes_the_recently_best_method() -> None:
    values = noisy(lambda k: 20 + 15 * math.sin(2 * math.pi * k / 12), 72, 0.5, seed=4)
    forecaster = fed("auto", values, steps=3)
    forecast, errors = forecaster.forecast(3), forecaster.errors()
    assert errors["seasonal"] < errors["constant"]
    assert errors[forecast.method] <= 1.2 * min(errors.values())
    expected = [20 + 15 * math.sin(2 * math.pi * k / 12) for k in range(72, 75)]
    assert forecast.path == pytest.approx(expected, abs=4)


def test_auto_leaves_a_method_that_became_bad() -> None:
    ramp = [10.0 + 3 * k for k in range(40)]
    forecaster = fed("auto", ramp)
    assert forecaster.forecast(2).method not in ("constant", "average")
    rng = random.Random(5)
    for _ in range(45):
        forecaster.add(130 + rng.gauss(0, 10))
        forecaster.forecast(2)
    assert forecaster.forecast(2).path[1] == pytest.approx(130, abs=12)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_covers_its_quantile(seed: int) -> None:
    values = noisy(lambda k: 50 + 10 * math.sin(k / 15), 240, 4.0, seed)
    forecaster, below, cases = Forecaster("kalman", 0.9), 0, 0
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


@pytest.mark.parametrize("method", ["holt-winters", "arima", "seasonal", "kalman"])
def test_a_method_that_cannot_forecast_falls_back_with_a_note(method: Method) -> None:
    forecast = fed(method, [5.0, 6.0]).forecast(1)
    assert forecast.method == "average"
    assert forecast.note.startswith(f"{method}: ")


@pytest.mark.parametrize("method", ["holt-winters", "arima"])
def test_missing_statsmodels_is_reported(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("statsmodels.tsa.holtwinters", "statsmodels.tsa.arima.model"):
        monkeypatch.setitem(sys.modules, module, None)
    forecast = fed(method, noisy(lambda k: 10.0 + k, 30, 1.0, seed=6)).forecast(1)
    assert forecast.method == "average"
    assert "statsmodels is not installed" in forecast.note
    assert fed("auto", noisy(lambda k: 10.0 + k, 30, 1.0, seed=6)).forecast(1).note == ""


@given(
    st.sampled_from(["constant", "average", "kalman", "seasonal"]),
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


def test_the_filter_settles_on_the_slope() -> None:
    path = kalman([3.0 * k for k in range(30)], 2)
    assert path == pytest.approx([90.0, 93.0], rel=0.02)


def test_a_damped_slope_flattens() -> None:
    path = damped_holt([0.0, 1.0, 2.0, 3.0], 3, 1.0, 1.0, 0.5)
    assert path[1] - path[0] == pytest.approx(0.25)
    assert path[2] - path[1] == pytest.approx(0.125)


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
