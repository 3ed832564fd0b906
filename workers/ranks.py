"""Data-parallel ranks: copies of one engine behind one worker, each with its own scheduler, cache and offers.

Implements kvmesh.workers.engine.Engine and Ranked. A request says which rank it is for; the router has chosen it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Delta, Embedding, EmbedRequest, GenerateRequest, OfferedPrefix, OfferPrefix
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.engine import AskPrefix, Engine, EngineInfo, EngineLoad, PeerAnswers
from kvmesh.workers.loaded_content import NOT_YET, KvContent
from kvmesh.workers.sleeping import SleepableEngine
from kvmesh.workers.tiers import TierReport


class RankedEngine:
    def __init__(self, ranks: Sequence[SleepableEngine]) -> None:
        """Take at least one rank."""
        self._ranks = list(ranks)

    @property
    def peer_answers(self) -> PeerAnswers | None:
        return self._ranks[0].peer_answers

    @peer_answers.setter
    def peer_answers(self, peer_answers: PeerAnswers | None) -> None:
        for one in self._ranks:
            one.peer_answers = peer_answers

    @property
    def ask_prefix(self) -> AskPrefix | None:
        return self._ranks[0].ask_prefix

    @ask_prefix.setter
    def ask_prefix(self, ask_prefix: AskPrefix | None) -> None:
        for one in self._ranks:
            one.ask_prefix = ask_prefix

    def offer_prefix(self, asked: OfferPrefix) -> OfferedPrefix:
        return self._rank(asked.dp_rank).offer_prefix(asked)

    @property
    def tier_report(self) -> Callable[[], TierReport]:
        """Return how the tiers of the first rank are: those of the others are alike."""
        return self._ranks[0].tier_report

    def kv_content(self) -> KvContent:
        """Return the content of all ranks, once it is known of all and the same."""
        first, *others = [one.kv_content() for one in self._ranks]
        return first if all(other == first for other in others) else NOT_YET

    @property
    def ranks(self) -> Sequence[Engine]:
        return self._ranks

    async def start(self, worker_id: WorkerId, address: str) -> EngineInfo:
        """Offers carry the name of their rank: what a peer remembers of one is not mistaken for another's."""
        names = [WorkerId(f"{worker_id}/{rank}") for rank in range(len(self._ranks))]
        starting = (one.start(name, address) for one, name in zip(self._ranks, names, strict=True))
        infos = await asyncio.gather(*starting)
        return replace(infos[0], dp_size=len(self._ranks))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        return self._rank(request.dp_rank).generate(request)

    def push(self, request: GenerateRequest, take: Callable[[Delta], bool]) -> AsyncGenerator[Delta, None]:
        return self._rank(request.dp_rank).push(request, take)

    async def embed(self, request: EmbedRequest) -> Embedding:
        return await self._rank(request.dp_rank).embed(request)

    def release(self, offer_id: int, nonce: int) -> None:
        """Ranks number their offers alike; the nonce is that of one."""
        for one in self._ranks:
            one.release(offer_id, nonce)

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], object]) -> None:
        """Call `listener` for the first rank. `ranks` has the others."""
        self._ranks[0].on_kv_events(listener)

    def kv_snapshot(self) -> list[KvEvent]:
        return self._ranks[0].kv_snapshot()

    def kv_digest(self) -> Digest:
        return self._ranks[0].kv_digest()

    def load(self) -> EngineLoad:
        """Return the load of all ranks together."""
        loads = [one.load() for one in self._ranks]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            used_blocks=sum(load.used_blocks for load in loads),
            cached_blocks=sum(load.cached_blocks for load in loads),
            total_blocks=sum(load.total_blocks for load in loads),
            offers=sum(load.offers for load in loads),
            queued_tokens=sum(load.queued_tokens or 0 for load in loads),
            stalled_s=max(load.stalled_s for load in loads),
            tiers=tuple(tier for load in loads for tier in load.tiers),
        )

    async def reset_cache(self, tiers: Collection[Tier] | None = None) -> None:
        """Forget the caches of all ranks, or of none."""
        if (tiers is None or Tier.DEVICE in tiers) and self.load().used_blocks:
            raise InvalidRequestError("blocks of the cache are in use", hint="drain the worker, or try again")
        await asyncio.gather(*(one.reset_cache(tiers) for one in self._ranks))

    async def sleep(self) -> None:
        await asyncio.gather(*(one.sleep() for one in self._ranks))

    async def wake(self) -> None:
        await asyncio.gather(*(one.wake() for one in self._ranks))

    def check_health(self) -> None:
        for one in self._ranks:
            one.check_health()

    def rename(self, worker_id: WorkerId) -> None:
        for number, one in enumerate(self._ranks):
            one.rename(WorkerId(f"{worker_id}/{number}"))

    async def stop(self) -> None:
        await asyncio.gather(*(one.stop() for one in self._ranks))

    def _rank(self, number: int) -> SleepableEngine:
        if not 0 <= number < len(self._ranks):
            raise InvalidRequestError(f"there is no rank {number} here", hint=f"there are {len(self._ranks)}, from 0")
        return self._ranks[number]
