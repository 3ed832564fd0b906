"""Open the transport of KV events that a setting or an endpoint names."""

from typing import TYPE_CHECKING

from kvmesh.kvevents.nats_access import SCHEMES as NATS_SCHEMES
from kvmesh.kvevents.transport import EventLink, KvSource, Listener, Publisher
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import WorkerId

if TYPE_CHECKING:
    from kvmesh.kvevents.door import EventDoor, KeyPair
    from kvmesh.kvevents.nats import NatsServer
    from kvmesh.kvevents.nats_access import NatsAccess


class Links:
    """Opens links. Links to one NATS server share a connection.

    Under the name `durable` a NATS server remembers which batches were delivered, so that a follower that comes back
    gets the rest. The name belongs to one follower at a time. With "" a follower gets new batches, and replays.
    User and password of `nats_url` are told to that server alone, whatever servers the sources name. With `keys`, only
    publishers that prove to have the key of their source are followed over ZMQ.
    """

    def __init__(self, durable: str = "", nats_url: str = "", keys: "KeyPair | None" = None) -> None:
        """Raises ConfigError for a bad `nats_url`."""
        self._durable = durable
        self._keys = keys
        self._known = read_known(nats_url)
        self._servers: dict[str, NatsServer] = {}

    def open(self, source: KvSource, listener: Listener) -> EventLink:
        """Open a link to `source`. Raises ConfigError for a bad endpoint."""
        if not source.endpoint.startswith(NATS_SCHEMES):
            from kvmesh.kvevents.zmq_link import ZmqLink

            return ZmqLink(source, listener, self._keys)
        from kvmesh.kvevents.nats import NatsLink, NatsServer, check_subject, split_endpoint
        from kvmesh.kvevents.nats_access import NatsAccess

        url, subject = split_endpoint(source.endpoint)
        check_subject(subject, source.worker_id, source.dp_rank)
        known = self._known
        if self._keys is not None and (known is None or known.url != url):
            hint = "in a closed mesh only the server of --nats-url is believed"
            raise ConfigError(f"its KV events are at {url}", hint=hint)
        if url not in self._servers:
            access = known if known is not None and known.url == url else NatsAccess(url)
            self._servers[url] = NatsServer(access, self._durable)
        return NatsLink(self._servers[url], subject, listener)

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""
        while self._servers:
            await self._servers.popitem()[1].close()


def read_known(nats_url: str) -> "NatsAccess | None":
    """Return the server of a setting; None if there is none. Raises ConfigError."""
    if not nats_url:
        return None
    from kvmesh.kvevents.nats_access import read_access

    return read_access(nats_url)


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
    match transport:
        case "zmq":
            from kvmesh.kvevents.publisher import KvEventPublisher

            host = advertise_host or None
            return KvEventPublisher(bind, bind, dp_rank=dp_rank, advertise_host=host, door=door, keys=keys)
        case "nats":
            from kvmesh.kvevents.nats import NatsKvEventPublisher

            return NatsKvEventPublisher(nats_url, worker_id, dp_rank=dp_rank)
    raise ConfigError(f"no KV event transport {transport!r}", hint="set --kv-events-transport to zmq or nats")
