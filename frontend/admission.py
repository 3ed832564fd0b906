"""How many requests are in progress, and whether more may begin."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from frontend.metrics import INFLIGHT
from protocol.errors import DeadlineExceededError, DrainingError, MeshError, OverloadedError


class Admission:
    """Counts requests in progress. `drain` lets those finish and refuses new ones; `cut_off` ends them."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        self.draining = False
        self.timeouts: set[asyncio.Timeout] = set()  # of the requests in progress
        self._is_cut_off = False

    def enter(self) -> "_Place":
        """Hold a place for one request. Raises DrainingError, OverloadedError."""
        if self.draining:
            raise DrainingError("this frontend is shutting down", hint="try again")
        if self.inflight >= self._max_inflight:
            raise OverloadedError(f"{self.inflight} requests are in progress here", hint="try again later")
        return _Place(self.count)

    def until(self, deadline: float) -> "_Until":
        """Raises DeadlineExceededError when the event loop's clock reaches `deadline`, DrainingError on `cut_off`."""
        return _Until(self, deadline)

    def too_late(self) -> MeshError:
        """Why a request that ran out of time was ended."""
        if self._is_cut_off:
            return DrainingError("this frontend has stopped", hint="try again")
        return DeadlineExceededError("the request took longer than its timeout")

    def drain(self) -> None:
        self.draining = True

    def cut_off(self) -> None:
        """End what is in progress: it has had its time."""
        self._is_cut_off = True
        for timeout in self.timeouts:
            with suppress(RuntimeError):  # it expires at this very moment
                timeout.reschedule(asyncio.get_running_loop().time())

    async def wait_idle(self) -> None:
        """Return once no request is in progress."""
        await self._idle.wait()

    def count(self, change: int) -> None:
        self.inflight += change
        INFLIGHT.inc(change)
        if self.inflight:
            self._idle.clear()
        else:
            self._idle.set()


class _Place:
    """The block for which a request is in progress. Like `_Until`, not a generator's: two for each request add up."""

    __slots__ = ("_count",)

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._count(+1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)


class _Until:
    __slots__ = ("_admission", "_timeout")

    def __init__(self, admission: Admission, deadline: float) -> None:
        self._admission = admission
        self._timeout = asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._admission.timeouts.add(self._timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._admission.timeouts.discard(self._timeout)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._admission.too_late() from error
