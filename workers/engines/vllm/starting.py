"""vLLM while it starts: minutes, in a thread that cannot be stopped, or longer where it waits for another node."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import psutil

_LOOK_S = 0.5

T = TypeVar("T")


class Starting(Generic[T]):
    """Begins at once. Belongs to one event loop."""

    def __init__(self, open_vllm: Callable[[], T]) -> None:
        """`open_vllm` blocks until vLLM is ready."""
        self._not_vllms = set(psutil.Process().children(recursive=True))
        self._task = asyncio.create_task(asyncio.to_thread(open_vllm), name="start vLLM")

    async def result(self) -> T:
        """What has started. Raises what the start raises; who is cancelled here does not end it."""
        return await asyncio.shield(self._task)

    async def end(self) -> T | None:
        """What has started, if anything, for the caller to close. A start that goes on loses its processes."""
        while not self._task.done():
            await asyncio.to_thread(self._kill)
            await asyncio.wait({self._task}, timeout=_LOOK_S)
        [started] = await asyncio.gather(self._task, return_exceptions=True)
        return None if isinstance(started, BaseException) else started

    def _kill(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if process not in self._not_vllms:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
