"""A worker that computes nothing and keeps to a `Timing` on a clock of its own: what a profiler should find."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.profiler.grid import WorkerLimits
from kvmesh.profiler.measure import Timeline
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.timing import Timing

TURNS = 20  # of the event loop: all that can be asked for meanwhile has been


@dataclass(slots=True)
class Running:
    prompt: tuple[int, ...]
    max_tokens: int
    sent_s: float
    at_s: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_tokens(self) -> int:
        return len(self.prompt) + len(self.at_s)


class PacedTarget:
    """Prompts first, one each step and rank; then all sequences decode. What was computed once is cached."""

    def __init__(self, timing: Timing, limits: WorkerLimits, *, ranks: int = 1, caches: bool = True) -> None:
        self._timing = timing
        self._limits = limits
        self._ranks = ranks
        self._caches = caches
        self._cached: set[tuple[int, ...]] = set()
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self._stepping: asyncio.Task[None] | None = None
        self.now_s = 100.0
        self.answers = 0
        self.fail_after: int | None = None  # answers
        self.closed = False

    async def limits(self) -> WorkerLimits:
        return self._limits

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> Timeline:
        if self.fail_after is not None and self.answers >= self.fail_after:
            raise EngineError("the worker is gone")
        self.answers += 1
        assert len(prompt) + max_tokens <= self._limits.context_tokens
        sequence = Running(tuple(prompt), max_tokens, self.now_s)
        self._waiting.append(sequence)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps(), name="paced target")
        await sequence.done.wait()
        return Timeline(
            sent_s=sequence.sent_s,
            at_s=sequence.at_s,
            tokens=[float(n + 1) for n in range(len(sequence.at_s))],
            prompt_tokens=len(prompt),
        )

    async def close(self) -> None:
        self.closed = True

    async def _steps(self) -> None:
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self._waiting:
                self._prefill()
            elif self._running:
                self._decode()
            else:
                return

    def _prefill(self) -> None:
        batch, self._waiting = self._waiting[: self._ranks], self._waiting[self._ranks :]
        uncached = [len(s.prompt) for s in batch if not (self._caches and s.prompt in self._cached)]
        self.now_s += self._timing.prefill_s(max(uncached, default=1))
        self._cached.update(s.prompt for s in batch)
        self._running += batch
        self._say(batch)

    def _decode(self) -> None:
        held = sum(sequence.kv_tokens for sequence in self._running)
        assert len(self._running) <= self._limits.max_num_seqs
        assert held <= self._limits.total_kv_tokens
        self.now_s += self._timing.decode_s(len(self._running), held)
        self._say(self._running)

    def _say(self, batch: Sequence[Running]) -> None:
        for sequence in list(batch):
            sequence.at_s.append(self.now_s)
            if len(sequence.at_s) == sequence.max_tokens:
                self._running.remove(sequence)
                sequence.done.set()
