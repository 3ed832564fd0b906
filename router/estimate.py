"""Estimate when a request gets its first and its last token, from what earlier requests took. Pure.

Nothing is assumed about the workers: every number is measured, and old measurements fade with each new one. Without
measurements there is no estimate.
"""

import math
from collections import deque

from msgspec import Struct

MEMORY = 0.97  # the weight of a measurement falls to this share with each later one
LEAST = 8  # measurements without which there is no estimate
RATIOS = 128  # of the last answers, by which the error is known
LEAST_VARIANCE = 1e-9
ARRIVALS_S = 5.0
LONG_TOKENS = 16  # of an answer whose gaps tell how fast a worker can be
CAUTION = 0.8  # answers keep the SLO if they take no more than this share of it in the mean
LEAST_GAPS = 6.0  # weight of the measured gaps by which the rate of a queue is known


class ServiceEstimate(Struct, frozen=True):
    """Times from the placement on."""

    first_s: float
    total_s: float


class FadingMean:
    __slots__ = ("_sum", "weight")

    def __init__(self) -> None:
        self._sum = self.weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self.weight if self.weight else 0.0

    def add(self, value: float) -> None:
        self._sum = MEMORY * self._sum + value
        self.weight = MEMORY * self.weight + 1


class FadingLine:
    """A line through measurements, by least squares. It never falls: more work does not take less time."""

    __slots__ = ("_w", "_x", "_xx", "_xy", "_y", "count")

    def __init__(self) -> None:
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self.count = 0

    def add(self, x: float, y: float) -> None:
        self._w = MEMORY * self._w + 1
        self._x = MEMORY * self._x + x
        self._y = MEMORY * self._y + y
        self._xx = MEMORY * self._xx + x * x
        self._xy = MEMORY * self._xy + x * y
        self.count += 1

    def at(self, x: float) -> float:
        """Return the value of the line at x; not below 0, and 0 without measurements."""
        if not self._w:
            return 0.0
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        if variance <= LEAST_VARIANCE * max(1.0, mean_x * mean_x):
            return mean_y
        slope = max(0.0, (self._xy / self._w - mean_x * mean_y) / variance)
        return max(0.0, mean_y + slope * (x - mean_x))


class AnswerLengths:
    """Knows how long answers are against the most that was asked for, apart for each power of two of that."""

    __slots__ = ("_all", "_by_size")

    def __init__(self) -> None:
        self._all = FadingMean()
        self._by_size: dict[int, FadingMean] = {}  # at most as many as a length has bits

    def add(self, osl_tokens: int, max_tokens: int) -> None:
        share = min(1.0, osl_tokens / max_tokens)
        self._all.add(share)
        self._by_size.setdefault(max_tokens.bit_length(), FadingMean()).add(share)

    def expected(self, max_tokens: int) -> float:
        known = self._by_size.get(max_tokens.bit_length(), self._all)
        return max(1.0, known.value * max_tokens)


class Ratios:
    """Knows how much longer answers took than was estimated, as a share of the estimate."""

    __slots__ = ("_last", "_sorted")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=RATIOS)
        self._sorted: list[float] | None = None

    def add(self, ratio: float) -> None:
        self._last.append(ratio)
        self._sorted = None

    @property
    def is_known(self) -> bool:
        return len(self._last) >= LEAST

    def quantile(self, share: float) -> float:
        """Return the ratio that this share of the answers did not exceed; 1 before there are LEAST of them."""
        if not self.is_known:
            return 1.0
        if self._sorted is None:
            self._sorted = sorted(self._last)
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]


class WorkLengths:
    """Knows in answers of which length the tokens are that workers make."""

    __slots__ = ("_last", "_sorted")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=RATIOS)
        self._sorted: list[float] | None = None

    def add(self, osl_tokens: float) -> None:
        self._last.append(osl_tokens)
        self._sorted = None

    def quantile(self, share: float) -> float:
        """Return the length up to which answers have this share of all tokens; 0 before there are LEAST answers."""
        if len(self._last) < LEAST:
            return 0.0
        if self._sorted is None:
            self._sorted = sorted(self._last)
        rest = share * sum(self._sorted)
        for osl_tokens in self._sorted:
            rest -= osl_tokens
            if rest <= 0:
                return osl_tokens
        return self._sorted[-1]


class ArrivalGaps:
    """Knows the longest time without a request, of the last ARRIVALS_S to twice that."""

    __slots__ = ("_before_s", "_began_s", "_came_s", "_longest_s")

    def __init__(self) -> None:
        self._began_s = self._came_s = -math.inf
        self._longest_s = self._before_s = 0.0

    def came(self, now: float) -> None:
        """Note a request, whatever becomes of it."""
        if now - self._began_s >= ARRIVALS_S:
            is_next = now - self._began_s < 2 * ARRIVALS_S
            self._before_s, self._longest_s = self._longest_s if is_next else 0.0, 0.0
            self._began_s = now
        if self._came_s >= 0:
            self._longest_s = max(self._longest_s, now - self._came_s)
        self._came_s = now

    @property
    def longest_s(self) -> float:
        return max(self._longest_s, self._before_s)


