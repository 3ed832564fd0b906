"""Take in the load that workers report and that no booking covers. Pure; the time is a parameter.

Bookings stay exact: a report only adds a share to its holder, as another router would. Requests of outside callers are
told apart by the worker, which knows its own. Prompt tokens are compared here: a worker that still has to compute more
than the bookings say is slower than expected, or computes something again. A report is older than the bookings, so its
tokens are compared with the most that was booked lately: a prompt that has just ended is never counted twice.
"""

import math

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import LoadReport
from kvmesh.router.index import Holder
from kvmesh.router.load import NOTHING, UNBOOKED, ActiveLoad, HolderLoad, RecentMost, Share

MARK_S = 0.4  # reports are compared with the bookings since the last report but one, and for this time at least


class ReportedLoad:
    """Keeps the unbooked shares in an ActiveLoad, each for as long as its report is valid."""

    def __init__(self, load: ActiveLoad) -> None:
        self._load = load
        self._ends_s: dict[Holder, float] = {}  # of the unbooked shares
        self._marked_s: dict[Holder, float] = {}  # of workers that have reported tokens: when `most_backlog` was marked

    @property
    def total(self) -> Share:
        """Return the sum over all holders, for metrics."""
        shares = [self._load.of(holder).unbooked for holder in self._ends_s]
        return Share(*(sum(column) for column in zip(*shares, strict=True))) if shares else NOTHING

    def on_report(self, worker_id: WorkerId, report: LoadReport, now: float) -> bool:
        """Take in a report. Return whether it has changed the load; a report of an unknown holder does not."""
        holder = Holder(worker_id, report.dp_rank)
        if not self._load.knows(holder):
            return False
        tokens = self._unbooked_tokens(holder, self._load.of(holder), report.queued_tokens, now)
        return self._set(
            holder, Share(tokens, report.outside_blocks, report.outside_requests), now, now + report.valid_s
        )

    def forget(self, worker_id: WorkerId, now: float) -> bool:
        """Forget what a worker has reported: it has left, or its reports have stopped. Return whether that was load."""
        for holder in [known for known in self._marked_s if known.worker_id == worker_id]:
            del self._marked_s[holder]
            if self._load.knows(holder):
                self._load.of(holder).most_backlog = None
        return self._clear([holder for holder in self._ends_s if holder.worker_id == worker_id], now)

    def expire(self, now: float) -> bool:
        """Forget the reports that are not valid any more. Return whether there were any."""
        return self._clear([holder for holder, ends_s in self._ends_s.items() if ends_s <= now], now)

    def next_s(self) -> float | None:
        """Return when `expire` is to be called next."""
        return min(self._ends_s.values(), default=None)

    def _unbooked_tokens(self, holder: Holder, load: HolderLoad, reported: int, now: float) -> float:
        most, backlog = load.most_backlog, load.backlog(now)
        if most is None:
            if reported:  # what was booked before is not known: reports after the next mark can be compared
                load.most_backlog, self._marked_s[holder] = RecentMost(math.inf, backlog), now
            return 0.0
        most.note(backlog)
        unbooked = max(0.0, reported - most.value)
        if now - self._marked_s[holder] >= MARK_S:
            most.mark(backlog)
            self._marked_s[holder] = now
        return unbooked

    def _set(self, holder: Holder, share: Share, now: float, ends_s: float) -> bool:
        if share == NOTHING:
            return self._clear([holder] if holder in self._ends_s else [], now)
        self._ends_s[holder] = ends_s
        if share == self._load.of(holder).unbooked:
            return False
        self._load.update_elsewhere(UNBOOKED, {holder: share}, now)
        return True

    def _clear(self, holders: list[Holder], now: float) -> bool:
        for holder in holders:
            del self._ends_s[holder]
        self._load.update_elsewhere(UNBOOKED, dict.fromkeys(holders, NOTHING), now)
        return bool(holders)
