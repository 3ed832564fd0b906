"""Measure a worker's engine in this process, without HTTP or mesh."""

import itertools
import time
from collections.abc import Callable, Sequence

from kvmesh.profiler.grid import WorkerLimits
from kvmesh.profiler.measure import Timeline
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import GenerateRequest, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.engine import Engine, EngineInfo

_GREEDY = SamplingParams(temperature=0.0)


class MeasuredEngine:
    """A `MeasuredWorker` that owns its engine. `clock` is any clock in seconds."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._numbers = itertools.count()
        self._info: EngineInfo | None = None
        self.start_s = 0.0  # time that the engine took to load, known after `limits`

    async def limits(self) -> WorkerLimits:
        """Start the engine and return its limits. Raise MeshError if it cannot start."""
        info = await self.info()
        return WorkerLimits(
            context_tokens=info.context_tokens,
            total_kv_tokens=info.total_blocks * info.block_size,
            max_num_seqs=info.max_num_seqs,
        )

    async def info(self) -> EngineInfo:
        if self._info is None:
            ordered_s = self._clock()
            self._info = await self._engine.start(WorkerId("profile"), "")
            self.start_s = self._clock() - ordered_s
        return self._info

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> Timeline:
        request = GenerateRequest(
            request_id=RequestId(f"profile-{next(self._numbers)}"),
            model=(await self.info()).model,
            prompt=pack_tokens(prompt),
            sampling=_GREEDY,
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        at_s: list[float] = []
        tokens: list[float] = []
        sent_s = self._clock()
        async for delta in self._engine.generate(request):
            if delta.token_ids:
                at_s.append(self._clock())
                tokens.append((tokens[-1] if tokens else 0) + len(delta.token_ids))
        if not tokens or tokens[-1] != max_tokens:
            raise EngineError(f"the engine answered {tokens[-1] if tokens else 0} tokens instead of {max_tokens}")
        return Timeline(sent_s=sent_s, at_s=at_s, tokens=tokens, prompt_tokens=len(prompt))

    async def close(self) -> None:
        await self._engine.stop()