class ServiceTimes:
    """Measurements of what requests for one model took, from the placement to the first and to the last token."""

    def __init__(self) -> None:
        self._first = FadingLine()  # over the prompt tokens that were computed until then, others' included
        self._itl = FadingLine()  # over the sequences that ran on the worker
        self._least_itl_s = math.inf  # of any answer that was not short
        self._lengths = AnswerLengths()
        self._errors = Ratios()
        self._errors_by_size: dict[int, Ratios] = {}  # as the lengths: short answers are easier to foresee
        self._queued = FadingMean()  # prompt tokens that were ahead of a request where it was placed
        self._running = FadingMean()  # sequences that ran there
        self._took = FadingMean()  # of whole answers, from the placement on
        self._waited = FadingMean()  # from the placement to the first token
        self._work = WorkLengths()
        self.arrivals = ArrivalGaps()
        self._gap = FadingMean()  # from one request that leaves a queue to the next

    def placed(self, queued_tokens: float, running: int) -> None:
        self._queued.add(queued_tokens)
        self._running.add(running)

    def began(self, tokens: float, took_s: float) -> None:
        self._first.add(tokens, took_s)
        self._waited.add(took_s)

    def ended(self, running: int, itl_s: float, osl_tokens: int = LONG_TOKENS) -> None:
        self._itl.add(running, itl_s)
        if osl_tokens >= LONG_TOKENS:
            self._least_itl_s = min(self._least_itl_s, itl_s)

    def answered(self, osl_tokens: int, max_tokens: int, took_s: float) -> None:
        self._lengths.add(osl_tokens, max_tokens)
        self._work.add(osl_tokens)
        self._took.add(took_s)

    def missed(self, osl_tokens: float) -> None:
        """Note an answer that was cut off, with the tokens that it would have had."""
        self._work.add(osl_tokens)

    def drained(self, gap_s: float) -> None:
        self._gap.add(gap_s)

    def compared(self, max_tokens: int, ratio: float) -> None:
        self._errors.add(ratio)
        self._errors_by_size.setdefault(max_tokens.bit_length(), Ratios()).add(ratio)

    def expected_tokens(self, max_tokens: int) -> float:
        return self._lengths.expected(max_tokens)

    def estimate(
        self, uncached_tokens: int, max_tokens: int, queued_tokens: float | None = None, running: float | None = None
    ) -> ServiceEstimate | None:
        """Return what a request would take; None: not enough is known.

        Without `queued_tokens` and `running` of the worker those of the last placements count.
        """
        if self._itl.count < LEAST or self._first.count < LEAST or not max_tokens:
            return None
        queued = self._queued.value if queued_tokens is None else queued_tokens
        first_s = self._first.at(queued + uncached_tokens)
        itl_s = self._itl.at(self._running.value if running is None else running)
        return ServiceEstimate(first_s, first_s + (self._lengths.expected(max_tokens) - 1) * itl_s)

    def spare_share(self, running: int, slo_itl_s: float) -> float:
        """Return which share of its time a worker with so many sequences may give to prompts; < 0: tokens are too late.

        It is 1 as long as nothing is known, and where no answer has ever kept the SLO: nothing can be saved there. What
        prompts took is part of the gaps that were measured, so they are given rather less. `slo_itl_s` is for all
        answers, and half of them are slower than the mean: hence CAUTION.
        """
        if slo_itl_s < self._least_itl_s < math.inf:
            return 1.0
        itl_s = self._itl.at(running) if self._itl.count >= LEAST else 0.0
        return CAUTION - itl_s / slo_itl_s if itl_s else 1.0

    @property
    def mean_s(self) -> float:
        """Return what answers took lately; 0: not known."""
        return self._took.value

    @property
    def gap_s(self) -> float:
        """Return the time between two requests that left a queue, while there was one; 0: not known."""
        return self._gap.value if self._gap.weight >= LEAST_GAPS else 0.0

    def needed_for(self, share: float, running: float) -> float:
        """Return the time in which answers end that have this share of all tokens; 0: not known."""
        osl_tokens = self._work.quantile(share)
        return self._waited.value + osl_tokens * self._itl.at(running) if osl_tokens else 0.0

    def error(self, share: float, max_tokens: int) -> float:
        """Return by which factor the times of this share of such answers were longer than estimated, at most."""
        known = self._errors_by_size.get(max_tokens.bit_length())
        return (self._errors if known is None or not known.is_known else known).quantile(share)
