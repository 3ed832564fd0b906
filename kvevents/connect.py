"""Open the transport of KV events that a setting or an endpoint names."""

from typing import TYPE_CHECKING

from kvevents.transport import EventLink, KvSource, Listener, Publisher
from protocol.errors import ConfigError
from protocol.ids import WorkerId

if TYPE_CHECKING:
    from kvevents.nats import NatsServer


class Links:
    """Opens links. Links to one NATS server share a connection.

    Under the name `durable` a NATS server remembers which batches were delivered, so that a follower that comes back
    gets the rest. The name belongs to one follower at a time. With "" a follower gets new batches, and replays.
    """

    def __init__(self, durable: str = "") -> None:
        self._durable = durable
        self._servers: dict[str, NatsServer] = {}

    def open(self, source: KvSource, listener: Listener) -> EventLink:
        """Open a link to `source`. Raises ConfigError for a bad endpoint."""
        if not source.endpoint.startswith("nats://"):
            from kvevents.zmq_link import ZmqLink

            return ZmqLink(source, listener)
        from kvevents.nats import NatsLink, NatsServer, split_endpoint

        url, subject = split_endpoint(source.endpoint)
        if url not in self._servers:
            self._servers[url] = NatsServer(url, self._durable)
        return NatsLink(self._servers[url], subject, listener)

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""
        while self._servers:
            await self._servers.popitem()[1].close()


def open_publisher(
    transport: str, worker_id: WorkerId, *, bind: str, advertise_host: str = "", nats_url: str, dp_rank: int = 0
) -> Publisher:
    """Open a publisher. ZMQ listens on `bind`, `tcp://host:port`. Raises ConfigError if that fails."""
    match transport:
        case "zmq":
            from kvevents.publisher import KvEventPublisher

            return KvEventPublisher(bind, bind, dp_rank=dp_rank, advertise_host=advertise_host or None)
        case "nats":
            from kvevents.nats import NatsKvEventPublisher

            return NatsKvEventPublisher(nats_url, worker_id, dp_rank=dp_rank)
    raise ConfigError(f"no KV event transport {transport!r}", hint="set --kv-events-transport to zmq or nats")
