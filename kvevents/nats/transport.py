"""Publish and follow KV events over NATS JetStream: one stream for the mesh, one subject for each publisher's process.

The stream keeps batches for an hour, within a gigabyte, through restarts of the server. A batch is one message: the
payload as over ZMQ, its number in the message id. A follower has one consumer for all subjects, and reads missed
batches from the stream.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy

from kvmesh.kvevents.batches import in_parts
from kvmesh.kvevents.formats import MAX_PAYLOAD_BYTES, encode_payload
from kvmesh.kvevents.nats import jetstream
from kvmesh.kvevents.nats.access import NatsAccess, read_access, token
from kvmesh.kvevents.transport import Listener, TakeBatch
from kvmesh.protocol.errors import ConfigError, PeerLostError
from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import WorkerId

log = logging.getLogger(__name__)

_BATCH_BYTES = 512 << 10  # a NATS server accepts messages of 1 MB
_ACK_S = 2.0
_CLOSE_S = 1.0
_CANCEL_AGAIN_S = 0.5
_MAX_UNACKNOWLEDGED = 1024
_FORGET_DURABLE_S = 3600.0  # a follower that was away for longer starts from new batches
_FORGET_FOLLOWER_S = 30.0


class NatsKvEventPublisher:
    """Implements kvmesh.kvevents.transport.Publisher.

    Batches wait here, in order, until the server has stored them, also while the server is away. When too many wait,
    the oldest are dropped (`lost`), and followers find the gap in the numbers.
    """

    replay_endpoint = ""

    def __init__(
        self,
        url: str,
        worker_id: WorkerId,
        *,
        dp_rank: int = 0,
        max_queued_batches: int = 10_000,
        max_queued_bytes: int = 64 << 20,
    ) -> None:
        """Begin to publish to `url`, see nats.access. The server need not be up yet. Raises ConfigError."""
        self._access = read_access(url)
        self._id = secrets.token_hex(6)  # of this process, whose batches are numbered from 0
        whose = f"{token(self._access.user)}." if self._access.user else ""  # a server lets a user publish under it
        self._subject = f"{jetstream.SUBJECTS}.{whose}{token(worker_id)}.{dp_rank}.{self._id}"
        self.endpoint = f"{self._access.url}/{self._subject}"
        self.lost = 0
        self.problem = f"no NATS server answers at {self._access.url} yet"
        self._dp_rank = dp_rank
        self._max_batches = max_queued_batches
        self._max_bytes = max_queued_bytes
        self._next_seq = 0
        self._queue: deque[_Batch] = deque()
        self._queued_bytes = 0
        self._queued = asyncio.Event()
        self._all_stored = asyncio.Event()
        self._all_stored.set()
        self._task = _begin(self._run(), f"publish kv events of {worker_id}/{dp_rank}")

    @property
    def last_seq(self) -> int:
        return self._next_seq - 1

    def publish(self, events: Sequence[KvEvent]) -> int:
        for part in in_parts(events, _BATCH_BYTES):
            self._put(_Batch(self._next_seq, encode_payload(part, time.time(), self._dp_rank)))
            self._next_seq += 1
        return self.last_seq

    async def close(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._all_stored.wait()
        await _end(self._task)

    def _put(self, batch: "_Batch") -> None:
        self._queue.append(batch)
        self._queued_bytes += len(batch.payload)
        while len(self._queue) > self._max_batches or self._queued_bytes > self._max_bytes:
            self._count_loss("the server has not stored them in time")
            self._drop_first()
        self._queued.set()
        self._all_stored.clear()

    def _drop_first(self) -> None:
        self._queued_bytes -= len(self._queue.popleft().payload)

    def _count_loss(self, reason: str) -> None:
        if not self.lost:
            log.warning("KV events to %s are lost: %s; routers take snapshots instead", self.endpoint, reason)
        self.lost += 1

    async def _run(self) -> None:
        client = Client()
        try:
            stream = await jetstream.connect(client, self._access, self._on_interruption)
            make = partial(jetstream.make_stream, stream)
            await jetstream.until_it_works(make, "no stream for KV events", self._note_problem)
            while True:
                while self._queue:
                    await self._send(stream, self._queue[0])
                self._all_stored.set()
                self._queued.clear()
                await self._queued.wait()
        finally:
            await jetstream.disconnect(client)

    async def _send(self, stream: JetStreamContext, batch: "_Batch") -> None:
        """Send one batch until the server has stored it. One batch at a time keeps their order in the stream."""
        try:
            store = partial(self._store, stream, batch)
            await jetstream.until_it_works(store, f"{self.endpoint} stores no KV events", self._note_problem)
        except nats.errors.MaxPayloadError:
            self._count_loss(f"a batch of {len(batch.payload)} bytes is over the server's max_payload")
        if self._queue and self._queue[0] is batch:  # else it was dropped meanwhile
            self._drop_first()

    def _note_problem(self, problem: str) -> None:
        self.problem = problem

    def _on_interruption(self, is_over: bool) -> None:
        self.problem = "" if is_over else f"the connection to NATS at {self._access.url} is lost"

    async def _store(self, stream: JetStreamContext, batch: "_Batch") -> None:
        headers = {jetstream.NUMBER_HEADER: f"{self._id}-{batch.seq}"}
        try:
            await stream.publish(self._subject, batch.payload, timeout=_ACK_S, headers=headers)
        except nats.js.errors.NoStreamResponseError:  # the server has lost its stream
            await jetstream.make_stream(stream)
            raise


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    seq: int
    payload: bytes


class NatsLink:
    """Implements kvmesh.kvevents.transport.EventLink."""

    can_replay = True
    numbers_restart = False  # a subject belongs to one process

    def __init__(self, server: "NatsServer", subject: str, listener: Listener) -> None:
        self._server = server
        self._subject = subject
        self._listener = listener
        server.listeners[subject] = listener

    @property
    def is_up(self) -> bool:
        return self._server.is_up

    async def replay(self, start: int, take: TakeBatch, silence_s: float) -> None:
        await self._server.replay(self._subject, start, take, silence_s)

    def close(self) -> None:
        if self._server.listeners.get(self._subject) is self._listener:
            del self._server.listeners[self._subject]


class NatsServer:
    """A follower's connection to one server, with a consumer for all subjects, and replays."""

    def __init__(self, access: NatsAccess, durable: str) -> None:
        self.listeners: dict[str, Listener] = {}  # by subject
        self._access = access
        self._url = access.url
        self._durable = token(durable)
        self._client = Client()
        self._stream = self._client.jetstream()
        self._is_ready = asyncio.Event()  # the stream and a consumer exist
        self._pull: jetstream.PullSubscription | None = None
        self._unacknowledged: Msg | None = None  # the last message; its acknowledgement covers all before it
        self._task = _begin(self._run(), f"follow kv events of {access.url}")

    @property
    def is_up(self) -> bool:
        """Return whether the server is connected and has a stream and a consumer for us."""
        return self._is_ready.is_set()

    async def replay(self, subject: str, start: int, take: TakeBatch, silence_s: float) -> None:
        """Replay batches of `subject`, as kvmesh.kvevents.transport.EventLink says."""

        def on_message(message: Msg) -> bool:
            seq = jetstream.number_of(message)
            return seq is None or take(seq, message.data)

        try:
            async with asyncio.timeout(silence_s):
                await self._is_ready.wait()
                first = await jetstream.find(self._stream, subject, start)
            if first is not None:
                await jetstream.read(self._client, self._stream, subject, first, on_message, silence_s)
        except nats.errors.Error as error:
            raise PeerLostError(f"{self._url} does not replay: {error!r}") from error
        finally:
            _heed_cancellation()

    async def close(self) -> None:
        await _end(self._task)

    async def _run(self) -> None:
        try:
            self._stream = await jetstream.connect(self._client, self._access, self._on_interruption)
            while True:
                consumer = await jetstream.until_it_works(self._consumer, f"no events from {self._url}")
                self._is_ready.set()
                for listener in list(self.listeners.values()):
                    listener.on_reconnected()
                await self._follow(consumer.name)
                self._is_ready.clear()
        finally:
            await jetstream.disconnect(self._client)

    async def _follow(self, consumer: str) -> None:
        """Follow the consumer until that fails."""
        self._pull = jetstream.PullSubscription(self._client, consumer, self._on_message, self._acknowledge)
        try:
            await self._pull.follow()
        except jetstream.FAILURES as error:
            log.warning("the KV events of %s were interrupted (%r)", self._url, error)
        finally:
            self._pull = None

    def _on_interruption(self, is_over: bool) -> None:
        """Note that the server has forgotten the requests, and perhaps its stream."""
        self._is_ready.clear()
        if is_over and self._pull is not None:
            self._pull.fail("reconnected")

    def _on_message(self, message: Msg) -> None:
        self._unacknowledged = message if self._durable else None
        listener = self.listeners.get(message.subject)
        if listener is None:
            return
        seq = jetstream.number_of(message)
        if seq is None or len(message.data) > MAX_PAYLOAD_BYTES:
            listener.on_unreadable(f"a message of {len(message.data)} bytes is no batch")
        else:
            listener.on_live(seq, message.data)

    async def _acknowledge(self) -> None:
        message, self._unacknowledged = self._unacknowledged, None
        if message is not None:
            await self._client.publish(message.reply, b"+ACK")

    async def _consumer(self) -> ConsumerInfo:
        """Return the consumer of our name, if nobody else uses it; else one that the server forgets with us."""
        await jetstream.make_stream(self._stream)
        if self._durable:
            info = await self._durable_consumer()
            if not info.num_waiting:
                return info
            log.warning("another router follows KV events as %r; give each router a name of its own", self._durable)
            self._durable = ""
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.NEW,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_FORGET_FOLLOWER_S,
            mem_storage=True,
        )
        return await self._stream.add_consumer(jetstream.STREAM, config)

    async def _durable_consumer(self) -> ConsumerInfo:
        with suppress(nats.js.errors.NotFoundError):
            known: ConsumerInfo = await self._stream.consumer_info(jetstream.STREAM, self._durable)
            return known
        config = ConsumerConfig(
            durable_name=self._durable,
            deliver_policy=DeliverPolicy.NEW,
            ack_policy=AckPolicy.ALL,
            max_ack_pending=_MAX_UNACKNOWLEDGED,
            inactive_threshold=_FORGET_DURABLE_S,
        )
        return await self._stream.add_consumer(jetstream.STREAM, config)


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split nats://host:port/subject, or tls://, into the server's URL and the subject. Raises ConfigError."""
    scheme, _, rest = endpoint.partition("://")
    server, _, subject = rest.partition("/")
    url = read_access(f"{scheme}://{server}").url
    if not re.fullmatch(r"[^\s*>/]+", subject) or not subject.startswith(f"{jetstream.SUBJECTS}."):
        raise ConfigError(f"cannot follow KV events at {endpoint!r}", hint="give it as nats://host:port/subject")
    return url, subject


def check_subject(subject: str, worker_id: WorkerId, dp_rank: int) -> None:
    """Raise ConfigError for a subject on which another worker, or another rank, publishes.

    It is the prefix, the user if there is one, the worker, the rank and the process.
    """
    own = subject.removeprefix(f"{jetstream.SUBJECTS}.").split(".")
    if len(own) not in (3, 4) or own[-3:-1] != [token(worker_id), str(dp_rank)]:
        raise ConfigError(f"the subject of its KV events, {subject[:200]!r}, is not its own")


def _begin(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_on_end)
    return task


def _on_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("%s ended", task.get_name(), exc_info=error)


def _heed_cancellation() -> None:
    """Raise a pending cancellation: before Python 3.12 `asyncio.wait_for`, which the client uses, can swallow it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it ends, see `_heed_cancellation`."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
