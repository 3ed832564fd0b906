"""A Generator that plays a script: what the mesh would have answered."""

import asyncio
from collections.abc import Callable, Sequence

from frontend.generator import DeltaConsumer, Hints, Trace
from protocol.errors import NoWorkerError
from protocol.messages import Delta, GenerateRequest, Placed

Step = Delta | BaseException | asyncio.Event | Callable[[Trace], None]
"""A delta is given to the consumer, an error raised, an event waited for, a function told the trace."""


class ScriptedGenerator:
    """Plays the same script for every request and remembers what it was asked."""

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script = list(script)
        self.requests: list[GenerateRequest] = []
        self.hints: list[Hints] = []
        self.deadlines: list[float] = []
        self.placed: Placed | None = None  # the answer to a preview
        self.previewed: list[tuple[GenerateRequest, Hints]] = []
        self.started = asyncio.Event()  # a first request has come
        self.ended = asyncio.Event()  # a generator has ended, in whatever way
        self.deltas_taken = 0
        self.closed_early = 0  # generators that did not come to their end: cancelled

    async def preview(self, request: GenerateRequest, hints: Hints, deadline: float) -> Placed:
        self.previewed.append((request, hints))
        if self.placed is None:
            raise NoWorkerError("no worker is ready")
        return self.placed

    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float, consumer: DeltaConsumer
    ) -> None:
        self.requests.append(request)
        self.hints.append(hints)
        self.deadlines.append(deadline)
        self.started.set()
        self.closed_early += 1
        try:
            for step in self.script:
                match step:
                    case Delta():
                        while consumer.is_full:
                            await consumer.until_ready()
                        self.deltas_taken += 1
                        consumer.take(step)
                        if consumer.is_done:
                            self.closed_early -= step.finish_reason is not None
                            return
                        await asyncio.sleep(0)  # a turn of the loop, as a frame from a worker is
                    case BaseException():
                        raise step
                    case asyncio.Event():
                        await step.wait()
                    case _:
                        step(trace)
            self.closed_early -= 1
        finally:
            self.ended.set()
