"""Turn a worker from one role to another while it runs: that takes seconds, a new worker would have to load its model.

The worker leaves the mesh, finishes its requests, hands over its offers, and joins under another id. Routers forget the
old worker and learn the new one, whose first events have the cached blocks. There is one turn at a time. It continues
if its caller leaves; only the end of the worker stops it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvevents.transport import Publisher
from protocol.errors import DrainingError, EngineError, InvalidRequestError
from protocol.ids import WorkerId
from protocol.messages import ControlReply, Role
from workers.engine import Engine, EngineInfo, Turnable
from workers.loaded_content import KvContent
from workers.metrics import TURNS

log = logging.getLogger(__name__)

OFFERS_POLL_S = 0.02


class Place(Protocol):
    """The part of workers.membership.Membership that a turn needs."""

    role: Role
    worker_id: WorkerId
    engine_kind: str  # as in the settings
    publishers: Sequence[Publisher]  # of the data-parallel ranks
    resting: str  # as in the worker's card
    content: KvContent  # as in the worker's card

    async def join(self, info: EngineInfo) -> None: ...

    async def leave(self) -> None: ...

    async def change(self, role: Role, *, tells_events: bool) -> None: ...


class Turning:
    def __init__(self, engine: Engine, place: Place, drain_timeout_s: float) -> None:
        self.to: Role | None = None  # the role it is on its way to; while there is one it takes no requests
        self.count = 0  # turns that it has made
        self.requests: set[asyncio.Task[Any]] = set()  # that it answers
        self._engine = engine
        self._place = place
        self._drain_timeout_s = drain_timeout_s
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False

    @property
    def role(self) -> Role:
        return self._place.role

    async def set_role(self, role: Role, info_of: Callable[[], EngineInfo]) -> ControlReply:
        """Turn, and say under which id the worker has come back. It is no error to ask for the role that it has.

        Raises InvalidRequestError if the engine cannot, or is on its way already; DrainingError if the worker stops.
        """
        if self.to is not None:
            raise InvalidRequestError(
                f"this worker is becoming a {self.to.value} worker already", hint="ask again when it has"
            )
        if self._has_ended:
            raise DrainingError(f"{self._place.worker_id} is shutting down")
        if self._place.resting:
            raise InvalidRequestError(f"this worker is {self._place.resting}", hint="resume or wake it first")
        if role is self.role:
            return ControlReply(detail=f"it is a {role.value} worker already", worker_id=self._place.worker_id)
        check_can_turn(self._engine, self._place.engine_kind, info_of(), role)
        self.to = role
        self._task = asyncio.create_task(self._turn(role, info_of), name=f"become a {role.value} worker")
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._has_ended:
                raise DrainingError(f"{self._place.worker_id} is shutting down") from None
            raise  # the caller has left, the turn continues
        return ControlReply(
            detail=f"it is a {role.value} worker now, {self._place.worker_id}", worker_id=self._place.worker_id
        )

    def check_health(self) -> None:
        """Raises EngineError if a turn has failed: the worker may be in no role and unknown to the mesh."""
        task = self._task
        if task is not None and task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise EngineError(f"the worker could not change its role: {type(error).__name__}: {error}") from error

    async def end(self) -> None:
        """The worker stops: no turn begins any more, and one that is under way is given up."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # said by check_health
                await self._task

    async def _turn(self, role: Role, info_of: Callable[[], EngineInfo]) -> None:
        place, before = self._place, self._place.worker_id
        log.info("changing role", extra={"worker": before, "from": self.role.value, "to": role.value})
        try:
            await place.leave()
            deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
            await self.finish_requests("this worker changes its role")
            await offers_taken(self._engine, deadline)
            await place.change(role, tells_events=info_of().tells_events)
            self.count += 1
            assert isinstance(self._engine, Turnable)
            self._engine.rename(place.worker_id)
            self.to = None  # a router that finds the card may send requests at once
            await place.join(info_of())
        finally:
            self.to = None
        TURNS.labels(role.value).inc()
        log.info("changed role", extra={"worker": place.worker_id, "before": before, "role": role.value})

    async def finish_requests(self, why: str) -> None:
        """Wait for the requests. One that takes longer than a drain may continues on another worker."""
        if not self.requests:
            return
        _, late = await asyncio.wait(self.requests, timeout=self._drain_timeout_s)
        for task in late:
            task.cancel(why)
        if late:
            log.warning(
                "%d requests continue on other workers: they took longer than %.1f s", len(late), self._drain_timeout_s
            )
            await asyncio.wait(late)


def check_can_turn(engine: Engine, kind: str, info: EngineInfo, role: Role) -> None:
    if not isinstance(engine, Turnable) or not info.roles:
        raise InvalidRequestError(
            f"a worker with the engine {kind} cannot change its role while it runs",
            hint="torch and mock workers can; start another worker in its place",
        )
    if role not in info.roles:
        raise InvalidRequestError(
            f"this worker cannot become a {role.value} worker", hint="its profile has no table for that role"
        )


def role_asked_for(arguments: Mapping[str, str]) -> Role:
    """Raises InvalidRequestError if there is none, or one that is none."""
    try:
        return Role(arguments["role"])
    except (KeyError, ValueError):
        raise InvalidRequestError(
            f"set_role needs the argument 'role', got {dict(arguments)!r:.200}",
            hint=f"one of {', '.join(role.value for role in Role)}",
        ) from None


async def offers_taken(engine: Engine, deadline: float) -> None:
    """A prefill worker that leaves while decode workers still fetch from it would make them compute again."""
    while engine.load().offers and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(OFFERS_POLL_S)  # once in the life of a worker: not worth an event in the seam
