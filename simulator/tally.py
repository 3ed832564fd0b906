"""Summarize many values in bounded memory."""

import math
from array import array
from collections import Counter

EXACT = 200_000  # values that are kept as they are
_PRECISION = math.log(1.005)


class PercentileTally:
    """Track mean, largest and percentiles: exact up to `EXACT` values, beyond them to half a per cent."""

    def __init__(self, exact: int = EXACT) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._exact = exact
        self._values: array[float] | None = array("d")
        self._buckets: Counter[int] = Counter()  # bucket b: values up to 1.005**b; the least one: 0

    def add(self, value: float) -> None:
        """Count a value that is not negative."""
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if self._values is None:
            self._buckets[_bucket(value)] += 1
            return
        self._values.append(value)
        if len(self._values) > self._exact:
            self._buckets.update(map(_bucket, self._values))
            self._values = None

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """Return the value that `share` (0..1) of all lie below; 0 without values."""
        if not self.count:
            return 0.0
        rank = min(self.count - 1, math.floor(self.count * share))
        if self._values is not None:
            return sorted(self._values)[rank]
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank < 0:
                break
        return min(self.largest, _value(bucket))


_ZERO_BUCKET = -1 << 30


def _bucket(value: float) -> int:
    return math.ceil(math.log(value) / _PRECISION) if value > 0 else _ZERO_BUCKET


def _value(bucket: int) -> float:
    return math.exp((bucket - 0.5) * _PRECISION) if bucket != _ZERO_BUCKET else 0.0
