"""Tell the frontend, with the last delta, how a worker spent its time on a request that belongs to a trace.

A request that is not sampled tells it only where a trace that is exported for its lateness would have something to say:
its first token came late, or it was preempted.
"""

import time

import msgspec

from kvmesh.mesh.trace_context import is_sampled
from kvmesh.protocol.messages import Delta, GenerateRequest, TimedDelta, WorkerTimes
from kvmesh.workers.engine import KeepsTimes

LATE_S = 0.1  # a first token that comes later is worth a word


class SpentTime:
    """Watches the deltas of one request, which came at `came`."""

    __slots__ = ("_came", "_first", "_is_sampled", "_request_id", "_timing")

    def __init__(self, request: GenerateRequest, came: float, timing: KeepsTimes | None) -> None:
        self._request_id, self._came, self._timing = request.request_id, came, timing
        self._is_sampled = is_sampled(request.traceparent)
        self._first: float | None = None

    def told(self, delta: Delta) -> Delta:
        """Return the delta to send: the last one says how the time was spent, if that is wanted."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if delta.finish_reason is None and delta.ticket is None:
            return delta
        times = None if self._timing is None else self._timing.times(self._request_id)
        if times is None:
            times = WorkerTimes(first_s=self._first - self._came, total_s=now - self._came)
        if not (self._is_sampled or times.first_s > LATE_S or times.preemptions):
            return delta
        return TimedDelta(**msgspec.structs.asdict(delta), times=times)
