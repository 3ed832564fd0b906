"""The seam between KV events and what carries them: ZMQ sockets or NATS JetStream.

Both pass tests/contracts/test_kv_events.py. What is carried is the same: numbered batches in the engines' format.
Order, gaps and restarts are the follower's own business (kvevents/cursor.py); a transport may lose and repeat.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvevents.cursor import Position
from protocol.errors import ConfigError
from protocol.events import KvEvent
from protocol.ids import WorkerId
from protocol.messages import KvDigest

if TYPE_CHECKING:
    from kvevents.nats import NatsServer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a worker holds after batch `seq`, as payloads of its event format, parents before children."""

    seq: int
    payloads: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where one data-parallel rank of a worker publishes. "" and None: it does not offer that."""

    worker_id: WorkerId
    endpoint: str  # tcp://host:port or ipc://path of a ZMQ publisher; nats://host:port/subject
    replay_endpoint: str = ""  # ZMQ; over NATS the stream replays
    dp_rank: int = 0
    topic: str = ""  # ZMQ: a prefix; "" takes all
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None
    digest: Callable[[], Awaitable[KvDigest]] | None = None
    resume: Position | None = None  # what the sink holds of this source already, see KvEventSubscriber.positions


class Publisher(Protocol):
    """Sends one engine's KV events to all who follow. Belongs to the event loop it was made on."""

    endpoint: str  # for KvSource
    replay_endpoint: str

    @property
    def last_seq(self) -> int:
        """Of the latest batch, -1 before the first: the number that a snapshot taken now stands for."""

    def publish(self, events: Sequence[KvEvent]) -> int:
        """Send `events` as one batch, or several if they are large; the last sequence number. Never blocks."""

    async def close(self) -> None:
        """Send what is on its way, within a second, and free everything. A second call does nothing."""


class Listener(Protocol):
    """What a link tells of its source."""

    def on_live(self, seq: int, payload: bytes) -> None: ...

    def on_unreadable(self, what: str) -> None: ...

    def on_disconnected(self) -> None:
        """What comes next may come from another process."""

    def on_reconnected(self) -> None:
        """What was published meanwhile has not come."""


Take = Callable[[int, bytes], bool]  # a batch; False: enough


class Link(Protocol):
    """Brings one source's events to its listener, from its making on."""

    can_replay: bool
    numbers_restart: bool  # see kvevents.cursor.Cursor

    async def replay(self, start: int, take: Take, silence_s: float) -> None:
        """Give `take` all batches kept from `start` on, in order, until there are no more or it has enough.

        Raises TimeoutError after `silence_s` without a batch, or PeerLostError.
        """

    def close(self) -> None:
        """The listener hears nothing more. A second call does nothing."""


class Links:
    """Opens links; those to one NATS server share a connection.

    `durable`: under this name a NATS server remembers what was delivered, so that a follower that comes back gets
    the rest. It belongs to one follower at a time. "": it gets what is published from now on, and replays.
    """

    def __init__(self, durable: str = "") -> None:
        self._durable = durable
        self._servers: dict[str, NatsServer] = {}

    def open(self, source: KvSource, listener: Listener) -> Link:
        """Raises ConfigError for an endpoint that is none."""
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
    """`bind`: where ZMQ listens, as `tcp://host:port`. Raises ConfigError if it cannot be opened."""
    match transport:
        case "zmq":
            from kvevents.publisher import KvEventPublisher

            return KvEventPublisher(bind, bind, dp_rank=dp_rank, advertise_host=advertise_host or None)
        case "nats":
            from kvevents.nats import NatsKvEventPublisher

            return NatsKvEventPublisher(nats_url, worker_id, dp_rank=dp_rank)
    raise ConfigError(f"no KV event transport {transport!r}", hint="set --kv-events-transport to zmq or nats")
