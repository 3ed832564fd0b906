"""Launch an engine on a thread: that takes minutes, and the thread cannot be stopped."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Launch(Generic[T]):
    """Begins at once. Belongs to one event loop."""

    def __init__(self, engine: str, start: Callable[[], T]) -> None:
        """Call `start` on a thread; it blocks until the engine is ready. `engine`: its name, for logs."""
        self._task = asyncio.create_task(asyncio.to_thread(start), name=f"launch {engine}")

    async def result(self) -> T:
        """Return what was launched. Raise what `start` raises. Cancelling the caller does not end the launch."""
        return await asyncio.shield(self._task)

    async def has_ended(self, timeout_s: float) -> bool:
        """Wait for the launch to end, at most `timeout_s`."""
        await asyncio.wait({self._task}, timeout=timeout_s)
        return self._task.done()

    async def ended(self) -> T | None:
        """Wait for the launch to end and return what was launched, for the caller to close. None if it failed."""
        [launched] = await asyncio.gather(self._task, return_exceptions=True)
        return None if isinstance(launched, BaseException) else launched
