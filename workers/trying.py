"""Ask a quiet engine for one token. Decisions are those of workers/canary.py."""

import asyncio
import logging
import time
from contextlib import aclosing, suppress

from kvmesh.protocol.errors import MeshError, OverloadedError
from kvmesh.protocol.ids import new_request_id
from kvmesh.protocol.messages import EmbedRequest, Feature, GenerateRequest, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.canary import CANARY_PATIENCE_S, CanaryWatch
from kvmesh.workers.engine import Engine, EngineInfo
from kvmesh.workers.metrics import CANARIES

log = logging.getLogger(__name__)

CANARY_TOKEN = 1  # of every vocabulary


class EngineCanary:
    """Owns the request to the engine, of which there is one at most."""

    def __init__(self, engine: Engine, interval_s: float, patience_s: float = CANARY_PATIENCE_S) -> None:
        self._engine = engine
        self._watch = CanaryWatch(interval_s, patience_s, time.monotonic())
        self._asking: asyncio.Task[None] | None = None

    def quiet_s(self) -> float:
        return self._watch.quiet_s(time.monotonic())

    def look(self, requests: int, now_s: float, info: EngineInfo | None) -> str:
        """Return what hangs, "" for nothing. Call this about once a second; a request in hand is a sign of life."""
        if info is None or requests:
            self._watch.note(now_s)
        elif self._watch.is_due(requests, now_s):
            self._asking = asyncio.create_task(self._ask(info), name="ask the engine for one token")
        return self._watch.hangs(now_s)

    async def _ask(self, info: EngineInfo) -> None:
        """Count how it ended. An error is an answer too: whether the engine can go on is for its own check to say."""
        outcome = "ok"
        try:
            await ask_for_a_token(self._engine, info)
        except OverloadedError as error:
            outcome = error.code
        except MeshError as error:
            outcome = error.code
            log.warning("the engine refuses a request for one token: %s", error)
        CANARIES.labels(outcome).inc()
        self._watch.note(time.monotonic())

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError):
                await self._asking


async def ask_for_a_token(engine: Engine, info: EngineInfo) -> None:
    """Have the engine compute the least that it can. Raise MeshError."""
    request_id, prompt = new_request_id("canary"), pack_tokens([CANARY_TOKEN])
    if Feature.COMPLETIONS not in info.features and Feature.EMBEDDINGS in info.features:
        await engine.embed(EmbedRequest(request_id=request_id, model=info.model, prompt=prompt))
        return
    request = GenerateRequest(
        request_id=request_id,
        model=info.model,
        prompt=prompt,
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=1, ignore_eos=True),
    )
    async with aclosing(engine.generate(request)) as deltas:
        async for _ in deltas:
            pass
