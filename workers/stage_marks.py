"""Note when requests reached their stages in our own engine, for those that belong to a trace."""

import time
from collections.abc import Iterable

from msgspec import Struct

from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import WorkerTimes
from kvmesh.workers.scheduler import SequenceState


class _Marks(Struct, gc=False):
    came: float
    scheduled: float | None = None
    first: float | None = None
    sequence: SequenceState | None = None


class StageMarks:
    """Keeps the times of the requests that are traced; without such requests it holds nothing."""

    def __init__(self) -> None:
        self.marks: dict[RequestId, _Marks] = {}
        self.unscheduled: dict[RequestId, _Marks] = {}  # of these, those that wait

    def add(self, request_id: RequestId) -> None:
        self.marks[request_id] = self.unscheduled[request_id] = _Marks(time.monotonic())

    def forget(self, request_id: RequestId) -> None:
        self.marks.pop(request_id, None)
        self.unscheduled.pop(request_id, None)

    def note_scheduled(self, sequences: Iterable[SequenceState]) -> None:
        now = time.monotonic()
        for sequence in sequences:
            if (marks := self.unscheduled.pop(sequence.request_id, None)) is not None:
                marks.scheduled, marks.sequence = now, sequence

    def note_first(self, request_id: RequestId) -> None:
        """Note the first token of a request."""
        if (marks := self.marks.get(request_id)) is not None:
            marks.first = time.monotonic()

    def times(self, request_id: RequestId) -> WorkerTimes | None:
        if (marks := self.marks.get(request_id)) is None:
            return None
        now = time.monotonic()
        first = marks.first or now
        return WorkerTimes(
            queued_s=(marks.scheduled or first) - marks.came,
            first_s=first - marks.came,
            total_s=now - marks.came,
            preemptions=0 if marks.sequence is None else marks.sequence.num_preempted,
        )
