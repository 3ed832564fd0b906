"""Follow a server's KV events into a mirror of its cache."""

from kvmesh.kvevents.subscriber import KvEventSubscriber
from kvmesh.kvevents.transport import KvSource
from kvmesh.protocol.ids import WorkerId
from kvmesh.workers.engines.attached.server import EventSource
from kvmesh.workers.engines.external.cache import EngineCache


class Follower:
    """Follows one server. Belongs to the event loop it was made on."""

    def __init__(self, worker_id: WorkerId, source: EventSource, cache: EngineCache) -> None:
        """Raise ConfigError for an endpoint that is none."""
        self._worker_id = worker_id
        self._subscriber = KvEventSubscriber(cache)
        self._subscriber.add(KvSource(worker_id, source.endpoint, source.replay_endpoint, topic=source.topic))

    @property
    def is_live(self) -> bool:
        """True once all that the server is known to have published was applied."""
        return self._subscriber.is_live(self._worker_id)

    async def close(self) -> None:
        """A second call does nothing."""
        await self._subscriber.close()
