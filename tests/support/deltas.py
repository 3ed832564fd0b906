"""An answer pulled delta by delta, for tests that decide when the next one may come."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from kvmesh.frontend.generator import Generator, Hints, Trace
from kvmesh.protocol.messages import Delta, GenerateRequest, TokenLogprob


class OneByOne:
    """A consumer that is full until its delta was fetched."""

    is_done = False
    lane = None

    def __init__(self) -> None:
        self._delta: Delta | None = None
        self._changed = asyncio.Event()

    def take(self, delta: Delta) -> bool:
        assert not self.is_full, "nothing may be given to a full consumer"
        self._delta = delta
        self._changed.set()
        return False

    def take_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        raise AssertionError("nobody has asked for logprobs of the prompt")

    @property
    def is_full(self) -> bool:
        return self._delta is not None

    async def until_ready(self) -> None:
        while self.is_full:
            self._changed.clear()
            await self._changed.wait()

    async def fetch(self) -> Delta:
        while (delta := self._delta) is None:
            self._changed.clear()
            await self._changed.wait()
        self._delta = None
        self._changed.set()
        return delta


async def deltas_of(
    generator: Generator, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float
) -> AsyncIterator[Delta]:
    """Closing the iterator cancels the request."""
    consumer = OneByOne()
    running = asyncio.create_task(generator.generate(request, hints, trace, deadline, consumer))
    fetching: asyncio.Task[Delta] | None = None
    try:
        while True:
            fetching = asyncio.create_task(consumer.fetch())
            await asyncio.wait([fetching, running], return_when=asyncio.FIRST_COMPLETED)
            if not (fetching.done() or consumer.is_full):
                await running
                return
            yield await fetching
    finally:
        for task in (fetching, running):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
