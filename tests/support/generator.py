"""A Generator that plays a script: what the mesh would have answered."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

import msgspec

from kvmesh.frontend.generator import DeltaConsumer, Hints, Trace
from kvmesh.frontend.timeline import AnswerRecord
from kvmesh.protocol.errors import MeshError, NoWorkerError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    GenerateRequest,
    Placed,
    decode,
    encode,
    unpack_tokens,
)

MOST_BY_LANE = 100

Step = Delta | BaseException | asyncio.Event | Callable[[Trace], None]
"""A delta is given to the consumer, an error raised, an event waited for, a function told the trace."""


def vector_of(request: EmbedRequest) -> bytes:
    """Two numbers that tell prompts apart: how many tokens, and the last one."""
    tokens = unpack_tokens(request.prompt)
    return array("f", [len(tokens) / 8, tokens[-1] / 8]).tobytes()


def give(consumer: DeltaConsumer, delta: Delta) -> bool:
    """Give a delta as a stream of the request plane does: by the lane where there is one.

    A delta of logprobs alone is the prompt's, as the dispatcher reads it.
    """
    if delta.logprobs and not delta.token_ids:
        consumer.take_prompt_logprobs(delta.logprobs)
        return True
    if (lane := consumer.lane) is None:
        return consumer.take(delta)
    lane.bind(lambda raw, passed: consumer.take(decode(raw, Delta)), MOST_BY_LANE)
    try:
        return lane(msgspec.Raw(encode(delta)))
    finally:
        lane.release()


class ScriptedGenerator:
    """Plays a script and remembers what it was asked: `scripts`, each for one request, then that of `script_of`,
    which is `script`."""

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script = list(script)
        self.scripts: list[Sequence[Step]] = []
        self.script_of: Callable[[GenerateRequest], Sequence[Step]] = lambda request: self.script
        self.embed_requests: list[EmbedRequest] = []
        self.embed_script: list[bytes | BaseException | asyncio.Event] = []  # each for one input, then right vectors
        self.cancelled: list[RequestId] = []
        self.requests: list[GenerateRequest] = []
        self.hints: list[Hints] = []
        self.deadlines: list[float] = []
        self.placed: Placed | None = None  # the answer to a preview
        self.refusal: MeshError | None = None  # of every request, before its prompt is read
        self.previewed: list[tuple[GenerateRequest, Hints]] = []
        self.started = asyncio.Event()  # a first request has come
        self.ended = asyncio.Event()  # a generator has ended, in whatever way
        self.deltas_taken = 0
        self.closed_early = 0  # generators that did not come to their end: cancelled

    def check(self, model: str, hints: Hints, max_tokens: int, deadline: float) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def preview(self, request: GenerateRequest, hints: Hints, deadline: float) -> Placed:
        self.previewed.append((request, hints))
        if self.placed is None:
            raise NoWorkerError("no worker is ready")
        return self.placed

    async def embed(
        self, request: EmbedRequest, hints: Hints, deadline: float, record: AnswerRecord | None = None
    ) -> Embedding:
        self.embed_requests.append(request)
        self.hints.append(hints)
        self.deadlines.append(deadline)
        vector = vector_of(request)
        match self.embed_script.pop(0) if self.embed_script else None:
            case bytes(scripted):
                vector = scripted
            case BaseException() as error:
                raise error
            case asyncio.Event() as event:
                self.started.set()
                try:
                    await event.wait()
                except asyncio.CancelledError:
                    self.cancelled.append(request.request_id)
                    raise
                finally:
                    self.ended.set()
        return Embedding(vector=vector)

    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float, consumer: DeltaConsumer
    ) -> None:
        self.requests.append(request)
        self.hints.append(hints)
        self.deadlines.append(deadline)
        self.started.set()
        self.closed_early += 1
        script = self.scripts.pop(0) if self.scripts else self.script_of(request)
        try:
            for step in script:
                match step:
                    case Delta():
                        while consumer.is_full:
                            await consumer.until_ready()
                        self.deltas_taken += 1
                        give(consumer, step)
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
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.ended.set()
