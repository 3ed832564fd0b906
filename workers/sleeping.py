"""Put a step engine to sleep, and wake it: asleep, neither its weights nor its KV cache take memory.

To sleep is to stop the engine, and to wake is to start another one in its place. So nothing that ran before can reach
memory that was given back, on any device and with any KV transfer. With a memory service the weights are mapped again
at the same address; without one they are loaded again.
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from kvmesh.mesh.lifecycle import settle
from kvmesh.protocol.errors import DrainingError
from kvmesh.protocol.events import Cleared, Digest, KvEvent
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    GenerateRequest,
    OfferedPrefix,
    OfferPrefix,
    WorkerTimes,
)
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.engine import AskPrefix, EngineInfo, EngineLoad, EngineReport, PeerAnswers
from kvmesh.workers.loaded_content import NOT_YET, KvContent
from kvmesh.workers.step_engine import StepEngine
from kvmesh.workers.tiers import TierReport

log = logging.getLogger(__name__)


class SleepableEngine:
    """Implements kvmesh.workers.engine.Engine over a step engine, of which there is none while it sleeps."""

    def __init__(self, open_engine: Callable[[], StepEngine]) -> None:
        self._open = open_engine
        self._engine: StepEngine | None = open_engine()
        self._peer_answers: PeerAnswers | None = None
        self._ask_prefix: AskPrefix | None = None
        self._worker_id = WorkerId("")
        self._address = ""
        self._info: EngineInfo | None = None
        self._wakes = 0
        self._listeners: list[Callable[[Sequence[KvEvent]], object]] = []
        self._load_listeners: list[Callable[[], object]] = []
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    @property
    def awake(self) -> StepEngine:
        """Return the engine. Raise DrainingError while there is none: requests go elsewhere."""
        if self._engine is None:
            raise DrainingError("this worker is asleep", hint="wake it")
        return self._engine

    async def sleep(self) -> None:
        """Stop the engine and give its memory back. A second call does nothing.

        The worker has no requests any more, and its offers have been fetched. The change goes on if the caller leaves.
        """
        await self._alone(self._sleep())

    async def wake(self) -> None:
        """Start an engine, under an id that no ticket names yet. Raise what a start raises: then it sleeps on."""
        await self._alone(self._wake())

    async def _alone(self, change: Coroutine[Any, Any, None]) -> None:
        async def do() -> None:
            try:
                async with self._changing:
                    await change
            finally:
                change.close()  # if it never began

        task = asyncio.create_task(do(), name="engine sleeps or wakes")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _sleep(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for listener in self._listeners:
            listener([Cleared()])
        await engine.stop()
        del engine
        gc.unfreeze()  # what a started worker holds was exempted from the search for cycles
        gc.collect()  # cycles hold the KV cache
        log.info("asleep: weights and KV cache take no memory")

    async def _wake(self) -> None:
        if self._engine is not None:
            return
        began_s = time.monotonic()
        engine = self._open()
        engine.peer_answers, engine.ask_prefix = self._peer_answers, self._ask_prefix
        self._wakes += 1
        try:
            await engine.start(WorkerId(f"{self._worker_id}~{self._wakes}"), self._address)
        except BaseException:
            await engine.stop()
            raise
        for on_change in self._load_listeners:
            engine.on_load_change(on_change)
        self._engine = engine
        for listener in self._listeners:
            engine.on_kv_events(listener)
        settle()
        log.info("awake after %.3f s", time.monotonic() - began_s)

    # --- as any engine ------------------------------------------------------------------------------------

    @property
    def peer_answers(self) -> PeerAnswers | None:
        return self._peer_answers

    @peer_answers.setter
    def peer_answers(self, peer_answers: PeerAnswers | None) -> None:
        self._peer_answers = peer_answers
        if self._engine is not None:
            self._engine.peer_answers = peer_answers

    @property
    def ask_prefix(self) -> AskPrefix | None:
        return self._ask_prefix

    @ask_prefix.setter
    def ask_prefix(self, ask_prefix: AskPrefix | None) -> None:
        self._ask_prefix = ask_prefix
        if self._engine is not None:
            self._engine.ask_prefix = ask_prefix

    def offer_prefix(self, asked: OfferPrefix) -> OfferedPrefix:
        return self.awake.offer_prefix(asked)

    @property
    def tier_report(self) -> Callable[[], TierReport]:
        return TierReport if self._engine is None else self._engine.tier_report

    def kv_content(self) -> KvContent:
        """Return the content of the KV. Asleep it is not known: files may change until the engine wakes."""
        return NOT_YET if self._engine is None else self._engine.kv_content()

    def times(self, request_id: RequestId) -> WorkerTimes | None:
        return None if self._engine is None else self._engine.times(request_id)

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        self._worker_id, self._address = worker_id, address
        self._info = await self.awake.start(worker_id, address)
        return self._info

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        return self.awake.generate(request)

    def push(self, request: GenerateRequest, take: Callable[[Delta], bool]) -> AsyncGenerator[Delta, None]:
        return self.awake.push(request, take)

    async def embed(self, request: EmbedRequest) -> Embedding:
        return await self.awake.embed(request)

    def release(self, offer_id: int, nonce: int) -> None:
        """Unpin the blocks of an offer; those of an engine that sleeps are gone."""
        if self._engine is not None:
            self._engine.release(offer_id, nonce)

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        self._listeners.append(listener)
        if self._engine is not None:
            self._engine.on_kv_events(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return [] if self._engine is None else self._engine.kv_snapshot()

    def kv_digest(self) -> Digest:
        return Digest(0, 0) if self._engine is None else self._engine.kv_digest()

    def rename(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id
        self.awake.rename(worker_id)

    async def reset_cache(self, tiers: Collection[Tier] | None = None) -> None:
        await self.awake.reset_cache(tiers)

    def load(self) -> EngineLoad:
        if self._engine is not None:
            return self._engine.load()
        return EngineLoad(0, 0, 0, 0, 0 if self._info is None else self._info.total_blocks, 0)

    def on_load_change(self, listener: Callable[[], object]) -> None:
        self._load_listeners.append(listener)
        if self._engine is not None:
            self._engine.on_load_change(listener)

    def report(self) -> EngineReport:
        return EngineReport() if self._engine is None else self._engine.report()

    def check_health(self) -> None:
        """Raise EngineError if the engine can serve no more. One that sleeps is well."""
        if self._engine is not None:
            self._engine.check_health()

    async def stop(self) -> None:
        """Give up a change that is under way, and end. A second call does nothing."""
        for task in list(self._changes):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # whoever asked for the change is told
                await task
        if self._engine is not None:
            await self._engine.stop()
