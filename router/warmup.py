"""Hold back requests from a worker that has just joined. Pure; the time is a parameter.

An idle newcomer is the cheapest for every request at once. That alone does no harm: a router books what it places, so
its next request sees the cost. Three risks remain:

- The newcomer is slower than its load says: kernels are compiled and pools allocated by the first requests, connections
  are made, its cache is empty. Requests that pile up behind the first ones wait for all of that.
- It may not work at all (a wrong model, no memory left, a port that is closed). Then all requests there fail and go to
  other workers. One request finds that out as well as a hundred.
- Every router sees it join at the same instant, and counts only its own bookings.

So for a while it gets no more requests in flight than a growing share of what the busiest settled worker has, at least
one. It is settled after `ramp_s`, or when it has completed `ramp_requests` here, whichever is first: a request that
ended well proves more than time that passed. Where all candidates are new (a mesh that starts, a router that starts)
no other worker could take the requests, and there is no cap.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvmesh.protocol.ids import WorkerId
from kvmesh.router.index import Holder


@dataclass(slots=True)
class _Ramp:
    joined_s: float
    completed: int = 0


class WarmUp:
    """Remembers the workers that are not settled yet. A worker that it does not know is settled."""

    def __init__(self, ramp_s: float = 10.0, ramp_requests: int = 16) -> None:
        self._ramp_s = ramp_s
        self._ramp_requests = ramp_requests
        self._ramps: dict[WorkerId, _Ramp] = {}
        self.changes = 0  # how often the workers that are not settled have become others

    def __len__(self) -> int:
        """Return the number of workers that were not settled when they were asked about last."""
        return len(self._ramps)

    def joined(self, worker_id: WorkerId, now: float) -> None:
        if self._ramp_s > 0 and self._ramp_requests > 0:
            self._ramps[worker_id] = _Ramp(now)
            self.changes += 1

    def completed(self, worker_id: WorkerId) -> None:
        """Note that a request ended well there."""
        if (ramp := self._ramps.get(worker_id)) is not None:
            ramp.completed += 1
            if ramp.completed >= self._ramp_requests:
                self.left(worker_id)

    def left(self, worker_id: WorkerId) -> None:
        if self._ramps.pop(worker_id, None) is not None:
            self.changes += 1

    def is_over(self, now: float) -> bool:
        """Return whether all workers are settled. It may be late to do so if workers joined out of order."""
        ramps = self._ramps
        while ramps:
            first = next(iter(ramps))  # it joined first, if one clock is used
            if now - ramps[first].joined_s < self._ramp_s:
                return False
            self.left(first)
        return True

    def share(self, worker_id: WorkerId, now: float) -> float:
        """Return the share of requests that a worker may have: 0 when it joins, 1 once it is settled."""
        if (ramp := self._ramps.get(worker_id)) is None:
            return 1.0
        share = (now - ramp.joined_s) / self._ramp_s
        if (by_requests := ramp.completed / self._ramp_requests) > share:
            share = by_requests
        if share < 1:
            return share if share > 0 else 0.0
        self.left(worker_id)
        return 1.0

    def unsettled(self, now: float) -> Collection[WorkerId]:
        """Return the workers that are not settled."""
        return () if self.is_over(now) else self._ramps.keys()

    def held_back(self, in_flight: Iterable[tuple[Holder, int]], busiest: int, now: float) -> list[Holder]:
        """Return the newcomers that may take no further request now.

        in_flight: requests that run at each newcomer. busiest: at the busiest settled worker; -1: none is settled.
        """
        if busiest < 0:
            return []
        found: list[Holder] = []
        for holder, requests in in_flight:
            if requests and (share := self.share(holder.worker_id, now)) < 1:
                cap = int(share * busiest)
                if requests >= cap or cap < 1:
                    found.append(holder)
        return found
