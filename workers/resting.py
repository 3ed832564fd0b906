"""Take a worker out of service while its process keeps running, and put it back.

The worker stays in discovery with a card that says so: routers and planners leave it out, and operators find it. There
is one change at a time. A change goes on if its caller leaves.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from protocol.errors import InvalidRequestError
from workers.engine import Engine, EngineInfo
from workers.turning import Place, Turning, offers_taken

log = logging.getLogger(__name__)

RestingState = Literal["drained", "asleep"]


class Resting:
    def __init__(
        self,
        engine: Engine,
        place: Place,
        turning: Turning,
        drain_timeout_s: float,
        on_change: Callable[[str], object] = str,
    ) -> None:
        """Call `on_change` with the new state, "" for a worker that serves."""
        self._engine = engine
        self._place = place
        self._turning = turning
        self._drain_timeout_s = drain_timeout_s
        self._on_change = on_change
        self._changing = asyncio.Lock()

    @property
    def state(self) -> str:
        """Return "drained" or "asleep", "" for a worker that serves."""
        return self._place.resting

    async def rest(self, state: RestingState, info: EngineInfo) -> None:
        """Take no more requests and finish those in hand. Raise InvalidRequestError while the role changes."""
        await asyncio.shield(asyncio.create_task(self._rest(state, info), name=f"worker becomes {state}"))

    async def _rest(self, state: RestingState, info: EngineInfo) -> None:
        async with self._changing:
            if (role := self._turning.to) is not None:
                raise InvalidRequestError(
                    f"this worker is becoming a {role.value} worker", hint="ask again when it has"
                )
            self._place.resting = state
            self._on_change(state)
            await self._place.join(info)
            deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
            await self._turning.finish_requests("this worker is drained")
            await offers_taken(self._engine, deadline)
            log.info("takes no requests", extra={"state": state})

    async def resume(self, info: EngineInfo) -> None:
        """Take requests again."""
        await asyncio.shield(asyncio.create_task(self._resume(info), name="worker serves again"))

    async def _resume(self, info: EngineInfo) -> None:
        async with self._changing:
            self._place.resting = ""
            await self._place.join(info)
            self._on_change("")
            log.info("takes requests again")
