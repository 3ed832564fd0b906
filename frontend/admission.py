"""How many requests are in progress, and whether more may begin."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from frontend.metrics import INFLIGHT
from protocol.errors import DeadlineExceededError, DrainingError, OverloadedError


class Admission:
    """Counts requests in progress. `drain` lets those finish and refuses new ones; `cut_off` ends them."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        self.draining = False
        self._timeouts: set[asyncio.Timeout] = set()  # of the requests in progress
        self._is_cut_off = False

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

    @asynccontextmanager
    async def until(self, deadline: float) -> AsyncIterator[None]:
        """Raises DeadlineExceededError when the event loop's clock reaches `deadline`, DrainingError on `cut_off`."""
        timeout = asyncio.timeout_at(deadline)
        try:
            async with timeout:
                self._timeouts.add(timeout)
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            if self._is_cut_off:
                raise DrainingError("this frontend has stopped", hint="try again") from error
            raise DeadlineExceededError("the request took longer than its timeout") from error
        finally:
            self._timeouts.discard(timeout)

    def drain(self) -> None:
        self.draining = True

    def cut_off(self) -> None:
        """End what is in progress: it has had its time."""
        self._is_cut_off = True
        for timeout in self._timeouts:
            with suppress(RuntimeError):  # it expires at this very moment
                timeout.reschedule(asyncio.get_running_loop().time())

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
