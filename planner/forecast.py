"""Forecast a series of equal intervals. Pure: samples go in, paths come out.

Every method forecasts in every interval, and each forecast is compared with the sample that came. `auto` takes the
method that was best lately: a rolling back-test without refits. The past errors are the interval around a forecast.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Method = Literal["auto", "constant", "average", "holt-winters", "arima", "kalman", "seasonal"]

HISTORY = 4096  # samples kept: two days of minutes
FIT_SAMPLES = 96  # a model is fitted to the latest of this number
AVERAGE_SAMPLES = 4
MIN_KALMAN = 5
MIN_FIT = 16  # samples below which nothing from statsmodels is fitted
REFIT_EVERY = 16  # samples between two searches for a model's parameters
SCORED = 40  # a method is judged by its latest errors, this number of them
MIN_SCORED = 6
SWITCH_GAIN = 0.9  # `auto` changes to a method whose error is less than this share of the present method's
GROWTH = 2.0  # no forecast exceeds this multiple of the largest recent sample
FIND_PERIOD_EVERY = 16
MIN_CORRELATION = 0.5

CHEAP: tuple[Method, ...] = ("constant", "average", "kalman", "seasonal")
FITTED: tuple[Method, ...] = ("holt-winters", "arima")

_Path = list[float]


class CannotForecastError(Exception):
    """A method has no forecast now; the message says why."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast. `path[k]` and `upper[k]` belong to the interval k + 1 from now.

    `note` says why `method` is not the one that was asked for.
    """

    path: tuple[float, ...]
    upper: tuple[float, ...]
    method: Method
    note: str = ""

    @property
    def highest(self) -> float:
        return max(self.upper)


class Forecaster:
    """Forecasts one series with all methods, and judges them."""

    def __init__(self, method: Method = "auto", quantile: float = 0.9, period: int = 0) -> None:
        """Forecast so that a share `quantile` of the samples is below `upper`. `period` is in samples; 0: find it."""
        self._method: Method = method
        self._quantile = quantile
        self._given_period = period
        self._found_period = 0
        self._samples: deque[float | None] = deque(maxlen=HISTORY)
        self._count = 0
        self._highest = 0.0
        self._said: deque[tuple[int, dict[Method, _Path]]] = deque()
        self._errors: dict[Method, deque[float]] = {}
        self._chosen: Method = "kalman"
        self._holt = _HoltWinters()
        self._arima = _Arima()

    @property
    def samples(self) -> int:
        """Return how many samples are known, without the zeros before the first request."""
        return sum(1 for sample in self._samples if sample is not None)

    def add(self, value: float | None) -> None:
        """Add one interval. None, or a value that is not a number >= 0, means that it is not known."""
        if value is not None and not (math.isfinite(value) and value >= 0):
            value = None
        if not self._samples and not value:
            return
        self._samples.append(value)
        self._count += 1
        self._highest = max(self._highest * 0.999, value or 0.0)
        if value is not None:
            self._judge(value)

    def forecast(self, steps: int) -> Forecast:
        """Forecast the next `steps` intervals. Raise CannotForecastError if there is no sample."""
        filled = without_gaps(self._samples)
        if not filled:
            raise CannotForecastError("no sample yet")
        said, failed = self._say(filled, steps)
        self._said.append((self._count, said))
        while self._said and self._said[0][0] + len(next(iter(self._said[0][1].values()))) < self._count:
            self._said.popleft()
        method, note = self._choose(said, failed)
        path = said[method]
        margin = self._margin(method, filled)
        upper = tuple(value + margin * self._scale(value) for value in path)
        return Forecast(tuple(path), upper, method, note)

    def errors(self) -> dict[str, float]:
        """Return the recent mean absolute error of each method, in units of the square root of its forecast."""
        return {name: statistics.fmean(map(abs, errors)) for name, errors in self._errors.items() if errors}

    # -------------------------------------------------------------------------------------------------

    def _say(self, filled: Sequence[float], steps: int) -> tuple[dict[Method, _Path], dict[Method, str]]:
        names = CHEAP + FITTED if self._method == "auto" else (self._method, "average")
        highest = GROWTH * max(filled[-FIT_SAMPLES:])
        said: dict[Method, _Path] = {}
        failed: dict[Method, str] = {}
        for name in names:
            try:
                path = self._path(name, filled, steps)
            except CannotForecastError as error:
                failed[name] = str(error)
                continue
            if not all(map(math.isfinite, path)):
                failed[name] = "its forecast is not finite"
                continue
            said[name] = [min(max(value, 0.0), highest) for value in path]
        return said, failed

    def _path(self, name: Method, filled: Sequence[float], steps: int) -> _Path:
        match name:
            case "kalman":
                return kalman(filled[-FIT_SAMPLES:], steps)
            case "seasonal":
                return seasonal(filled, steps, self._period(filled))
            case "holt-winters":
                return self._holt.path(filled[-FIT_SAMPLES:], steps)
            case "arima":
                return self._arima.path(filled[-FIT_SAMPLES:], steps)
            case "constant":
                return [filled[-1]] * steps
        return [statistics.fmean(filled[-AVERAGE_SAMPLES:])] * steps

    def _period(self, filled: Sequence[float]) -> int:
        if self._given_period:
            return self._given_period
        if self._count % FIND_PERIOD_EVERY == 0:
            self._found_period = find_period(filled)
        return self._found_period

    def _judge(self, value: float) -> None:
        for made_at, said in self._said:
            ahead = self._count - made_at
            for method, path in said.items():
                if 1 <= ahead <= len(path):
                    error = (value - path[ahead - 1]) / self._scale(path[ahead - 1])
                    self._errors.setdefault(method, deque(maxlen=SCORED)).append(error)

    def _scale(self, value: float) -> float:
        """Return the unit of errors. Counts vary with the square root of their mean: night and noon get comparable."""
        return math.sqrt(max(value, 0.02 * self._highest, 1e-9))

    def _choose(self, said: dict[Method, _Path], failed: dict[Method, str]) -> tuple[Method, str]:
        if self._method != "auto":
            if self._method in said:
                return self._method, ""
            return "average", f"{self._method}: {failed.get(self._method, 'no forecast')}; average of the last instead"
        if self._chosen not in said:
            self._chosen = "average"
        scores = {m: error for m, error in self._scores().items() if m in said}
        if scores:
            best = min(scores, key=lambda method: scores[method])
            if self._chosen not in scores or scores[best] < SWITCH_GAIN * scores[self._chosen]:
                self._chosen = best
        elif "kalman" in said:
            self._chosen = "kalman"
        return self._chosen, ""

    def _scores(self) -> dict[Method, float]:
        return {
            method: statistics.fmean(map(abs, errors))
            for method, errors in self._errors.items()
            if len(errors) >= MIN_SCORED
        }

    def _margin(self, method: Method, filled: Sequence[float]) -> float:
        """Return how far samples exceeded the method's forecasts, at the quantile, in units of `_scale`; at least 0."""
        errors = self._errors.get(method, ())
        normal = statistics.NormalDist().inv_cdf(min(max(self._quantile, 0.001), 0.999))
        if len(errors) < MIN_SCORED:
            recent = filled[-AVERAGE_SAMPLES * 2 :]
            spread = statistics.pstdev(recent) if len(recent) > 2 else 0.15 * recent[-1]
            return max(0.0, normal * spread / self._scale(recent[-1]))
        ordered = sorted(errors)
        return max(0.0, ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))])


