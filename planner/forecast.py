"""Forecast the highest of the next samples of a series of equal intervals. Pure: samples go in, paths come out.

Plain forecasts say that the past goes on: its last sample, or a mean. A trend or a season is believed while it shows,
and until it has done worse than the plain forecasts of the same intervals. A forecast is judged by the highest of all
samples that it is for: a method earns nothing at one interval ahead for its forecasts of fifteen. Past errors are the
distribution around the next forecast, and losses are those of its quantile (pinball loss).
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Method = Literal["auto", "constant", "average", "mean", "trend", "seasonal"]

HISTORY = 4096  # samples kept: two days of minutes
LATEST = 96  # samples of the mean, and of the highest of which no forecast is GROWTH times as high
AVERAGE_SAMPLES = 4
MIN_TREND = 6  # samples
TREND_WINDOWS = (8, 12, 16)  # samples
RISES, FALLS = 2.0, 3.0  # standard errors of its slope that a line is steep: a fall takes workers away
SCORED = 40  # a method is judged by its latest forecasts, this number of them
MIN_SCORED = 6
GROWTH = 2.0  # no forecast exceeds this multiple of the largest recent sample
INTERVAL = (0.1, 0.9)  # quantiles of a forecast's interval
FIND_PERIOD_EVERY = 16
SEASONS = 4  # periods whose mean a season is: one alone has the chance of its day
RESCALED = 4.0  # a day may be so many times as high or as low as another
MIN_CORRELATION = 0.5

PLAIN: tuple[Method, ...] = ("constant", "average", "mean")
PATTERNS: tuple[Method, ...] = ("trend", "seasonal")

_Path = list[float]


class CannotForecastError(Exception):
    """A method has no forecast now; the message says why."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast. `path[k]` and `upper[k]` belong to the interval k + 1 from now.

    The highest of `upper` is the quantile of the highest sample of all these intervals, `low` and `high` are the
    quantiles INTERVAL of it. `note` says why `method` is not the one that was asked for.
    """

    path: tuple[float, ...]
    upper: tuple[float, ...]
    method: Method
    note: str = ""
    low: float = 0.0
    high: float = 0.0

    @property
    def highest(self) -> float:
        return max(self.upper)

    @property
    def falls(self) -> bool:
        """Return whether a pattern says that the load goes down."""
        return not self.is_plain and self.path[-1] < self.path[0]

    @property
    def is_plain(self) -> bool:
        """Return whether the forecast only says that the past goes on."""
        return self.method in PLAIN


@dataclass(frozen=True, slots=True)
class _Said:
    """The forecasts that were made after `made_at` samples: the highest of the next `steps`, and its quantile."""

    made_at: int
    steps: int
    highest: dict[Method, float]
    upper: dict[Method, float]
    plain: Method


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
        self._said: deque[_Said] = deque()
        self._errors: dict[Method, deque[float]] = {}
        self._losses: dict[Method, deque[tuple[float, float]]] = {}  # of a method, and of the plain one chosen then

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
        self._judge()

    def forecast(self, steps: int) -> Forecast:
        """Forecast the next `steps` intervals. Raise CannotForecastError if there is no sample."""
        filled = without_gaps(self._samples)
        if not filled:
            raise CannotForecastError("no sample yet")
        paths, failed = self._paths(filled, steps)
        margins = {method: self._margin(method, filled) for method in paths}
        highest = {method: max(path) for method, path in paths.items()}
        upper = {method: high + margins[method] * self._scale(high) for method, high in highest.items()}
        if self._said and self._said[-1].steps != steps:
            self._said.clear()
        plain = self._best_plain()
        self._said.append(_Said(self._count, steps, highest, upper, plain))
        method, note = self._choose(plain, paths, failed)
        margin = margins[method]
        if method == "trend":  # a line rises too slowly when a rise begins: at its top, such errors say nothing
            margin = min(margin, max(0.0, self._scatter(filled, self._quantile)))
        uppers = tuple(value + margin * self._scale(value) for value in paths[method])
        low, high = (
            max(0.0, highest[method] + self._error(method, filled, share) * self._scale(highest[method]))
            for share in INTERVAL
        )
        return Forecast(tuple(paths[method]), uppers, method, note, low, high)

    def skills(self) -> dict[Method, float]:
        """Return the share of the plain forecasts' loss that each method has avoided in the same intervals."""
        skills: dict[Method, float] = {}
        for method, losses in self._losses.items():
            own, plain = (statistics.fmean(loss[k] for loss in losses) for k in (0, 1))
            skills[method] = 1 - own / plain if plain > 0 else 0.0
        return skills

    # -------------------------------------------------------------------------------------------------

    def _paths(self, filled: Sequence[float], steps: int) -> tuple[dict[Method, _Path], dict[Method, str]]:
        highest = GROWTH * max(filled[-LATEST:])
        paths: dict[Method, _Path] = {}
        failed: dict[Method, str] = {}
        for name in PLAIN + PATTERNS:
            try:
                path = self._path(name, filled, steps)
            except CannotForecastError as error:
                failed[name] = str(error)
                continue
            paths[name] = [min(max(value, 0.0), highest) for value in path]
        return paths, failed

    def _path(self, name: Method, filled: Sequence[float], steps: int) -> _Path:
        match name:
            case "trend":
                return trend(filled, steps)
            case "seasonal":
                return seasonal(filled, steps, self._period(filled))
            case "constant":
                return [filled[-1]] * steps
            case "mean":
                return [statistics.fmean(filled[-LATEST:])] * steps
        return [statistics.fmean(filled[-AVERAGE_SAMPLES:])] * steps

    def _period(self, filled: Sequence[float]) -> int:
        if self._given_period:
            return self._given_period
        if self._count % FIND_PERIOD_EVERY == 0:
            self._found_period = find_period(filled)
        return self._found_period

    def _judge(self) -> None:
        """Compare the forecasts whose samples are all there with the highest of these samples."""
        while self._said and self._said[0].made_at + self._said[0].steps <= self._count:
            said = self._said.popleft()
            came = [sample for sample in list(self._samples)[-said.steps :] if sample is not None]
            if not came:
                continue
            actual = max(came)
            losses = {method: self._loss(actual, upper) for method, upper in said.upper.items()}
            for method, high in said.highest.items():
                self._errors.setdefault(method, deque(maxlen=SCORED)).append((actual - high) / self._scale(high))
                scored = self._losses.setdefault(method, deque(maxlen=SCORED))
                scored.append((losses[method], losses[said.plain]))

    def _loss(self, actual: float, upper: float) -> float:
        short = (actual - upper) / self._scale(actual)
        return max(self._quantile * short, (self._quantile - 1) * short)

    def _scale(self, value: float) -> float:
        """Return the unit of errors. Counts vary with the square root of their mean: night and noon get comparable."""
        return math.sqrt(max(value, 0.02 * self._highest, 1e-9))

    def _best_plain(self) -> Method:
        """Return the plain method that did best. All of them are judged by the same intervals."""
        losses = {
            method: statistics.fmean(own for own, _ in self._losses[method])
            for method in PLAIN
            if len(self._losses.get(method, ())) >= MIN_SCORED
        }
        return min(losses, key=lambda method: losses[method]) if losses else "average"

    def _choose(self, plain: Method, paths: dict[Method, _Path], failed: dict[Method, str]) -> tuple[Method, str]:
        if self._method != "auto":
            if self._method in paths:
                return self._method, ""
            return "average", f"{self._method}: {failed[self._method]}; average of the last instead"
        skills = self.skills()
        believed = {
            method: skill
            for method in PATTERNS
            if method in paths and ((skill := skills.get(method, 0.0)) > 0 or not self._is_scored(method))
        }
        return (max(believed, key=lambda method: believed[method]) if believed else plain), ""

    def _is_scored(self, method: Method) -> bool:
        return len(self._losses.get(method, ())) >= MIN_SCORED

    def _margin(self, method: Method, filled: Sequence[float]) -> float:
        """Return how far samples exceeded the method's forecasts, at the quantile, in units of `_scale`; at least 0."""
        return max(0.0, self._error(method, filled, self._quantile))

    def _error(self, method: Method, filled: Sequence[float], quantile: float) -> float:
        """Return the quantile of the samples less the method's forecasts, in units of `_scale`."""
        errors = self._errors.get(method, ())
        if len(errors) < MIN_SCORED:
            return self._scatter(filled, quantile)
        ordered = sorted(errors)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def _scatter(self, filled: Sequence[float], quantile: float) -> float:
        """Return the quantile of the normal distribution that is as wide as the latest samples, around 0."""
        normal = statistics.NormalDist().inv_cdf(min(max(quantile, 0.001), 0.999))
        recent = filled[-AVERAGE_SAMPLES * 2 :]
        spread = statistics.pstdev(recent) if len(recent) > 2 else 0.15 * recent[-1]
        return normal * spread / self._scale(recent[-1])


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


