"""Decide how long a request without a worker waits for one to come back. Pure but for the wait for news.

A worker comes back if it is still in the mesh, because then only the network was away, or if the owner of its process
starts it again: `kvmesh up` shows which workers it keeps (`kept/`). Otherwise waiting helps nobody.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.mesh.plane.client import is_refused
from kvmesh.protocol.errors import (
    DrainingError,
    IdentityError,
    MeshError,
    PeerLostError,
    StaleCardError,
    UnreachableError,
    WireError,
)
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import KeptCard, Role, WorkerCard, decode
from kvmesh.router.feeds import WorkerNews

log = logging.getLogger(__name__)

KEY_PREFIX = "kept/"
MAX_OWNERS = 64  # whose notices are remembered
# News of a worker is at most so old: it refuses requests before its card says so, and joins before routers know.
NEWS_S = 2.0
# A worker that cannot be reached for so long, and whose card stands, is cut off from this frontend. This is two leases:
# the card of a worker that has ended would be gone.
CUT_OFF_S = 10.0
NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class FailedWorker:
    """The latest failure of one worker at one request."""

    worker_id: WorkerId
    name: str
    reason: MeshError
    at_s: float  # of the first one, of failures to reach it that follow each other

    def failed_again(self, reason: MeshError, now_s: float) -> "FailedWorker":
        is_same = is_silent(self.reason) and is_silent(reason)
        is_same = is_same or (isinstance(self.reason, StaleCardError) and isinstance(reason, StaleCardError))
        return replace(self, reason=reason, at_s=self.at_s if is_same else now_s)


def is_silent(reason: MeshError) -> bool:
    """Return whether a worker could not be reached at all. One that refuses by itself has answered, but for one that
    refuses a certificate, as when it has expired."""
    return isinstance(reason, IdentityError) or (isinstance(reason, UnreachableError) and reason.__cause__ is not None)


class Presence(Protocol):
    """Tells the dispatcher which workers come back."""

    def waits_until(self, failed: FailedWorker) -> float:
        """Return until when a request may wait for this worker, or for one of its name. NEVER: it does not come."""
        ...

    def waits_for_model(self, model: str) -> float:
        """Return until when a request may wait for a worker of the model that is being started again, as above."""
        ...

    async def news(self, timeout_s: float) -> None:
        """Return when a worker has come or gone, or after `timeout_s`."""
        ...


class NobodyReturns:
    """Implements Presence where nothing is known of workers."""

    def waits_until(self, failed: FailedWorker) -> float:
        return NEVER

    def waits_for_model(self, model: str) -> float:
        return NEVER

    async def news(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class MeshPresence:
    """Implements Presence by the cards of workers and the notices of their owners."""

    def __init__(self, workers: WorkerNews, resting: Mapping[WorkerId, WorkerCard]) -> None:
        self._resting = resting
        self._joined: dict[WorkerId, tuple[str, float]] = {}  # name, and when
        self._kept: dict[str, frozenset[str]] = {}  # names, by key of the owner
        self._models: dict[str, str] = {}  # by name of a worker that answers, also while it is started again
        self._news = asyncio.Event()
        workers.listen(self._join, self._leave)

    def waits_until(self, failed: FailedWorker) -> float:
        if failed.worker_id in self._joined and not self._rests(failed.name):
            return _of_one_that_is_there(failed, is_kept=self._is_kept(failed.name))
        return self._waits_for_next(failed.name)

    def waits_for_model(self, model: str) -> float:
        names = [name for name, its_model in self._models.items() if its_model == model and self._is_kept(name)]
        return max(map(self._waits_for_next, names), default=NEVER)

    def _waits_for_next(self, name: str) -> float:
        """Return until when to wait for the next worker of a name."""
        if self._rests(name):
            return NEVER
        if joined := [at_s for its_name, at_s in self._joined.values() if its_name == name]:
            return max(joined) + NEWS_S  # the router may not know it yet
        return math.inf if self._is_kept(name) else NEVER

    def _is_kept(self, name: str) -> bool:
        return any(name in names for names in self._kept.values())

    def _rests(self, name: str) -> bool:
        return any(card.name == name for card in self._resting.values())

    async def news(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    def on_notice(self, change: Put | Deleted) -> None:
        """Note which workers an owner keeps."""
        if isinstance(change, Deleted):
            self._kept.pop(change.key, None)
        elif change.key in self._kept or len(self._kept) < MAX_OWNERS:
            try:
                self._kept[change.key] = frozenset(decode(change.value, KeptCard).workers)
            except WireError as error:
                log.warning("a notice of an owner of workers cannot be read: %s", error)
        there = {name for name, _ in self._joined.values()}
        for name in [name for name in self._models if name not in there and not self._is_kept(name)]:
            del self._models[name]
        self._tell()

    async def run(self, discovery: Discovery) -> None:
        """Follow the notices until cancelled."""
        async for change in discovery.watch(KEY_PREFIX):
            self.on_notice(change)

    def _join(self, card: WorkerCard) -> None:
        if card.role is not Role.PREFILL:
            self._models[card.name] = card.model
        else:
            self._models.pop(card.name, None)
        if card.worker_id not in self._joined:
            self._joined[card.worker_id] = card.name, asyncio.get_running_loop().time()
        self._tell()  # also of a new card: its worker may take requests again that its old one has misled

    def _leave(self, worker_id: WorkerId) -> None:
        name, _ = self._joined.pop(worker_id, ("", 0.0))
        if not self._is_kept(name):
            self._models.pop(name, None)
        self._tell()

    def _tell(self) -> None:
        """Wake all that wait for news now."""
        self._news.set()
        self._news = asyncio.Event()


def _of_one_that_is_there(failed: FailedWorker, *, is_kept: bool) -> float:
    """Return until when to wait for a worker that failed, and whose card stands."""
    reason = failed.reason
    if isinstance(reason, UnreachableError) and is_refused(reason):  # its process has ended; its lease has not
        return math.inf if is_kept else NEVER
    if is_silent(reason):
        return failed.at_s + CUT_OFF_S
    if isinstance(reason, PeerLostError):  # perhaps only the network was away
        return math.inf
    if is_kept or isinstance(reason, DrainingError):  # its card, or its end, will say more
        return failed.at_s + NEWS_S
    return NEVER
