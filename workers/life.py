"""Carry out the changes of a worker's state: drain, resume, sleep, wake and change the role, one at a time.

workers/states.py decides. A change continues if its caller leaves; only the end of the worker stops it. A worker that
rests keeps its card, so that operators find it. One that turns leaves the mesh and joins under another id: routers
forget the old worker and learn the new one, whose first events have the cached blocks.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvmesh.kvevents.transport import Publisher
from kvmesh.protocol.errors import DrainingError, EngineError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role
from kvmesh.workers.engine import Engine, EngineInfo, Turnable
from kvmesh.workers.loaded_content import KvContent
from kvmesh.workers.metrics import TURNS
from kvmesh.workers.states import (
    DRAINED_DETAIL,
    RESUMED_DETAIL,
    Begin,
    Nothing,
    Wait,
    WorkerOrder,
    WorkerState,
    WorkerStates,
)

log = logging.getLogger(__name__)

OFFERS_POLL_S = 0.02
EnginePart = Callable[[], Awaitable[str]]  # the engine's share of a change; returns what was done


class Place(Protocol):
    """The part of kvmesh.workers.membership.Membership that a worker's life needs."""

    role: Role
    worker_id: WorkerId
    engine_kind: str  # as in the settings
    publishers: Sequence[Publisher]  # of the data-parallel ranks
    states: WorkerStates
    content: KvContent  # as in the worker's card

    async def join(self, info: EngineInfo) -> None: ...

    async def leave(self) -> None: ...

    async def change(self, role: Role, *, tells_events: bool) -> None: ...


class WorkerLife:
    def __init__(
        self,
        engine: Engine,
        place: Place,
        info: Callable[[], EngineInfo],
        drain_timeout_s: float,
        on_state: Callable[[str], object] = str,
    ) -> None:
        """Call `on_state` with each new state as the card shows it, "" for a worker that serves."""
        self.requests: set[asyncio.Task[Any]] = set()  # that the worker answers
        self._states = place.states
        self._engine = engine
        self._place = place
        self._info = info
        self._drain_timeout_s = drain_timeout_s
        self._on_state = on_state
        self._changes: set[asyncio.Task[str]] = set()
        self._failure: BaseException | None = None

    async def drain(self) -> str:
        """Take no more requests and finish those in hand. Return what was done.

        This and the other orders raise WrongStateError, and DrainingError while the worker stops.
        """
        return await self._carry_out(WorkerOrder.DRAIN)

    async def resume(self) -> str:
        """Take requests again."""
        return await self._carry_out(WorkerOrder.RESUME)

    async def sleep(self, engine_part: EnginePart) -> str:
        """Drain the worker, then have its engine sleep: a request that reached a sleeping engine would fail."""
        return await self._carry_out(WorkerOrder.SLEEP, engine_part)

    async def wake(self, engine_part: EnginePart) -> str:
        """Have the engine wake, then take requests again. If the engine cannot, the worker sleeps on."""
        return await self._carry_out(WorkerOrder.WAKE, engine_part)

    async def turn(self, role: Role) -> str:
        """Become a worker of another role."""
        return await self._carry_out(WorkerOrder.TURN, role=role)

    def check_health(self) -> None:
        """Raise EngineError if a change of role has failed: the worker may be in no role and unknown to the mesh."""
        if (error := self._failure) is not None:
            raise EngineError(f"the worker could not change its role: {type(error).__name__}: {error}") from error

    async def end(self) -> None:
        """The worker stops: no change begins any more, and one that is under way is given up."""
        self._states.order(WorkerOrder.STOP)
        for task in list(self._changes):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # its caller is told
                await task

    async def _carry_out(
        self, order: WorkerOrder, engine_part: EnginePart | None = None, role: Role | None = None
    ) -> str:
        while True:
            match self._states.order(order, role):
                case Nothing(detail):
                    return detail
                case Wait():
                    await asyncio.wait(self._changes)
                case Begin(state):
                    task = asyncio.create_task(self._change(state, engine_part, role), name=f"worker: {order.value}")
                    self._changes.add(task)
                    task.add_done_callback(self._changes.discard)
                    return await self._result_of(task)

    async def _result_of(self, task: asyncio.Task[str]) -> str:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise DrainingError(f"{self._place.worker_id} is shutting down") from None
            raise  # the caller has left, the change continues

    async def _change(self, state: WorkerState, engine_part: EnginePart | None, role: Role | None) -> str:
        """Do the work of a state that has just begun."""
        log.info("changing state", extra={"worker": self._place.worker_id, "state": state.value})
        try:
            detail = await self._work(state, engine_part, role)
        except BaseException as error:
            self._states.failed(state)
            if self._states.state is WorkerState.FAILED:
                self._failure = error
            if not isinstance(error, asyncio.CancelledError):
                await self._show()
            raise
        self._states.done(state)
        await self._show()
        if state is WorkerState.TURNING:
            TURNS.labels(self._place.role.value).inc()
        log.info("changed state", extra={"worker": self._place.worker_id, "state": self._states.state.value})
        return detail

    async def _work(self, state: WorkerState, engine_part: EnginePart | None, role: Role | None) -> str:
        match state:
            case WorkerState.DRAINING:
                await self._show()
                await self._finish("this worker is drained")
                return DRAINED_DETAIL
            case WorkerState.FALLING_ASLEEP if engine_part is not None:
                await self._show()
                await self._finish("this worker falls asleep")
                return await engine_part()
            case WorkerState.WAKING if engine_part is not None:
                await self._show()
                return await engine_part()
            case WorkerState.TURNING if role is not None:
                return await self._turn(role)
        return RESUMED_DETAIL

    async def _turn(self, role: Role) -> str:
        place = self._place
        self._on_state(self._states.on_card)
        await place.leave()
        await self._finish("this worker changes its role")
        await place.change(role, tells_events=self._info().tells_events)
        assert isinstance(self._engine, Turnable)
        self._engine.rename(place.worker_id)
        return f"it is {role.noun} now, {place.worker_id}"

    async def _show(self) -> None:
        """Have /health and the card say in which state the worker is."""
        self._on_state(self._states.on_card)
        await self._place.join(self._info())

    async def _finish(self, why: str) -> None:
        """Wait for the requests, then for the offers, within one drain. Longer requests continue on other workers."""
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        await self._finish_requests(why)
        await offers_taken(self._engine, deadline)

    async def _finish_requests(self, why: str) -> None:
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


async def offers_taken(engine: Engine, deadline: float) -> None:
    """A prefill worker that leaves while decode workers still fetch from it would make them compute again."""
    while engine.load().offers and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(OFFERS_POLL_S)  # once in the life of a worker: not worth an event in the seam
