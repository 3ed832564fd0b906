"""Follow the KV events of the vLLM in this worker, and tell the mesh which blocks each of its ranks caches."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvmesh.kvevents.subscriber import KvEventSubscriber
from kvmesh.kvevents.transport import KvSource
from kvmesh.protocol.events import Digest
from kvmesh.protocol.ids import WorkerId
from kvmesh.workers.engines.external.cache import RankCache

log = logging.getLogger(__name__)


class EventFeed:
    """Feeds the caches of all ranks until it is closed. Implements kvmesh.kvevents.subscriber.Sink.

    Batches that were lost come by replay. Where the replay no longer reaches back, what the engine holds cannot be
    known: then nothing is announced, and `empty_caches` makes that true.
    """

    def __init__(self, caches: Sequence[RankCache], empty_caches: Callable[[], Awaitable[bool]]) -> None:
        self._caches = caches
        self._empty_caches = empty_caches
        self._subscriber = KvEventSubscriber(self)
        self._emptying: set[asyncio.Task[None]] = set()

    def follow(self, worker_id: WorkerId, endpoints: Sequence[tuple[str, str]]) -> None:
        """Follow all ranks. `endpoints`: for each rank, where it publishes its events and where it replays them."""
        for rank, (live, replay) in enumerate(endpoints):
            self._subscriber.add(KvSource(worker_id, live, replay, dp_rank=rank))

    async def close(self) -> None:
        """A second call does nothing."""
        await self._subscriber.close()
        for task in self._emptying:
            task.cancel()
        await asyncio.gather(*self._emptying, return_exceptions=True)

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        self._caches[dp_rank].on_batch(worker_id, payload)

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self._caches[dp_rank].on_reset(worker_id, payloads)
        if not payloads:
            task = asyncio.create_task(self._empty(), name="empty a cache whose content is not known")
            self._emptying.add(task)
            task.add_done_callback(self._emptying.discard)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        return None

    async def _empty(self) -> None:
        try:
            emptied = await self._empty_caches()
        except Exception:
            log.exception("vLLM's cache could not be emptied")
            return
        log.warning(
            "KV events were lost; vLLM's cache %s",
            "was emptied" if emptied else "is in use: what it holds is not announced until it is stored again",
        )
