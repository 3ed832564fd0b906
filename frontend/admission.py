"""How many requests are in progress, and whether more may begin."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from frontend.metrics import INFLIGHT
from protocol.errors import DrainingError, OverloadedError


class Admission:
    """Counts requests in progress. `drain` lets those finish and refuses new ones."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        self.draining = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place for one request. Raises DrainingError, OverloadedError."""
        if self.draining:
            raise DrainingError("this frontend is shutting down", hint="try again")
        if self.inflight >= self._max_inflight:
            raise OverloadedError(f"{self.inflight} requests are in progress here", hint="try again later")
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)

    def drain(self) -> None:
        self.draining = True

    async def wait_idle(self) -> None:
        """Return once no request is in progress."""
        await self._idle.wait()

    def _count(self, change: int) -> None:
        self.inflight += change
        INFLIGHT.inc(change)
        if self.inflight:
            self._idle.clear()
        else:
            self._idle.set()
