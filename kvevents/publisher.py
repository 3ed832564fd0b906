"""Publish a worker's KV events the way vLLM does: a PUB socket, and a ROUTER that replays what was missed."""

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import zmq

from kvmesh.kvevents.batches import in_parts
from kvmesh.kvevents.door import EventDoor, KeyPair, close_to_strangers
from kvmesh.kvevents.formats import encode_payload
from kvmesh.kvevents.sockets import Frames, LoopSocket, bind_socket, open_socket
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.events import KvEvent


class ReplayRing:
    """The payloads of consecutive numbers. The oldest is dropped first, the newest is always kept."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self.num_bytes = 0
        self.next_seq = 0

    @property
    def first_seq(self) -> int:
        """The number of the oldest batch kept; `next_seq` if there is none."""
        return self.next_seq - len(self._payloads)

    def append(self, payload: bytes) -> int:
        """Keep `payload` under the next number, and return the number."""
        self._payloads.append(payload)
        self.num_bytes += len(payload)
        while len(self._payloads) > 1 and self._is_too_large():
            self.num_bytes -= len(self._payloads.popleft())
        self.next_seq += 1
        return self.next_seq - 1

    def since(self, seq: int, limit: int) -> Iterator[tuple[int, bytes]]:
        """Return at most `limit` kept batches from `seq` on."""
        start = min(max(seq - self.first_seq, 0), len(self._payloads))
        first = self.first_seq + start
        return enumerate(islice(self._payloads, start, start + limit), first)

    def _is_too_large(self) -> bool:
        return len(self._payloads) > self._max_batches or self.num_bytes > self._max_bytes


log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_PURPOSE = "publish KV events"
_SEQ = struct.Struct(">Q")
_REPLAY_SLICE = 32  # batches sent to one client before the loop gets its turn
_MAX_REPLAYS = 256  # at a time; beyond that the oldest is dropped, and its client will ask again
_QUEUED_REPLAYS = 256  # batches that a slow client may leave in our memory
_QUEUED_EVENTS = 4096  # the same for a subscriber, which must ask for batches that did not fit
_REQUEST_BYTES = 1024
_RETRY_S = 0.02  # for a client whose queue is full, if the socket does not wake us before
_PATIENCE_S = 30.0  # with a client whose queue stays full


class KvEventPublisher:
    """Sends batches `[topic, seq u64 BE, payload]` to all subscribers and keeps the latest for replay.

    Implements kvevents.transport.Publisher. Must be made on a running event loop. A port `*` takes a free one, and
    `5700-5799` the first free one of these: see `endpoint`, `replay_endpoint`. `advertise_host` replaces the host in
    both, for subscribers on other hosts. With `door` and `keys`, both sockets take only followers that the door admits.
    """

    problem = ""

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:*",
        replay_bind: str = "tcp://127.0.0.1:*",
        *,
        topic: str = "",
        dp_rank: int = 0,
        ring_batches: int = 10_000,
        ring_bytes: int = 64 << 20,
        advertise_host: str | None = None,
        door: EventDoor | None = None,
        keys: KeyPair | None = None,
    ) -> None:
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._ring = ReplayRing(ring_batches, ring_bytes)
        self._replays: dict[bytes, _Replay] = {}  # by client
        self._next_round: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        open_one = open_socket if door is None else door.open_socket
        self._pub = open_one(zmq.PUB, send=_QUEUED_EVENTS)
        router = open_one(zmq.ROUTER, send=_QUEUED_REPLAYS, max_bytes=_REQUEST_BYTES)
        if keys is not None:
            close_to_strangers(self._pub, keys)
            close_to_strangers(router, keys)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # report a client that is gone or full, do not drop silently
        try:
            self.endpoint = bind_socket(self._pub, bind, advertise_host, to=_PURPOSE)
            self.replay_endpoint = bind_socket(router, replay_bind, advertise_host, to=_PURPOSE)
        except ConfigError:
            self._pub.close()
            router.close()
            raise
        self._router = LoopSocket(router, self._on_request, on_wake=self._send_replays)
        self._pub_fd = int(self._pub.getsockopt(zmq.FD))
        self._loop.add_reader(self._pub_fd, self._free_closed)

    @property
    def last_seq(self) -> int:
        """The number of the latest batch, -1 before the first. A snapshot taken now has this number."""
        return self._ring.next_seq - 1

    def publish(self, events: Sequence[KvEvent]) -> int:
        """Send `events` as one batch, or several if they are large; return the last number. Never blocks.

        A subscriber whose queue is full misses the batch, and finds the gap at the next one.
        """
        for part in in_parts(events):
            payload = encode_payload(part, time.time(), self._dp_rank)
            seq = self._ring.append(payload)
            self._pub.send_multipart((self._topic, _SEQ.pack(seq), payload), zmq.NOBLOCK)
        return self.last_seq

    async def close(self) -> None:
        """A second call does nothing."""
        self._replays.clear()
        self._router.close()
        if not self._pub.closed:
            self._loop.remove_reader(self._pub_fd)
        self._pub.close(linger=200)  # ms, for batches on their way

    def _free_closed(self) -> None:
        """Have ZMQ free closed connections, 27 KB each. By itself it would wait for the next batch."""
        if self._pub.closed:  # by the door, which closes what its owner has left open
            self._loop.remove_reader(self._pub_fd)
        else:
            self._pub.getsockopt(zmq.EVENTS)

    def _on_request(self, frames: Frames) -> None:
        """Take a request `[client, (b"",) start_seq]`. A new request of a client replaces its last."""
        client, start = frames[0], frames[-1]
        if len(frames) not in (2, 3) or len(start) != _SEQ.size:
            log.warning("ignored a malformed replay request of %d frames", len(frames))
            return
        self._replays.pop(client, None)
        self._replays[client] = _Replay(_SEQ.unpack(start)[0], self._loop.time() + _PATIENCE_S)
        if len(self._replays) > _MAX_REPLAYS:
            del self._replays[next(iter(self._replays))]
        self._schedule(self._loop.call_soon(self._send_replays))

    def _send_replays(self) -> None:
        """Send every client its next slice, and plan the next round for the clients that need more."""
        blocked = 0
        for client, replay in list(self._replays.items()):
            match self._send_slice(client, replay):
                case _Sent.ALL:
                    del self._replays[client]
                case _Sent.BLOCKED:
                    blocked += 1
        if len(self._replays) > blocked:
            self._schedule(self._loop.call_soon(self._send_replays))
        elif blocked:
            self._schedule(self._loop.call_later(_RETRY_S, self._send_replays))

    def _schedule(self, handle: asyncio.Handle) -> None:
        """Make `handle` the next round, and cancel the round that was planned."""
        if self._next_round is not None:
            self._next_round.cancel()
        self._next_round = handle

    def _send_slice(self, client: bytes, replay: "_Replay") -> "_Sent":
        now = self._loop.time()
        try:
            for seq, payload in self._ring.since(replay.next_seq, _REPLAY_SLICE):
                if not self._router.send((client, b"", self._topic, _SEQ.pack(seq), payload)):
                    return _Sent.BLOCKED if now < replay.deadline else _Sent.ALL
                replay.next_seq, replay.deadline = seq + 1, now + _PATIENCE_S
            if replay.next_seq < self._ring.next_seq:
                return _Sent.SLICE
            done = self._router.send((client, b"", b"", END_OF_REPLAY, b""))
            return _Sent.ALL if done or now >= replay.deadline else _Sent.BLOCKED
        except zmq.ZMQError as error:
            log.debug("the client of a replay is gone: %s", error)
            return _Sent.ALL


@dataclass(slots=True)
class _Replay:
    next_seq: int
    deadline: float  # loop time; renewed by every batch that the client's queue takes


class _Sent(Enum):
    ALL = "nothing is left to do for this client"
    SLICE = "more is to be sent"
    BLOCKED = "the client's queue is full"
