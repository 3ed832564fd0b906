"""Remember the latest requests as lines of the access log, in bounded memory, while somebody wants that."""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from kvmesh.frontend.access_log import access_fields, timestamp
from kvmesh.frontend.timeline import RequestTimeline, Timelines

MAX_REQUESTS = 4000
MAX_BYTES = 8 << 20  # of their lines
_encoder = msgspec.json.Encoder()


class RecentRequests:
    """Remembers requests while the access log is written or somebody looks at the live page."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self._watchers = 0
        self._leave: Callable[[], None] | None = None
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0

    def watch(self) -> Callable[[], None]:
        """Remember from now on; return what ends that. Requests from before a pause are forgotten."""
        if self._watchers == 0:
            self._lines.clear()
            self._num_bytes = 0
            self._leave = self._timelines.look(self._take)
        self._watchers += 1
        return self._rest

    def lines(self) -> list[bytes]:
        """Return the lines, in the order in which the requests have ended."""
        return list(self._lines)

    def _rest(self) -> None:
        self._watchers -= 1
        if self._watchers == 0 and self._leave is not None:
            self._leave()
            self._leave = None

    def _take(self, timeline: RequestTimeline) -> None:
        fields = access_fields(timeline)
        duration_s = timeline.s(timeline.ended) or 0.0
        line = _encoder.encode({"ts": timestamp(time.time()), "duration_ms": round(duration_s * 1e3, 3), **fields})
        self._lines.append(line)
        self._num_bytes += len(line)
        while self._num_bytes > MAX_BYTES or len(self._lines) > MAX_REQUESTS:
            self._num_bytes -= len(self._lines.popleft())
