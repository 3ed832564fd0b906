"""A worker that has just joined is not stampeded. Pure; the time is a parameter.

An idle newcomer is the cheapest for every request at once. That alone does no harm: what one router places there it
books at once, so its next request sees the cost. What remains:

- The newcomer is slower than its load says: kernels are compiled and pools allocated by the first requests, connections
  are made, its cache is empty. Requests that pile up behind the first ones wait for all of that.
- It may not work at all (a wrong model, no memory left, a port that is closed): what was sent fails and has to go
  elsewhere. One request finds that out as well as a hundred.
- Every router sees it join at the same instant, and books for itself alone.

So for a while it gets no more requests in flight than a growing share of what the busiest settled worker has, at least
one. It is settled after `ramp_s`, or when it has completed `ramp_requests` here, whichever is first: a request that
ended well proves more than time that passed. Where all candidates are new (a mesh that starts, a router that starts)
there is nobody to spare them for, and no cap.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.ids import WorkerId
from router.index import Holder


@dataclass(slots=True)
class _Ramp:
    joined_s: float
    completed: int = 0


class WarmUp:
    """Remembers only workers that are not settled yet: a worker that it does not know is."""

    def __init__(self, ramp_s: float = 10.0, ramp_requests: int = 16) -> None:
        self._ramp_s = ramp_s
        self._ramp_requests = ramp_requests
        self._ramps: dict[WorkerId, _Ramp] = {}

    def __len__(self) -> int:
        """Workers that were not settled when they were asked about last."""
        return len(self._ramps)

    def joined(self, worker_id: WorkerId, now: float) -> None:
        self._ramps[worker_id] = _Ramp(now)

    def completed(self, worker_id: WorkerId) -> None:
        """A request ended well there."""
        if (ramp := self._ramps.get(worker_id)) is not None:
            ramp.completed += 1

    def left(self, worker_id: WorkerId) -> None:
        self._ramps.pop(worker_id, None)

    def is_over(self, now: float) -> bool:
        """Whether nobody is held back any more. It may be late to say so of workers that were told of out of order."""
        ramps = self._ramps
        while ramps:
            first = next(iter(ramps))  # who joined first, if one clock is used
            if now - ramps[first].joined_s < self._ramp_s:
                return False
            del ramps[first]
        return True

    def share(self, worker_id: WorkerId, now: float) -> float:
        """Of its capacity, what it may be given: 0 when it joins, 1 once it is settled, and between them in a line."""
        if (ramp := self._ramps.get(worker_id)) is None:
            return 1.0
        by_time = (now - ramp.joined_s) / self._ramp_s if self._ramp_s > 0 else 1.0
        by_requests = ramp.completed / self._ramp_requests if self._ramp_requests > 0 else 1.0
        if (share := max(by_time, by_requests)) < 1:
            return max(0.0, share)
        del self._ramps[worker_id]
        return 1.0

    def held_back(self, in_flight: Mapping[Holder, int], now: float) -> frozenset[Holder]:
        """Which of the candidates may take no further request now; never all. `in_flight`: requests that run there."""
        if not self._ramps:
            return frozenset()
        shares = {holder: self.share(holder.worker_id, now) for holder in in_flight}
        busiest = max((in_flight[holder] for holder, share in shares.items() if share >= 1), default=None)
        if busiest is None:
            return frozenset()
        return frozenset(
            holder
            for holder, share in shares.items()
            if share < 1 and in_flight[holder] >= max(1, int(share * busiest))
        )
