"""Report the load of an engine to the routers that listen (docs/decisions/0014-reported-load.md)."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvmesh.mesh.plane.server import Call
from kvmesh.protocol.messages import LoadReport
from kvmesh.workers.engine import ReportsLoad

REPEAT_S = 1.0  # between two equal reports that say something, at least
LOST_REPORTS = 3  # a report is valid for the time of so many
_NOTHING = LoadReport()


class ToldReports:
    """The last reports that one listener was sent. Pure; the time is a parameter.

    A report is due when it has changed, and again every `repeat_s` as long as it says something.
    """

    def __init__(self, repeat_s: float) -> None:
        self._repeat_s = repeat_s
        self._told: dict[int, tuple[LoadReport, float]] = {}  # by rank: the report, and when

    @property
    def has_standing(self) -> bool:
        """Return whether the last report of a rank says something, so that it must be repeated."""
        return any(report.says_something for report, _ in self._told.values())

    def take_due(self, reports: Sequence[LoadReport], now: float) -> list[LoadReport]:
        """Return the reports that are to be sent now. They count as told."""
        due = [report for report in reports if self._is_due(report, now)]
        for report in due:
            self._told[report.dp_rank] = (report, now)
        return due

    def _is_due(self, report: LoadReport, now: float) -> bool:
        told, at_s = self._told.get(report.dp_rank, (_NOTHING, now))
        if not report.says_something:
            return told.says_something
        return report != told or now - at_s >= self._repeat_s


class LoadReports:
    """Answers the worker's method `load`. While the load does not change, no timer runs unless a report stands."""

    def __init__(self, ranks: Sequence[object], interval_s: float) -> None:
        """Wait `interval_s` at least between two reports to one listener; 0: there are no reports."""
        self._interval_s = interval_s
        self._repeat_s = max(interval_s, REPEAT_S)
        self._ranks = reporting_ranks(ranks, interval_s)
        self._changed: set[asyncio.Event] = set()  # of each listener
        self._closed = asyncio.Event()
        for _, rank in self._ranks:
            rank.on_load_change(self._note_change)

    def close(self) -> None:
        """End all answers: the worker stops."""
        self._closed.set()
        self._note_change()

    async def answer(self, call: Call) -> None:
        """Report until the caller leaves or the worker stops. A change that is over within the interval is no news."""
        told, changed = ToldReports(self._repeat_s), asyncio.Event()
        now = asyncio.get_running_loop().time
        changed.set()
        self._changed.add(changed)
        try:
            while self._ranks and not self._closed.is_set():
                await _wait(changed, self._repeat_s if told.has_standing else None)
                await _wait(self._closed, self._interval_s)
                changed.clear()
                for report in told.take_due(self._reports(), now()):
                    await call.send(report)
        finally:
            self._changed.discard(changed)

    def _reports(self) -> list[LoadReport]:
        valid_s = LOST_REPORTS * self._repeat_s
        found = [(number, rank.report()) for number, rank in self._ranks]
        return [LoadReport(n, r.outside_requests, r.outside_blocks, r.queued_tokens, valid_s) for n, r in found]

    def _note_change(self) -> None:
        for changed in self._changed:
            changed.set()


def reporting_ranks(ranks: Sequence[object], interval_s: float) -> list[tuple[int, ReportsLoad]]:
    """Return the ranks that report load, with their numbers; none if reports are switched off."""
    if not interval_s:
        return []
    return [(number, rank) for number, rank in enumerate(ranks) if isinstance(rank, ReportsLoad)]


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
