"""What comes next of a series of equal intervals. Pure: samples go in, paths come out.

Every method forecasts in every interval; what it said is held against what came. `auto` takes the one that was best of
late (a rolling back-test that refits nothing), and the interval around a forecast is what its errors were.
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
FIT_SAMPLES = 96  # that a model is fitted to
AVERAGE_SAMPLES = 4
MIN_KALMAN = 5
MIN_FIT = 16  # samples below which nothing from statsmodels is fitted
REFIT_EVERY = 16  # samples between two searches for a model's parameters
SCORED = 40  # errors that a method is judged by, the latest
MIN_SCORED = 6
SWITCH_GAIN = 0.9  # `auto` changes its method for one whose error is so many times smaller
GROWTH = 2.0  # no forecast goes beyond so many times the most that was seen of late
FIND_PERIOD_EVERY = 16
MIN_CORRELATION = 0.5

CHEAP: tuple[Method, ...] = ("constant", "average", "kalman", "seasonal")
FITTED: tuple[Method, ...] = ("holt-winters", "arima")

_Path = list[float]


class CannotForecastError(Exception):
    """Says why a method has no forecast now."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """`path[k]`, `upper[k]`: of the interval k + 1 from now. `note`: why it is not the method that was asked for."""

    path: tuple[float, ...]
    upper: tuple[float, ...]
    method: Method
    note: str = ""

    @property
    def highest(self) -> float:
        return max(self.upper)


class Forecaster:
    """Of one series."""

    def __init__(self, method: Method = "auto", quantile: float = 0.9, period: int = 0) -> None:
        """`quantile`: share of the cases that are to come out below `upper`; `period` [samples], 0: find it."""
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
        """How many are known, zeros before the first request left out."""
        return sum(1 for sample in self._samples if sample is not None)

    def add(self, value: float | None) -> None:
        """One interval; None, or what is no number >= 0: not known."""
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
        """The next `steps` intervals. Raises CannotForecastError without a sample."""
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
        """Mean absolute error of each method, of late; in units of the square root of what it had forecast."""
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
        """Counts vary with the square root of what is expected: errors at night and at noon become comparable."""
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
        """How far above its forecasts things came out, at the quantile, in units of `_scale`; 0 at least."""
        errors = self._errors.get(method, ())
        normal = statistics.NormalDist().inv_cdf(min(max(self._quantile, 0.001), 0.999))
        if len(errors) < MIN_SCORED:
            recent = filled[-AVERAGE_SAMPLES * 2 :]
            spread = statistics.pstdev(recent) if len(recent) > 2 else 0.15 * recent[-1]
            return max(0.0, normal * spread / self._scale(recent[-1]))
        ordered = sorted(errors)
        return max(0.0, ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))])


class Remembered:
    """A mean over requests: those of `memory_s` ago count 1/e. Enough for lengths and shares. None: nothing is known.

    It does not matter in how many pieces they are told.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._requests = 0.0
        self._total = 0.0

    def add(self, value: float | None, requests: float, seconds: float) -> None:
        """The mean of so many requests, of a piece of so many seconds."""
        if value is None or not math.isfinite(value) or value < 0 or requests <= 0:
            return
        kept = math.exp(-max(0.0, seconds) / self._memory_s)
        self._requests = self._requests * kept + requests
        self._total = self._total * kept + requests * value

    @property
    def value(self) -> float | None:
        return self._total / self._requests if self._requests else None


def without_gaps(samples: Sequence[float | None] | deque[float | None]) -> list[float]:
    """What is not known becomes the line between its neighbours; nothing is made up at the end."""
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
    """A level and a slope that drift. How fast is chosen by the likelihood, of a few rates; see `_filter`."""
    if len(samples) < MIN_KALMAN:
        raise CannotForecastError(f"{len(samples)} samples, it takes {MIN_KALMAN}")
    level, slope, _ = max((_filter(samples, *noise) for noise in _NOISES), key=lambda result: result[2])
    return [level + slope * (step + 1) for step in range(steps)]


def _filter(samples: Sequence[float], level_noise: float, slope_noise: float) -> tuple[float, float, float]:
    """Level, slope and log-likelihood. Noises are variances, those of an observation are 1 (its scale is estimated)."""
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
    """As one period ago, times how much more or less there is of late than there was then."""
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
    """The lag at which the series is most like itself; 0 if it is not, or if there are not two periods yet."""
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
    below = np.flatnonzero(alike < 0)  # the first lobe is likeness with itself, no period
    if not len(below):
        return 0
    first = int(below[0])
    peak = first + int(np.argmax(alike[first:]))
    return peak if alike[peak] >= MIN_CORRELATION and peak < longest else 0


class _HoltWinters:
    """Exponential smoothing of a level and a damped slope; statsmodels finds its weights now and then."""

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
    half = len(early) // 2  # two samples alone would say little of a slope that few weights ever forget
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
    """ARIMA(1, 1, 1); its parameters are searched for now and then."""

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
            warnings.simplefilter("ignore")  # of fits that did not converge: the back-test judges them
            return [float(value) for value in fit()]
    except (ValueError, ArithmeticError, IndexError, np.linalg.LinAlgError) as error:
        raise CannotForecastError(f"cannot be fitted: {error}") from error