class Remembered:
    """A mean over requests in which requests of `memory_s` ago count 1/e. The number of pieces does not matter."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._requests = 0.0
        self._total = 0.0

    def add(self, value: float | None, requests: float, seconds: float) -> None:
        """Add the mean `value` of `requests` that came within `seconds`."""
        if value is None or not math.isfinite(value) or value < 0 or requests <= 0:
            return
        kept = math.exp(-max(0.0, seconds) / self._memory_s)
        self._requests = self._requests * kept + requests
        self._total = self._total * kept + requests * value

    @property
    def value(self) -> float | None:
        return self._total / self._requests if self._requests else None


def without_gaps(samples: Sequence[float | None] | deque[float | None]) -> list[float]:
    """Fill gaps with the line between their neighbours. A gap at the end is left out."""
    filled: list[float] = []
    gap = 0
    for sample in samples:
        if sample is None:
            gap += 1
            continue
        if gap and filled:
            before = filled[-1]
            filled += [before + (sample - before) * (k + 1) / (gap + 1) for k in range(gap)]
        gap = 0
        filled.append(sample)
    return filled


_NOISES = ((0.01, 0.0), (0.1, 0.0), (1.0, 0.0), (0.01, 0.001), (0.1, 0.01), (1.0, 0.1), (1.0, 1.0))


def kalman(samples: Sequence[float], steps: int) -> _Path:
    """Forecast with a level and a slope that drift. The likelihood chooses among a few rates of drift."""
    if len(samples) < MIN_KALMAN:
        raise CannotForecastError(f"{len(samples)} samples, it takes {MIN_KALMAN}")
    level, slope, _ = max((_filter(samples, *noise) for noise in _NOISES), key=lambda result: result[2])
    return [level + slope * (step + 1) for step in range(steps)]


def _filter(samples: Sequence[float], level_noise: float, slope_noise: float) -> tuple[float, float, float]:
    """Return level, slope and log-likelihood. Noises are variances in units of the variance of an observation."""
    level, slope = samples[0], 0.0
    p00, p01, p11 = 1.0, 0.0, 0.1 if slope_noise else 0.0
    squares = logs = 0.0
    for sample in samples[1:]:
        level += slope
        p00, p01, p11 = p00 + 2 * p01 + p11 + level_noise, p01 + p11, p11 + slope_noise
        variance = p00 + 1.0
        surprise = sample - level
        gain_level, gain_slope = p00 / variance, p01 / variance
        level += gain_level * surprise
        slope += gain_slope * surprise
        p00, p01, p11 = p00 * (1 - gain_level), p01 * (1 - gain_level), p11 - gain_slope * p01
        squares += surprise * surprise / variance
        logs += math.log(variance)
    count = len(samples) - 1
    return level, slope, -count * math.log(max(squares / count, 1e-12)) - logs


def seasonal(samples: Sequence[float], steps: int, period: int) -> _Path:
    """Repeat the samples of one period ago, scaled to the present level."""
    if period < 2:
        raise CannotForecastError("no period is given, none was found")
    if len(samples) < period + AVERAGE_SAMPLES:
        raise CannotForecastError(f"{len(samples)} samples, the period has {period}")
    now = statistics.fmean(samples[-AVERAGE_SAMPLES:])
    then = statistics.fmean(samples[-period - AVERAGE_SAMPLES : -period])
    ratio = min(max(now / then, 0.5), 2.0) if then > 0 else 1.0
    return [_smooth(samples, len(samples) + step - period * (1 + step // period)) * ratio for step in range(steps)]


def _smooth(samples: Sequence[float], at: int) -> float:
    return statistics.fmean(samples[max(0, at - 1) : min(len(samples), at + 2)])


def find_period(samples: Sequence[float]) -> int:
    """Return the lag with the largest autocorrelation; 0 if that is small, or there are not two periods yet."""
    if len(samples) < 4 * AVERAGE_SAMPLES:
        return 0
    values = np.asarray(samples) - np.mean(samples)
    size = 1 << (2 * len(values) - 1).bit_length()
    spectrum = np.fft.rfft(values, size)
    lags = np.fft.irfft(spectrum * np.conj(spectrum), size)[: len(values)]
    if lags[0] <= 0:
        return 0
    longest = len(values) // 2
    overlap = len(values) - np.arange(longest + 1)
    alike = lags[: longest + 1] / lags[0] * len(values) / overlap
    below = np.flatnonzero(alike < 0)  # the first lobe is correlation with itself, not a period
    if not len(below):
        return 0
    first = int(below[0])
    peak = first + int(np.argmax(alike[first:]))
    return peak if alike[peak] >= MIN_CORRELATION and peak < longest else 0


class _HoltWinters:
    """Exponential smoothing of a level and a damped slope. statsmodels finds its weights from time to time."""

    def __init__(self) -> None:
        self._weights: tuple[float, float, float] | None = None  # of level and slope, and the damping
        self._age = 0

    def path(self, samples: Sequence[float], steps: int) -> _Path:
        if len(samples) < MIN_FIT:
            raise CannotForecastError(f"{len(samples)} samples, it takes {MIN_FIT}")
        if max(samples) == min(samples):
            return [samples[-1]] * steps
        if self._weights is None or self._age >= REFIT_EVERY:
            self._weights, self._age = _holt_weights(samples), 0
        self._age += 1
        return damped_holt(samples, steps, *self._weights)


def _holt_weights(samples: Sequence[float]) -> tuple[float, float, float]:
    try:
        from statsmodels.tsa.holtwinters import Holt
    except ImportError as error:
        raise CannotForecastError("statsmodels is not installed") from error

    def fit() -> list[float]:
        model = Holt(np.asarray(samples), damped_trend=True, initialization_method="heuristic")
        found = model.fit(minimize_kwargs={"options": {"maxiter": 50}}).params
        return [found[name] for name in ("smoothing_level", "smoothing_trend", "damping_trend")]

    level, slope, damping = _quietly(fit)
    return level, slope, damping


def damped_holt(
    samples: Sequence[float], steps: int, level_weight: float, slope_weight: float, damping: float
) -> _Path:
    early = samples[: 2 * AVERAGE_SAMPLES]
    half = len(early) // 2  # two samples alone are a poor start of a slope that is forgotten slowly
    slope = (statistics.fmean(early[half:]) - statistics.fmean(early[:half])) / (len(early) - half)
    level = statistics.fmean(early) - slope * (len(early) - 1) / 2
    for sample in samples[1:]:
        before = level
        level = level_weight * sample + (1 - level_weight) * (level + damping * slope)
        slope = slope_weight * (level - before) + (1 - slope_weight) * damping * slope
    path: _Path = []
    reach = 0.0
    for step in range(1, steps + 1):
        reach += damping**step
        path.append(level + reach * slope)
    return path


class _Arima:
    """ARIMA(1, 1, 1). Its parameters are searched from time to time."""

    def __init__(self) -> None:
        self._parameters: Sequence[float] | None = None
        self._age = 0

    def path(self, samples: Sequence[float], steps: int) -> _Path:
        if len(samples) < MIN_FIT:
            raise CannotForecastError(f"{len(samples)} samples, it takes {MIN_FIT}")
        if max(samples) == min(samples):
            return [samples[-1]] * steps
        try:
            from statsmodels.tsa.arima.model import ARIMA
        except ImportError as error:
            raise CannotForecastError("statsmodels is not installed") from error

        def forecast() -> list[float]:
            model = ARIMA(np.asarray(samples), order=(1, 1, 1))
            if self._parameters is None or self._age >= REFIT_EVERY:
                fitted = model.fit(method_kwargs={"maxiter": 50})
                self._parameters, self._age = fitted.params, 0
            else:
                self._age += 1
                fitted = model.filter(self._parameters)
            return list(fitted.forecast(steps))

        return _quietly(forecast)


def _quietly(fit: Callable[[], Iterable[float]]) -> _Path:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit that did not converge is judged by the back-test
            return [float(value) for value in fit()]
    except (ValueError, ArithmeticError, IndexError, np.linalg.LinAlgError) as error:
        raise CannotForecastError(f"cannot be fitted: {error}") from error
