"""Work out the price of a block to compute, against a block that waits in a queue. Pure; the time is a parameter.

A request waits for what was placed before it, and others will wait for what it has to compute. How much the second
counts depends on how busy the workers are. On idle workers nobody waits. Near saturation, a block computed twice is
paid for several times over. And a prefix that many ask for is worth a copy: the requests that will use it share its
price.
"""

import math
from collections import OrderedDict

BUSY_WINDOW_S = 60.0
DEMAND_WINDOW_S = 100.0
SPREAD_MEMORY = 0.997  # the weight of a request falls to this share with each later one
MIN_SAMPLES = 16
MAX_SPREAD = 8.0
MAX_BUSY_SHARE = 0.95  # above it the estimate of the wait has no meaning


def recompute_price(busy_share: float, spread: float, asked_before: float, holders: int) -> float:
    """Return how many blocks in a queue weigh as much as one block to compute; > 0.

    One block is for the request itself. All later requests wait longer, too. The wait in a queue is
    (1 + spread) / 2 * load / (1 - load) (Pollaczek and Khinchine). Its slope is (1 + spread) / 2 / (1 - load)**2, and
    the share `load` of it falls on requests that come while the worker is busy. spread: see WorkSpread. asked_before:
    recent requests whose cached prefix ended at the same block. A copy would serve asked_before / holders of them, and
    they share its price.
    """
    load = min(busy_share, MAX_BUSY_SHARE)
    others = (1.0 + spread) / 2 * load / (1.0 - load) ** 2
    return (1.0 + others) / (1.0 + asked_before / max(1, holders))


class WorkSpread:
    """Measures how unequal requests are: variance / mean**2 of the tokens that the last few hundred had to compute.

    0: all equal. 1: as if exponentially distributed. 3 and more: a few long prompts among many short ones.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean = 0.0
        self._mean_square = 0.0

    def add(self, tokens: int) -> None:
        self._weight = SPREAD_MEMORY * self._weight + 1.0
        share = 1.0 / self._weight
        self._mean += share * (tokens - self._mean)
        self._mean_square += share * (tokens * tokens - self._mean_square)

    @property
    def value(self) -> float:
        """The spread; 1 while little is known."""
        if self._weight < MIN_SAMPLES or not self._mean:
            return 1.0
        return min(MAX_SPREAD, max(0.0, self._mean_square / self._mean**2 - 1.0))


class BusyShare:
    """Measures which share of some workers has had prompts to compute, over about the last `window_s`."""

    def __init__(self, window_s: float = BUSY_WINDOW_S) -> None:
        self._window_s = window_s
        self._busy = 0
        self._average = 0.0
        self._weight = 0.0  # grows to 1 as the window fills
        self._at: float | None = None

    def change(self, by: int, now: float) -> None:
        """Note that so many workers have begun (> 0) or ended (< 0) to have work."""
        self._advance(now)
        self._busy += by

    def of(self, num_workers: int, now: float) -> float:
        self._advance(now)
        if not self._weight or not num_workers:
            return 0.0
        return min(1.0, self._average / self._weight / num_workers)

    def _advance(self, now: float) -> None:
        if self._at is None:
            self._at = now
        elapsed_s = now - self._at
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / self._window_s)
            self._average = self._average * kept + self._busy * (1 - kept)
            self._weight = self._weight * kept + (1 - kept)
            self._at = now


class PrefixDemand:
    """Counts how often the prefix that ends at a block was asked for, decaying over DEMAND_WINDOW_S.

    The prefixes asked for last are kept.
    """

    def __init__(self, max_prefixes: int = 65_536) -> None:
        self._max_prefixes = max_prefixes
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # by sequence hash: count, when

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, prefix: bytes, now: float) -> float:
        """Return the demand for a prefix, given by the sequence hash of its last block, 8 bytes."""
        count, at = self._counts.get(prefix, (0.0, now))
        return count * math.exp((at - now) / DEMAND_WINDOW_S)

    def asked(self, prefix: bytes, now: float) -> None:
        self._counts[prefix] = (self.of(prefix, now) + 1.0, now)
        self._counts.move_to_end(prefix)
        if len(self._counts) > self._max_prefixes:
            self._counts.popitem(last=False)
