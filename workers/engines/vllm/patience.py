"""Limit the time that vLLM may take to bring the KV of a prompt: it has no limit of its own for a silent peer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvmesh.workers.engines.vllm.translate import PullFailedError, VllmStep

_LOOK_S = 0.25


class PullClock:
    """Counts the time in which vLLM could pull. It begins once it has a place for the request, and does not say when:
    while requests stand in its queue, this one may be among them."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._left_s = limit_s
        self._looked_s = now_s

    def has_run_out(self, now_s: float, num_queued: int) -> bool:
        if not num_queued:
            self._left_s -= now_s - self._looked_s
        self._looked_s = now_s
        return self._left_s <= 0


async def within(
    limit_s: float, steps: AsyncGenerator[VllmStep, None], num_queued: Callable[[], int]
) -> AsyncGenerator[VllmStep, None]:
    """Yield the steps of a request that pulls; its first step shows that the pull is over. Raises PullFailedError.

    A pull that is given up is aborted: vLLM does not reuse its blocks until NIXL has ended the transfer.
    """
    async with aclosing(steps):
        first = await _first(limit_s, steps, num_queued)
        if first is None:
            return
        yield first
        async for step in steps:
            yield step


async def _first(
    limit_s: float, steps: AsyncGenerator[VllmStep, None], num_queued: Callable[[], int]
) -> VllmStep | None:
    clock = PullClock(limit_s, time.monotonic())
    coming = asyncio.ensure_future(anext(steps, None))
    try:
        while not coming.done():
            await asyncio.wait({coming}, timeout=min(_LOOK_S, limit_s))
            if not coming.done() and clock.has_run_out(time.monotonic(), num_queued()):
                raise PullFailedError(f"vLLM's pull took longer than {limit_s:g} s")
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
