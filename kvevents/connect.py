"""Open the transport of KV events that a setting or an endpoint names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmesh.kvevents.transport import EventLink, EventTransport, KvSource, Listener, Publisher
from kvmesh.mesh.extensions import load
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import WorkerId

if TYPE_CHECKING:
    from kvmesh.kvevents.door import EventDoor, KeyPair

TRANSPORTS: Sequence[EventTransport] = tuple(load("events"))
"""Those of extensions. ZMQ is always there."""
SERVER_USAGE = " or ".join(transport.usage for transport in TRANSPORTS)


class Links:
    """Opens links. Links to one NATS server share a connection.

    Under the name `durable` a NATS server remembers which batches were delivered, so that a follower that comes back
    gets the rest. The name belongs to one follower at a time. With "" a follower gets new batches, and replays.
    User and password of `nats_url` are told to that server alone, whatever servers the sources name. With `keys`, only
    publishers that prove to have the key of their source are followed over ZMQ.
    """

    def __init__(self, durable: str = "", nats_url: str = "", keys: "KeyPair | None" = None) -> None:
        """Raises ConfigError for a bad `nats_url`."""
        self._keys = keys
        self._over_servers = [
            (transport.schemes, transport.open_links(durable, nats_url, keys is not None)) for transport in TRANSPORTS
        ]

    def open(self, source: KvSource, listener: Listener) -> EventLink:
        """Open a link to `source`. Raises ConfigError for a bad endpoint."""
        for schemes, links in self._over_servers:
            if source.endpoint.startswith(schemes):
                return links.open(source, listener)
        from kvmesh.kvevents.zmq_link import ZmqLink

        return ZmqLink(source, listener, self._keys)

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""
        for _, links in self._over_servers:
            await links.close()


def open_publisher(
    transport: str,
    worker_id: WorkerId,
    *,
    bind: str,
    advertise_host: str = "",
    nats_url: str,
    dp_rank: int = 0,
    door: "EventDoor | None" = None,
    keys: "KeyPair | None" = None,
) -> Publisher:
    """Open a publisher. ZMQ listens on `bind`, see KvEventPublisher. Raises ConfigError if that fails."""
    if transport == "zmq":
        from kvmesh.kvevents.publisher import KvEventPublisher

        host = advertise_host or None
        return KvEventPublisher(bind, bind, dp_rank=dp_rank, advertise_host=host, door=door, keys=keys)
    for other in TRANSPORTS:
        if other.name == transport:
            return other.open_publisher(nats_url, worker_id, dp_rank)
    names = " or ".join(["zmq", *(other.name for other in TRANSPORTS)])
    raise ConfigError(f"no KV event transport {transport!r}", hint=f"set --kv-events-transport to {names}")
