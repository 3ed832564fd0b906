"""Start vLLM, and end a start that takes too long: it takes minutes, or longer if it waits for another node."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import psutil

from kvmesh.workers.engines.external.launch import Launch

_LOOK_S = 0.5

T = TypeVar("T")


class Starting(Generic[T]):
    """Begins at once. Belongs to one event loop."""

    def __init__(self, open_vllm: Callable[[], T]) -> None:
        """Call `open_vllm` on a thread; it blocks until vLLM is ready."""
        self._not_vllms = set(psutil.Process().children(recursive=True))
        self._launch = Launch("vLLM", open_vllm)

    async def result(self) -> T:
        """Return what has started. Raise what the start raises. Cancelling the caller does not end the start."""
        return await self._launch.result()

    async def end(self) -> T | None:
        """Return what has started, if anything, for the caller to close. Kill the processes of a start that has not
        ended.
        """
        is_over = await self._launch.has_ended(0)
        while not is_over:
            await asyncio.to_thread(self._kill)
            is_over = await self._launch.has_ended(_LOOK_S)
        return await self._launch.ended()

    def _kill(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if process not in self._not_vllms:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
