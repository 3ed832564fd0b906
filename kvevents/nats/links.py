"""Open links to NATS servers. Links to one server share a connection."""

from typing import TYPE_CHECKING

from kvmesh.kvevents.nats.access import NatsAccess, read_access
from kvmesh.kvevents.transport import EventLink, KvSource, Listener
from kvmesh.protocol.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.kvevents.nats.transport import NatsServer


class NatsLinks:
    """Implements kvmesh.kvevents.transport.ServerLinks."""

    def __init__(self, durable: str, url: str, is_closed: bool) -> None:
        """Raises ConfigError for a bad `url`."""
        self._durable = durable
        self._known = read_access(url) if url else None
        self._is_closed = is_closed
        self._servers: dict[str, NatsServer] = {}

    def open(self, source: KvSource, listener: Listener) -> EventLink:
        """Open a link to `source`. Raises ConfigError for a bad endpoint."""
        from kvmesh.kvevents.nats.transport import NatsLink, NatsServer, check_subject, split_endpoint

        url, subject = split_endpoint(source.endpoint)
        check_subject(subject, source.worker_id, source.dp_rank)
        known = self._known
        if self._is_closed and (known is None or known.url != url):
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
