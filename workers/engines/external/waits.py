"""Wait for an engine's next output, in a way that can be ended: an engine that is gone would let us wait for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from kvmesh.protocol.errors import EngineError

T = TypeVar("T")
R = TypeVar("R")


class Waits:
    """The waits for one engine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()
        self._error: EngineError | None = None

    async def next(self, stream: AsyncIterator[T]) -> T | None:
        """Return the next item, None after the last. Raise what `fail` was given, and what the stream raises."""
        return await self.result(lambda: anext(stream, None))

    async def result(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Return what `ask` gives. Raise what `fail` was given, and what `ask` raises."""
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    return await ask()
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self._error is None or not wait.expired():
                raise
            raise self._error from None

    def fail(self, error: EngineError) -> None:
        """End all waits, and those that begin later. The first error is the one that is raised."""
        self._error = self._error or error
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
        self._waits.clear()