def trend(samples: Sequence[float], steps: int) -> _Path:
    """Continue the line through the latest samples, for at most as long as it has lasted.

    There is a trend if the line is steep beyond chance, and explains more of the samples' variance than any one jump
    does. Of a trend that has lasted a, half go on for another a. The longest window that shows a trend counts.
    """
    for count in sorted({min(len(samples), window) for window in (*TREND_WINDOWS, steps)}, reverse=True):
        if count < MIN_TREND:
            break
        values = np.asarray(samples[-count:])
        level, slope, explained = _line(values)
        least = RISES if slope > 0 else FALLS
        is_steep = explained * (count - 2) >= least * least * (1 - explained)
        if is_steep and explained > _jump(values):
            return [level + slope * min(step + 1, count) for step in range(steps)]
    raise CannotForecastError("no line through the latest samples is steep beyond chance and better than a jump")


def _line(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the last value of the line through `values`, its slope, and the share of the variance it explains."""
    at = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(at @ values / (at @ at))
    variance = float(np.var(values))
    explained = slope * slope * float(at @ at) / len(values) / variance if variance > 0 else 0.0
    return float(values.mean() + slope * at[-1]), slope, explained


def _jump(values: NDArray[np.float64]) -> float:
    """Return the share of the variance that the best jump from one level to another explains."""
    count, variance = len(values), float(np.var(values))
    if variance <= 0:
        return 1.0
    before = np.arange(1, count)
    sums = np.cumsum(values - values.mean())[:-1]
    return float(np.max(sums * sums / (before * (count - before)))) / variance


def seasonal(samples: Sequence[float], steps: int, period: int) -> _Path:
    """Repeat the mean of the last periods, at most SEASONS of them, each scaled to the present level."""
    if period < 2:
        raise CannotForecastError("no period is given, none was found")
    if len(samples) < period + AVERAGE_SAMPLES:
        raise CannotForecastError(f"{len(samples)} samples, the period has {period}")
    past = min(SEASONS, (len(samples) - AVERAGE_SAMPLES) // period)
    paths = [_repeated(samples, steps, period, ago) for ago in range(1, past + 1)]
    return [statistics.fmean(values) for values in zip(*paths, strict=True)]


def _repeated(samples: Sequence[float], steps: int, period: int, ago: int) -> _Path:
    """Return what followed `ago` periods ago, scaled to the present level."""
    first = len(samples) - ago * period
    now, then = statistics.fmean(samples[-AVERAGE_SAMPLES:]), statistics.fmean(samples[first - AVERAGE_SAMPLES : first])
    ratio = min(max(now / then, 1 / RESCALED), RESCALED) if then > 0 else 1.0
    return [_smooth(samples, first + step % (ago * period)) * ratio for step in range(steps)]


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
