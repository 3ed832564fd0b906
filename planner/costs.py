"""Weigh GPU time against missed requests. Pure.

There is one price: a request outside the SLO costs as much as the GPU time of `miss_cost` requests. A worker that is
needed with probability p saves requests worth p * miss_cost of its time. All figures below follow from that.
"""

import math
from dataclasses import dataclass

LEAST_EVIDENCE_S = 20.0  # a count of arrivals over less is mostly chance
MOST_EVIDENCE_S = 300.0
KNOWN_SHARE = 0.25  # of the evidence; less orders more workers than it saves misses (decision 54)
UNNEEDED_STARTS = 1.4  # a peak that begins within the time of a start is seen before the workers for it are gone


def quantile_of(miss_cost: float) -> float:
    """Return the quantile of the demand to be ready for: a worker pays if it is needed in one of `miss_cost` cases."""
    return 1 - 1 / miss_cost


@dataclass(frozen=True, slots=True)
class Horizon:
    """The times that follow from how long a worker takes to start, and from the price of a miss."""

    start_s: float
    miss_cost: float
    peak_is_known: bool = False  # a false alarm then orders the fleet for the peak at most

    @property
    def evidence_s(self) -> float:
        """Return how long a load must have lasted before workers are ordered for it.

        By then its misses have cost as much as starting the workers. To order at once would pay for starts that come
        after a short burst, to wait longer would pay for more misses than the start costs. With a known peak a quarter
        of the time is enough.
        """
        full_s = min(max(LEAST_EVIDENCE_S, self.start_s / self.miss_cost), MOST_EVIDENCE_S)
        return max(LEAST_EVIDENCE_S / 2, KNOWN_SHARE * full_s) if self.peak_is_known else full_s

    @property
    def unneeded_s(self) -> float:
        """Return how long a new planner keeps workers that are there for the peak and that no load has needed so far.

        It is less than the break-even, because nothing says yet that the peak comes back.
        """
        return UNNEEDED_STARTS * self.start_s

    @property
    def break_even_s(self) -> float:
        """Return how long a worker that is not needed is kept: for what it costs to miss it and to start it again.

        A planner that keeps workers so long pays at most twice what one pays that knows when they are needed again.
        """
        return self.start_s + self.miss_cost * (self.start_s + LEAST_EVIDENCE_S)

    def catch_up(self, work: float, backlog_s: float, ready: int, starting: int) -> int:
        """Return the workers that work off what is left of a queue once new workers are there; 0: nothing is left.

        `work` and `backlog_s` are the arriving and the queued worker seconds. Starting workers come halfway on average.
        More workers make the time shorter in which all requests are late: n workers take left / (n - work). The cost of
        starting them, n * start_s, plus that of the misses is least at n = work + sqrt(work * left / start_s).
        """
        left_s = backlog_s + (work - ready - starting / 2) * self.start_s
        if left_s <= 0:
            return 0
        return math.ceil(work + math.sqrt(work * left_s / max(self.start_s, LEAST_EVIDENCE_S)))
