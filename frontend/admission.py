"""Count the requests in progress, and decide whether more may begin."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from kvmesh.frontend.metrics import INFLIGHT
from kvmesh.mesh.deadlines import Deadlines
from kvmesh.protocol.errors import DeadlineExceededError, DrainingError, MeshError, OverloadedError


class Admission:
    """Counts requests in progress. `drain` lets those finish and refuses new ones; `cut_off` ends them."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        self.draining = False
        self.is_leaving = False  # it will drain soon; until then requests are taken as before
        self.deadlines = Deadlines()
        self._is_cut_off = False

    def enter(self) -> "_AdmittedRequest":
        """Hold a place for one request. Raises DrainingError, OverloadedError."""
        if self.draining:
            raise DrainingError("this frontend is shutting down", hint="try again")
        if self.inflight >= self._max_inflight:
            raise OverloadedError(f"{self.inflight} requests are in progress here", hint="try again later")
        return _AdmittedRequest(self.count)

    def until(self, deadline: float, loop: asyncio.AbstractEventLoop | None = None) -> "_Until":
        """Raises DeadlineExceededError when the event loop's clock reaches `deadline`, DrainingError on `cut_off`.

        `loop`: the running one, where it is at hand: to ask for it is a system call.
        """
        task = asyncio.current_task(loop)
        assert task is not None
        return _Until(self, deadline, task)

    def too_late(self) -> MeshError:
        """Return why a request that ran out of time was ended."""
        if self._is_cut_off:
            return DrainingError("this frontend has stopped", hint="try again")
        return DeadlineExceededError("the request took longer than its timeout")

    def leave(self) -> None:
        """Tell load balancers, by /health, to send requests elsewhere. Those that come all the same are answered."""
        self.is_leaving = True

    def drain(self) -> None:
        self.is_leaving = self.draining = True

    def cut_off(self) -> None:
        """End what is in progress: it has had its time."""
        self._is_cut_off = True
        self.deadlines.expire_all()

    async def wait_idle(self) -> None:
        """Return once no request is in progress."""
        await self._idle.wait()

    def count(self, change: int) -> None:
        if not self.inflight:
            self._idle.clear()
        self.inflight += change
        INFLIGHT.inc(change)
        if not self.inflight:
            self._idle.set()


class _AdmittedRequest:
    """The block for which a request is in progress. Like `_Until`, not a generator's: two for each request add up."""

    __slots__ = ("_count",)

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._count(+1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)


class _Until:
    """The block that is left at the deadline: like asyncio.timeout_at, without a timer of its own."""

    __slots__ = ("_admission", "_cancelling", "_deadline", "_is_over", "_slot", "_task")

    def __init__(self, admission: Admission, deadline: float, task: "asyncio.Task[object]") -> None:
        self._admission = admission
        self._deadline = deadline
        self._task = task
        self._is_over = False

    def __enter__(self) -> None:
        self._cancelling = self._task.cancelling()
        self._slot = self._admission.deadlines.add(self._deadline, self)

    def expire(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._admission.deadlines.discard(self._slot, self)
        if self._is_over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._admission.too_late() from error
