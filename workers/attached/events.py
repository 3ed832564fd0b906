"""Follow a server's KV events into a mirror of its cache, and tell the mesh what changed there."""

from collections.abc import Callable, Sequence

from kvcache.mirror import CacheMirror
from kvevents.formats import decode_payload
from kvevents.subscriber import KvEventSubscriber
from kvevents.transport import KvSource
from protocol.events import Digest, KvEvent
from protocol.ids import WorkerId
from workers.attached.probe import EventSource

Listener = Callable[[Sequence[KvEvent]], object]


class Follower:
    """Implements kvevents.subscriber.Sink for one server. Belongs to the event loop it was made on."""

    def __init__(self, worker_id: WorkerId, source: EventSource, block_size: int) -> None:
        """Raises ConfigError for an endpoint that is none."""
        self.mirror = CacheMirror(block_size)
        self.listeners: list[Listener] = []
        self._worker_id = worker_id
        self._subscriber = KvEventSubscriber(self)
        self._subscriber.add(KvSource(worker_id, source.endpoint, source.replay_endpoint, topic=source.topic))

    @property
    def is_live(self) -> bool:
        """All that the server is known to have published was applied."""
        return self._subscriber.is_live(self._worker_id)

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        self._tell(self.mirror.apply(decode_payload(payload).events))

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self._tell(self.mirror.clear())
        for payload in payloads:
            self.on_batch(worker_id, dp_rank, payload)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        """None: a server tells no digest to compare with."""
        return None

    async def close(self) -> None:
        """A second call does nothing."""
        await self._subscriber.close()

    def _tell(self, events: Sequence[KvEvent]) -> None:
        if events:
            for listener in self.listeners:
                listener(events)
