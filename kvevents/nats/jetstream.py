"""Use NATS JetStream: a connection that is restored, one stream, and pull consumers."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg, StorageType, StreamConfig

from kvmesh.kvevents.nats.access import NatsAccess
from kvmesh.protocol.errors import ConfigError, PeerLostError

log = logging.getLogger(__name__)

STREAM = "kvmesh-kv-events"
SUBJECTS = "kvmesh.kv-events"  # the prefix of all subjects
FAILURES = (nats.errors.Error, TimeoutError, OSError)  # of the server or the connection to it
NUMBER_HEADER = "Nats-Msg-Id"  # `<publisher>-<seq>`; the server drops a message whose id it has seen

_MAX_AGE_S = 3600.0
_MAX_BYTES = 1 << 30
_SEEN_S = 120.0
_TIMEOUT_S = 2.0  # of a request to the server
_RETRY_S = (0.1, 2.0)  # first and longest wait for a server
_RECONNECT_S = 0.5
_EXPIRES_S = 20.0  # of a request for messages
_HEARTBEAT_S = 1.0
_SILENCE_S = 3.0  # of a server that should send heartbeats
_SLICE = 256  # messages asked for at a time
_FORGET_READER_S = 30.0
_NO_STORAGE = (10023, 10028, 10047)  # error codes: resources, of the account or the server

Interruption = Callable[[bool], None]
T = TypeVar("T")


async def connect(client: Client, access: NatsAccess, on_interruption: Interruption | None = None) -> JetStreamContext:
    """Wait for the server and connect. Afterwards `client` reconnects by itself, for as long as it takes.

    `on_interruption` is called with False when the connection is lost, and with True when it is restored.
    """
    failures = 0

    async def on_error(error: Exception) -> None:
        nonlocal failures
        failures += 1
        log.log(logging.DEBUG if failures > 1 else logging.WARNING, "NATS at %s: %r", access.url, error)

    tls = access.load_tls()

    async def disconnected() -> None:
        if tls is not None:  # certificates are renewed while this process runs
            try:
                access.load_tls(tls)
            except ConfigError as error:
                log.warning("NATS: the TLS files that were read before stay in use: %s", error)
        if on_interruption is not None:
            on_interruption(False)

    async def reconnected() -> None:
        nonlocal failures
        failures = 0
        log.info("connected to NATS at %s again", access.url)
        if on_interruption is not None:
            on_interruption(True)

    await client.connect(
        access.url,
        name="kvmesh kv events",
        user=access.user or None,
        password=access.password or None,
        tls=tls,
        inbox_prefix=access.inbox.encode(),
        error_cb=on_error,
        disconnected_cb=disconnected,
        reconnected_cb=reconnected,
        max_reconnect_attempts=-1,
        reconnect_time_wait=_RECONNECT_S,  # type: ignore[arg-type]  # fractions of a second do work
        ping_interval=5,
    )
    return client.jetstream(timeout=_TIMEOUT_S)


async def disconnect(client: Client) -> None:
    with suppress(*FAILURES):
        await client.close()


async def make_stream(stream: JetStreamContext) -> None:
    """Make the stream. A stream that an operator made with other limits is used as it is."""
    config = StreamConfig(
        name=STREAM,
        subjects=[f"{SUBJECTS}.>"],
        storage=StorageType.FILE,
        max_age=_MAX_AGE_S,
        max_bytes=_MAX_BYTES,
        duplicate_window=_SEEN_S,
    )
    try:
        await stream.add_stream(config)
    except nats.js.errors.BadRequestError:
        await stream.stream_info(STREAM)


async def until_it_works(action: Callable[[], Awaitable[T]], what: str, on_problem: Callable[[str], object] = str) -> T:
    """Repeat `action` until it succeeds, first soon, then every two seconds. Log the first failure as a warning.

    `on_problem` is called with the reason of each failure, and with "" after a success.
    """
    wait_s, longest_s = _RETRY_S
    is_said = False
    while True:
        try:
            result = await action()
        except nats.errors.MaxPayloadError:
            raise
        except FAILURES as error:
            problem = f"{what}: {_reason(error)}"
            on_problem(problem)
            log.log(logging.DEBUG if is_said else logging.WARNING, "%s; trying again", problem)
            is_said = True
        else:
            on_problem("")
            return result
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, longest_s)


def _reason(error: Exception) -> str:
    if isinstance(error, nats.js.errors.ServiceUnavailableError):
        return "the NATS server has no JetStream: start nats-server with -js"
    if isinstance(error, nats.js.errors.APIError) and error.err_code in _NO_STORAGE:
        return (
            f"the NATS server has too little JetStream storage for the stream {STREAM} of {_MAX_BYTES >> 20} MiB, and "
            "routers get no KV events: raise max_file_store, or make the stream yourself with a smaller max_bytes"
        )
    return repr(error)


def number_of(message: Msg | RawStreamMsg) -> int | None:
    """Return the number of the batch; None if the message is no batch."""
    text = (message.headers or {}).get(NUMBER_HEADER, "").rpartition("-")[2]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


async def find(stream: JetStreamContext, subject: str, start: int) -> int | None:
    """Return the place in the stream of the first batch of `subject` with number `start` or more; None: there is none.

    Numbers grow along the stream, so some twenty requests at most find it. Do not call this while the stream is being
    made: that crashes a server of version 2.9.
    """
    try:
        last = await stream.get_last_msg(STREAM, subject)
        first = await stream.get_msg(STREAM, 1, subject, next=True)
    except nats.js.errors.NotFoundError:
        return None
    if (number_of(last) or 0) < start:
        return None
    if (number_of(first) or 0) >= start:
        return first.seq
    below, reached = first.seq or 0, last.seq or 0
    while reached - below > 1:
        middle = (below + reached) // 2
        found = await stream.get_msg(STREAM, middle, subject, next=True)
        if (number_of(found) or 0) >= start:
            reached = middle
        else:
            below = found.seq or middle
    return reached


class PullSubscription:
    """Asks a consumer for messages and gives them to `take`. The server sends heartbeats in pauses."""

    def __init__(
        self, client: Client, consumer: str, take: Callable[[Msg], None], on_pause: Callable[[], Awaitable[None]]
    ) -> None:
        """Make a subscription. `on_pause` is called when there is no message for the moment."""
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{consumer}"
        self._take = take
        self._on_pause = on_pause
        self._inbox = client.new_inbox()
        self._left = 0
        self._failure = ""
        self._heard = asyncio.Event()

    async def follow(self) -> None:
        """Take messages as they come. Raises one of FAILURES in the end."""
        subscription = await self._client.subscribe(self._inbox, cb=self._on_message)
        try:
            while True:
                await self._ask({"batch": _SLICE, "expires": _ns(_EXPIRES_S), "idle_heartbeat": _ns(_HEARTBEAT_S)})
                await self._until_used_up(_SILENCE_S)
        finally:
            await _unsubscribe(subscription)

    async def take_now(self, count: int, silence_s: float) -> None:
        """Take `count` messages that the stream has. Raises one of FAILURES."""
        subscription = await self._client.subscribe(self._inbox, cb=self._on_message)
        try:
            for first in range(0, count, _SLICE):
                await self._ask({"batch": min(count - first, _SLICE), "no_wait": True})
                await self._until_used_up(silence_s)
        finally:
            await _unsubscribe(subscription)

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._heard.set()

    async def _ask(self, request: dict[str, object]) -> None:
        self._left = int(str(request["batch"]))
        await self._client.publish(self._subject, json.dumps(request).encode(), reply=self._inbox)

    async def _until_used_up(self, silence_s: float) -> None:
        while self._left > 0:
            self._heard.clear()
            async with asyncio.timeout(silence_s):
                await self._heard.wait()
            if self._failure:
                raise ConnectionError(self._failure)
        await self._on_pause()

    async def _on_message(self, message: Msg) -> None:
        self._heard.set()
        status = (message.headers or {}).get("Status")
        if status is None:
            self._left -= 1
            self._take(message)
        elif status == "100":  # a heartbeat
            await self._on_pause()
        elif status in ("404", "408"):  # no more messages came within the time of the request
            self._left = 0
        else:
            self.fail(f"status {status} of {self._subject}")


async def read(
    client: Client, stream: JetStreamContext, subject: str, first: int, take: Callable[[Msg], bool], silence_s: float
) -> None:
    """Give `take` all messages of `subject` from place `first` of the stream on, until it returns False.

    Raises one of FAILURES, or PeerLostError if some were lost on the way.
    """
    config = ConsumerConfig(
        filter_subject=subject,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=_FORGET_READER_S,
        mem_storage=True,
    )
    consumer = await stream.add_consumer(STREAM, config)
    reading = _Reading(take)
    pull = PullSubscription(client, consumer.name, reading.on_message, reading.on_pause)
    try:
        await pull.take_now(consumer.num_pending or 0, silence_s)
    except _EnoughError:
        pass
    finally:
        with suppress(*FAILURES):  # the server forgets the consumer by itself later
            await client.publish(f"$JS.API.CONSUMER.DELETE.{STREAM}.{consumer.name}")
    if reading.has_hole:
        raise PeerLostError(f"messages of {subject} were lost on the way")


class _EnoughError(Exception):
    """The reader wants no more messages."""


class _Reading:
    def __init__(self, take: Callable[[Msg], bool]) -> None:
        self._take = take
        self._count = 0
        self._ended = False
        self.has_hole = False

    def on_message(self, message: Msg) -> None:
        self._count += 1
        self.has_hole |= message.metadata.sequence.consumer != self._count
        self._ended = self._ended or self.has_hole or not self._take(message)

    async def on_pause(self) -> None:
        if self._ended:
            raise _EnoughError


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


async def _unsubscribe(subscription: Subscription) -> None:
    with suppress(*FAILURES):
        await subscription.unsubscribe()
