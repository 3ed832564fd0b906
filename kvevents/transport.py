"""The seam between KV events and the transports that carry them: ZMQ sockets and NATS JetStream.

Each transport passes tests/contracts/test_kv_events.py and carries numbered batches in the engines' format.
A transport may lose and repeat batches: the follower handles order, gaps and restarts (kvevents/cursor.py).
`kvevents.connect` opens the transport that a setting or an endpoint names.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvevents.cursor import Position
from protocol.events import KvEvent
from protocol.ids import WorkerId
from protocol.messages import KvDigest


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


TakeBatch = Callable[[int, bytes], bool]  # a batch; False: enough


class EventLink(Protocol):
    """Brings one source's events to its listener, from its making on."""

    can_replay: bool
    numbers_restart: bool  # see kvevents.cursor.Cursor

    async def replay(self, start: int, take: TakeBatch, silence_s: float) -> None:
        """Give `take` all batches kept from `start` on, in order, until there are no more or it has enough.

        Raises TimeoutError after `silence_s` without a batch, or PeerLostError.
        """

    def close(self) -> None:
        """The listener hears nothing more. A second call does nothing."""
