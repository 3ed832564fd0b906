"""Follow the load that workers report: one call stays open to each worker whose card says that it reports."""

import asyncio
import logging
import time
from collections.abc import Callable

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import DeadlineExceededError, InvalidRequestError, MeshError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import LoadReport, WorkerCard
from kvmesh.router.metrics import LOAD_REPORTS
from kvmesh.router.reported import ReportedLoad

log = logging.getLogger(__name__)

CALL_S = 86_400.0  # a call that is older is opened again
RETRY_S = 1.0


class LoadFeed:
    """Applies reports to `reported`, and calls `on_change` when they have changed the load of a worker."""

    def __init__(self, reported: ReportedLoad, plane: PlaneClient, on_change: Callable[[], object]) -> None:
        self._reported = reported
        self._plane = plane
        self._on_change = on_change
        self._following: dict[WorkerId, asyncio.Task[None]] = {}
        self._expiry: asyncio.TimerHandle | None = None

    def follow(self, card: WorkerCard) -> None:
        """Follow the reports of a worker, if it makes any."""
        if card.reports_load and card.worker_id not in self._following:
            name = f"router: load of {card.worker_id}"
            self._following[card.worker_id] = asyncio.create_task(self._follow(card), name=name)

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a worker that has left. An unknown worker is no error."""
        if (following := self._following.pop(worker_id, None)) is not None:
            following.cancel()
            self._forget(worker_id)

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        following, self._following = list(self._following.values()), {}
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    async def _follow(self, card: WorkerCard) -> None:
        """Follow until the worker ends its reports, because it stops, or until cancelled."""
        while True:
            try:
                async with self._plane.open(card.address, "load", None, CALL_S) as stream:
                    async for report in stream.messages(LoadReport):
                        self._take(card.worker_id, report)
                return
            except DeadlineExceededError:
                continue
            except InvalidRequestError as error:
                log.warning("the load of worker %s is not followed: %s", card.worker_id, error)
                return
            except MeshError as error:
                log.debug("the reports of worker %s have stopped: %s", card.worker_id, error)
            finally:
                self._forget(card.worker_id)
            await asyncio.sleep(RETRY_S)

    def _take(self, worker_id: WorkerId, report: LoadReport) -> None:
        LOAD_REPORTS.inc()
        if self._reported.on_report(worker_id, report, time.monotonic()):
            self._on_change()
        self._plan_expiry()

    def _forget(self, worker_id: WorkerId) -> None:
        if self._reported.forget(worker_id, time.monotonic()):
            self._on_change()

    def _plan_expiry(self) -> None:
        """Look for reports that have ended, as long as there are any."""
        if self._expiry is None and (due_s := self._reported.next_s()) is not None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(max(0.0, due_s - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        if self._reported.expire(time.monotonic()):
            self._on_change()
        self._plan_expiry()
