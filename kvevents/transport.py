"""The seam between KV events and the transports that carry them: ZMQ sockets and NATS JetStream.

Each transport passes tests/contracts/test_kv_events.py and carries numbered batches in the engines' format.
A transport may lose and repeat batches: the follower handles order, gaps and restarts (kvevents/cursor.py).
`kvmesh.kvevents.connect` opens the transport that a setting or an endpoint names.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.kvevents.cursor import Position
from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import KvDigest


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's content after batch `seq`, as payloads of its event format, parents before children."""

    seq: int
    payloads: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class KvSource:
    """The place where one data-parallel rank of a worker publishes. "" and None: the rank does not offer that."""

    worker_id: WorkerId
    endpoint: str  # tcp://host:port or ipc://path of a ZMQ publisher; nats://host:port/subject
    replay_endpoint: str = ""  # ZMQ; over NATS the stream replays
    dp_rank: int = 0
    topic: str = ""  # ZMQ: a prefix; "" takes all
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None
    digest: Callable[[], Awaitable[KvDigest]] | None = None
    key: str = ""  # ZMQ: the publisher's public key (CURVE, Z85); "": its events are open to everybody
    resume: Position | None = None  # the sink holds the batches before it, see KvEventSubscriber.positions


class Publisher(Protocol):
    """Sends the KV events of one engine to all followers. Belongs to the event loop on which it was made."""

    endpoint: str  # for KvSource
    replay_endpoint: str
    problem: str  # why followers get no events, "" for nothing

    @property
    def last_seq(self) -> int:
        """The number of the latest batch, -1 before the first. A snapshot taken now has this number."""

    def publish(self, events: Sequence[KvEvent]) -> int:
        """Send `events` as one batch, or several if they are large; return the last number. Never blocks."""

    async def close(self) -> None:
        """Send waiting batches, within a second, and free everything. A second call does nothing."""


class Listener(Protocol):
    """The receiver of a link's events."""

    def on_live(self, seq: int, payload: bytes) -> None: ...

    def on_unreadable(self, what: str) -> None: ...

    def on_disconnected(self) -> None:
        """Note that the next batches may come from another process."""

    def on_reconnected(self) -> None:
        """Note that batches published meanwhile have not come."""


TakeBatch = Callable[[int, bytes], bool]  # takes a batch; False: enough


class EventLink(Protocol):
    """Brings the events of one source to its listener, from the moment at which it is made."""

    can_replay: bool
    numbers_restart: bool  # see kvmesh.kvevents.cursor.Cursor

    @property
    def is_up(self) -> bool:
        """Return whether new batches can arrive. False: the transport itself does not work."""

    async def replay(self, start: int, take: TakeBatch, silence_s: float) -> None:
        """Give `take` all kept batches from `start` on, in order, until there are no more or `take` has enough.

        Raises TimeoutError after `silence_s` without a batch, or PeerLostError.
        """

    def close(self) -> None:
        """Close the link; the listener gets no more events. A second call does nothing."""


class ServerLinks(Protocol):
    """Opens the links of a transport that has servers of its own."""

    def open(self, source: KvSource, listener: Listener) -> EventLink:
        """Open a link to `source`. Raises ConfigError for a bad endpoint."""

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class EventTransport:
    """A transport over servers. An extension gives one at the seam `events`."""

    name: str  # the value of --kv-events-transport
    schemes: tuple[str, ...]  # beginnings of endpoints
    usage: str  # of the setting that names the server
    open_links: Callable[[str, str, bool], ServerLinks]
    """Gets what `Links` gets: durable, the setting, whether the mesh is closed. Raises ConfigError."""
    open_publisher: Callable[[str, WorkerId, int], Publisher]  # with the setting, worker and rank
