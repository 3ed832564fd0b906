"""Tell the load of a server's other callers from the load of its worker's own requests. Pure.

A server's metrics count all requests, and the worker knows its own. The metrics may be older than that: SGLang writes
them every 40 steps and leaves them as they were when it comes to rest. So a count is compared with the most requests
that the worker had at once in the time that the count may be from: since the last change of the metrics but one. A
request that has just ended is then never taken for one of another caller.
"""

from kvmesh.workers.engine import EngineReport
from kvmesh.workers.engines.attached.server import ServerLoad

STANDS_STILL_LOOKS = (
    60  # metrics that have not changed for so many looks are true: SGLang writes them every 30 s at rest
)


class OutsideCallers:
    def __init__(self) -> None:
        self.report = EngineReport()
        self._seen = ServerLoad()
        self._most_before = 0  # own requests at once, between the last two changes of the metrics
        self._most_since = 0  # and since the last change
        self._looks = 0  # since the last change

    def look(self, seen: ServerLoad, most_own: int, own: int, total_blocks: int) -> bool:
        """Take in the metrics of a server. Return whether `report` has changed.

        most_own: the most requests that the worker had at once since the last call. own: the requests that it has now.
        """
        self._most_since = max(self._most_since, most_own)
        most = max(self._most_before, self._most_since)
        self._looks += 1
        if seen != self._seen or self._looks >= STANDS_STILL_LOOKS:
            self._seen, self._looks = seen, 0
            self._most_before, self._most_since = self._most_since, own
        before, self.report = self.report, _report(seen, most, total_blocks)
        return self.report != before


def _report(seen: ServerLoad, own: int, total_blocks: int) -> EngineReport:
    requests = seen.running + seen.waiting
    outside = max(0, requests - own)
    if not outside:
        return EngineReport()
    return EngineReport(outside, round(seen.cache_usage * total_blocks * outside / requests))
