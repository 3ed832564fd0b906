"""Make calls over one connection per peer, opened on first use and again after it broke."""

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

import msgspec

from kvmesh.mesh.address import split_address
from kvmesh.mesh.deadlines import Deadlines
from kvmesh.mesh.identity.connecting import connected_socket
from kvmesh.mesh.identity.credentials import GOODBYE_S, HANDSHAKE_S, Credentials
from kvmesh.mesh.identity.problems import refused_by
from kvmesh.mesh.identity.reading import SharedBuffer
from kvmesh.mesh.identity.rights import METHODS
from kvmesh.mesh.plane.bounds import CLIENT_LIMITS, Bounds, PlaneLimits
from kvmesh.mesh.plane.frames import (
    MAX_CALL_BYTES,
    MAX_FRAME_BYTES,
    OUR_HELLO,
    Batch,
    Cancel,
    Credit,
    Frame,
    FrameReader,
    Open,
    Ping,
)
from kvmesh.mesh.plane.link import FAREWELL, Link
from kvmesh.mesh.plane.metrics import REPEATED
from kvmesh.mesh.safeguards import is_off
from kvmesh.protocol.errors import (
    DeadlineExceededError,
    IdentityError,
    MeshError,
    PeerLostError,
    UnreachableError,
    WireError,
)
from kvmesh.protocol.messages import UNREADABLE, decode, decoder, encode, error_of, unreadable

log = logging.getLogger(__name__)

_ENDS_NO_CALL = is_off("deadline")
_NEVER_S = 86_400.0

WINDOW_MESSAGES = 256  # that a peer may be ahead of a stream's consumer; after half of them a frame of credit is sent
CONNECT_TIMEOUT_S = 1.5  # one lost packet costs 1 s
WAITING_BYTES = 16 << 20  # of one peer's messages, beyond which its connection is not read
WAITING_BYTES_WHEN_SHORT = 1 << 20  # ... if all peers together have filled the memory for them
CALL_HEAD_BYTES = 1 << 10  # of the frame that carries the body of a call
_FOREIGN = "a card names it: the card is old, or wrong"
KNOWN_AWAY_TIMEOUT_S = 0.3  # to connect to a peer that did not answer the last time
SECURED_TIMEOUT_S = 2.0  # for a handshake and its first answer
PROOF_TIMEOUT_S = 0.5  # ... and to hear from it: the kernel, or a proxy, takes connections for a process that hangs
MAX_LEFT = 4096  # streams of one peer whose unread messages somebody wants; of more, the oldest are forgotten
MAX_AWAY = 4096  # peers that are remembered as such; of more, the oldest are forgotten
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
Take = Callable[[msgspec.Raw, int], bool]  # with a message, and the number of messages that a Shortcut took before it


class Shortcut(Protocol):
    """Takes messages as they are on the wire, and handles those that it knows without decoding them."""

    def bind(self, take: Take, most: int) -> None:
        """Pass messages that it does not know to `take`, with the number of messages taken since the last one passed.

        After `most` messages of its own it passes one anyway, so that the peer gets its credit back.
        """
        ...

    def __call__(self, raw: msgspec.Raw) -> bool:
        """Take one message, as `Consumer.take` does."""
        ...

    def release(self) -> None:
        """Drop the reference to `take`."""
        ...


class Consumer(Protocol[T_contra]):
    """Takes the messages of a stream where they are read, so that no task is woken for each."""

    @property
    def shortcut(self) -> Shortcut | None:
        """The shortcut that replaces `take` for further messages. It may appear with a message, and then stays."""
        ...

    def take(self, message: T_contra) -> bool:
        """Take one message. Return True to get the next one at once; else the consumer is done or full."""
        ...

    @property
    def is_done(self) -> bool:
        """True if the consumer wants no more messages."""
        ...

    @property
    def is_full(self) -> bool:
        """True if the consumer can take nothing now: messages wait, and the peer runs out of credit."""
        ...

    async def until_ready(self) -> None: ...


class Stream:
    """The answer to one call: iterate over it, or `feed` a consumer. An error of the peer is raised there."""

    __slots__ = ("_ended", "_failure", "_link", "_messages", "_refusal", "_taken", "_waiter",
        "_waiting_bytes", "number", "on_unread", "take")  # fmt: skip

    def __init__(self, link: "_ClientLink", number: int) -> None:
        self._link = link
        self.number = number
        self._messages: deque[msgspec.Raw] = deque()
        self._waiting_bytes = 0  # of the messages
        self._waiter: asyncio.Future[None] | None = None
        self._taken = 0
        self._ended = False
        self._failure: MeshError | None = None
        self._refusal: Exception | None = None  # of the consumer
        self.take: Callable[[msgspec.Raw], bool] | None = None  # while a consumer is fed; False: stop calling it
        # Gets the messages that the caller leaves unread, also those that arrive later; False: stop calling it.
        self.on_unread: Callable[[msgspec.Raw], bool] | None = None

    def on_message(self, message: msgspec.Raw) -> None:
        """Keep a message that nobody takes at once."""
        if len(self._messages) >= WINDOW_MESSAGES:
            raise WireError(f"{self._link.address} sends beyond its credit of {WINDOW_MESSAGES} messages")
        self._messages.append(message.copy())  # or else it would keep the whole frame in memory
        size_bytes = memoryview(message).nbytes
        self._waiting_bytes += size_bytes
        self._link.on_waiting(size_bytes)
        self._wake()

    def _pop(self) -> msgspec.Raw:
        """Take the first message that waits."""
        message = self._messages.popleft()
        size_bytes = memoryview(message).nbytes
        self._waiting_bytes -= size_bytes
        self._link.on_waiting(-size_bytes)
        return message

    def drop(self) -> None:
        """Forget the messages that wait: the caller will not take them."""
        for message in self._messages:
            if self.on_unread is not None and not self.on_unread(message):
                self.on_unread = None
        self._messages.clear()
        self._link.on_waiting(-self._waiting_bytes)
        self._waiting_bytes = 0

    def on_taken_enough(self, refusal: Exception | None = None) -> None:
        """Stop calling `take`, which has returned False or has failed with `refusal`."""
        self.take, self._refusal = None, refusal
        self._wake()

    def on_end(self, failure: MeshError | None) -> None:
        if not self._ended:
            self._ended, self._failure = True, failure
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _arrival(self) -> None:
        """Wait until something has come, or the stream has ended."""
        self._waiter = self._link.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def next(self) -> msgspec.Raw | None:
        """Return the next message as msgpack, None at the end. Raises the error of the peer."""
        while not self._messages:
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return None
            await self._arrival()
        self.note_taken(1)
        return self._pop()

    async def feed(self, kind: type[T], consumer: Consumer[T]) -> None:
        """Give all messages to `consumer`, until the consumer is done or the stream ends.

        Most messages are taken as soon as they are read from the connection; they wait only while the consumer is full.
        Raises the error of the peer or of the consumer, once; the stream cannot be used after that.
        """
        feeding = _Feeding(self, kind, consumer)
        try:
            while True:
                while self._messages:
                    if consumer.is_full:
                        await consumer.until_ready()
                        continue
                    feeding.way(self._pop())
                    if consumer.is_done:
                        return
                if self._ended:
                    if self._failure is not None:
                        raise self._failure
                    return
                if consumer.is_full:
                    await consumer.until_ready()
                    continue
                self.take = feeding.way
                await self._arrival()
                self.take = None
                if self._refusal is not None:
                    raise self._refusal
                if consumer.is_done:
                    return
        finally:
            self.take = self._failure = self._refusal = None  # their tracebacks hold this frame, and so the stream
            feeding.end()

    def note_taken(self, messages: int) -> None:
        """Count messages that have left the window. Credit is renewed for half a window at a time."""
        self._taken += messages
        if self._taken >= WINDOW_MESSAGES // 2:
            self._renew_credit()

    def _renew_credit(self) -> None:
        """Grant credit for the messages taken, so that the peer can continue to send."""
        if not self._ended:
            self._link.write(Credit(self.number, self._taken))
            self._taken = 0

    def messages(self, kind: type[T]) -> "Messages[T]":
        return Messages(self, kind)


class _Feeding(Generic[T]):
    """A consumer that takes the messages of a stream."""

    __slots__ = ("_consumer", "_give", "_kind", "_read", "_shortcut", "_stream", "way")

    def __init__(self, stream: Stream, kind: type[T], consumer: Consumer[T]) -> None:
        self._stream = stream
        self._kind = kind
        self._consumer = consumer
        self._give = consumer.take
        self._read = decoder(kind).decode
        self._shortcut: Shortcut | None = None
        self.way: Callable[[msgspec.Raw], bool] = self.take  # where the next message goes

    def take(self, raw: msgspec.Raw, taken_before: int = 0) -> bool:
        self._stream.note_taken(1 + taken_before)
        try:
            message = self._read(raw)
        except UNREADABLE as error:
            raise unreadable(self._kind, error) from error
        wants_more = self._give(message)
        if self._shortcut is None and (shortcut := self._consumer.shortcut) is not None:
            shortcut.bind(self.take, WINDOW_MESSAGES // 2 - 1)
            self._shortcut = self.way = shortcut
            if self._stream.take is not None:
                self._stream.take = shortcut
        return wants_more

    def end(self) -> None:
        """Break the cycle of references, so that its objects do not wait for the garbage collector."""
        if self._shortcut is not None:
            self._shortcut.release()
        del self.way


class Messages(Generic[T]):
    """Iterates over a stream. Not a generator, because one that is left early has to be closed."""

    def __init__(self, stream: Stream, kind: type[T]) -> None:
        self._stream = stream
        self._kind = kind

    def __aiter__(self) -> "Messages[T]":
        return self

    async def __anext__(self) -> T:
        raw = await self._stream.next()
        if raw is None:
            raise StopAsyncIteration
        return decode(raw, self._kind)


class PlaneClient:
    """Connections to all peers of one process."""

    def __init__(self, credentials: Credentials | None = None, limits: PlaneLimits = CLIENT_LIMITS) -> None:
        """Make a client. With `credentials` it talks to members of its mesh alone, over TLS."""
        self.credentials = credentials
        self._links: dict[str, asyncio.Task[_ClientLink]] = {}
        self._names: dict[str, frozenset[str]] = {}  # of the services at these addresses, as their cards say
        self._retired: set[_ClientLink] = set()  # made with files that have changed: their calls may end
        self._bounds = Bounds(limits)
        self._away: dict[str, None] = {}  # addresses that gave no answer the last time, so that silence costs once
        self.deadlines = Deadlines()

    def open(self, address: str, method: str, body: object, timeout_s: float, *, hasty: bool = False) -> "_Opening":
        """Call `method` at host:port. To leave the block before the end cancels the call at the peer.

        `hasty`: the caller can go elsewhere, so a peer that is silent for 2 s is given up; else for 15 s.
        Raises UnreachableError if the peer cannot be reached; a passed deadline is DeadlineExceededError.
        """
        return _Opening(self, address, method, body, timeout_s, hasty=hasty)

    async def ask(
        self, address: str, method: str, body: object, reply: type[T], timeout_s: float, *, hasty: bool = False
    ) -> T:
        """Make a call whose answer is one message, and return the message."""
        async with self.open(address, method, body, timeout_s, hasty=hasty) as stream:
            raw = await stream.next()
            if raw is None:
                raise PeerLostError(f"{address} ended {method} without an answer")
            return decode(raw, reply)

    async def tell(self, address: str, method: str, body: object, timeout_s: float) -> None:
        """Make a call whose answer has no messages. Return when the call has ended."""
        async with self.open(address, method, body, timeout_s) as stream:
            while await stream.next() is not None:
                pass

    def suspect(self, address: str, reason: str) -> None:
        """Ask a peer that is said to be gone. Without an answer soon, all its calls fail."""
        if (link := self.standing(address)) is not None:
            link.watch.suspect(reason)

    def expect(self, address: str, names: Collection[str]) -> None:
        """Take the names of the services at an address, as cards say: the certificate there has to fit one of them."""
        if self.credentials is None:
            return
        if names:
            self._names[address] = frozenset(names)
        else:
            self._names.pop(address, None)

    def check(self, link: "_ClientLink", method: str) -> None:
        """Raise IdentityError if the peer's certificate is not of a service that answers `method` at this address."""
        if link.member is None:
            return
        found = link.member.identity
        if method not in METHODS.get(found.role, {}):
            raise IdentityError(f"{link.address} is {found}, which does not answer {method}", hint=_FOREIGN)
        names = self._names.get(link.address)
        if names is not None and not any(found.stands_for(name) for name in names):
            raise IdentityError(f"{link.address} is {found}, not {' or '.join(sorted(names))}", hint=_FOREIGN)

    async def close(self) -> None:
        for link in list(self._retired):
            link.close()
        tasks, self._links = list(self._links.values()), {}
        for task in tasks:
            if not task.done():
                task.cancel()
        links = [one for one in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(one, _ClientLink)]
        for link in links:
            link.close()
        self._bounds.close(links)

    def standing(self, address: str) -> "_ClientLink | None":
        """Return the connection to a peer if there is one."""
        task = self._links.get(address)
        if task is None or not task.done() or _is_dead(task):
            return None
        link = task.result()
        if self.credentials is not None and link.context is not self.credentials.client_context():
            self._retire(link)
            return None
        return link

    def _retire(self, link: "_ClientLink") -> None:
        """Make no new calls on a connection whose certificate was replaced. The calls on it may end."""
        del self._links[link.address]
        if link.is_busy():
            self._retired.add(link)
            link.is_retired = True
        else:
            link.close()

    async def link(self, address: str, deadline: float) -> "_ClientLink":
        """Return the connection to a peer. Callers share a connection that is being opened.

        Raises UnreachableError, or TimeoutError at `deadline` in the event loop's time.
        """
        async with asyncio.timeout_at(deadline):
            return await self._connected(address)

    async def _connected(self, address: str) -> "_ClientLink":
        task = self._links.get(address)
        if task is None or _is_dead(task):
            task = asyncio.get_running_loop().create_task(self._connect(address), name=f"connect {address}")
            self._links[address] = task
        return await asyncio.shield(task)

    async def _connect(self, address: str) -> "_ClientLink":
        is_doubtful = address in self._away
        timeout_s = KNOWN_AWAY_TIMEOUT_S if is_doubtful else CONNECT_TIMEOUT_S
        try:
            host, port = split_address(address)
            async with asyncio.timeout(timeout_s):
                if self.credentials is None:
                    _, link = await asyncio.get_running_loop().create_connection(
                        lambda: _ClientLink(address, self._forget, self._bounds), host, port
                    )
                else:
                    raw = await connected_socket(host, port)
            if self.credentials is not None:
                limit_s = PROOF_TIMEOUT_S if is_doubtful else SECURED_TIMEOUT_S
                link = await self._secured(raw, address, self.credentials, limit_s)
        except IdentityError:
            self._links.pop(address, None)
            raise
        except (OSError, ValueError, OverflowError) as error:  # TimeoutError is an OSError
            self._links.pop(address, None)
            if isinstance(error, TimeoutError):
                self._note_away(address)
            reason = str(error) or f"no answer in {timeout_s} s"
            raise UnreachableError(f"cannot connect to {address}: {reason}") from error
        if self.credentials is None:  # else it has answered already
            link.write(OUR_HELLO)
            if is_doubtful:
                await self._prove(link)
        self._away.pop(address, None)
        return link

    async def _prove(self, link: "_ClientLink") -> None:
        """Have a peer that fell silent show that it lives, before it gets a call. Raise UnreachableError."""
        link.write(Ping())
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await link.until_heard()
        except OSError as error:  # TimeoutError is an OSError
            link.abort(f"no sign of life in {PROOF_TIMEOUT_S} s")
            raise UnreachableError(f"{link.address} takes connections, and does not answer") from error

    async def _secured(
        self, raw: socket.socket, address: str, credentials: Credentials, limit_s: float
    ) -> "_ClientLink":
        """Return a connection over TLS that the peer has accepted. Raises IdentityError.

        Here the handshake ends before the peer has looked at our certificate: only an answer shows that it counts.
        """
        context = credentials.client_context()
        link = None
        try:
            async with asyncio.timeout(limit_s):
                _, reading = await asyncio.get_running_loop().create_connection(
                    lambda: SharedBuffer(_ClientLink(address, self._forget, self._bounds, context)),
                    sock=raw,
                    ssl=context,
                    server_hostname="",
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=GOODBYE_S,
                )
                link = reading.protocol
                link.write(OUR_HELLO)
                link.write(Ping())
                await link.until_heard()
                return link
        except TimeoutError:
            self._note_away(address)
            raise UnreachableError(
                f"cannot connect to {address}: no handshake in {limit_s:g} s",
                hint="is it overloaded, or without TLS?",
            ) from None
        except OSError as error:
            raise refused_by(address, error, is_expired=credentials.member.expires_at_s < time.time()) from error
        finally:
            if link is not None and not link.has_answered:
                link.abort("the connection was not made")

    def _forget(self, link: Link) -> None:
        assert isinstance(link, _ClientLink)
        self._retired.discard(link)
        if link.watch.was_silent:
            self._note_away(link.address)
        task = self._links.get(link.address)
        if task is not None and _is_dead(task):
            del self._links[link.address]

    def _note_away(self, address: str) -> None:
        self._away[address] = None
        if len(self._away) > MAX_AWAY:
            del self._away[next(iter(self._away))]


class _Opening:
    """The block for which a call is open. Not a generator, which would cost more for each request."""

    __slots__ = ("_address", "_body", "_client", "_hasty", "_link", "_method", "_slot", "_stream", "_timeout_s")

    def __init__(
        self, client: PlaneClient, address: str, method: str, body: object, timeout_s: float, *, hasty: bool
    ) -> None:
        self._client = client
        self._address = address
        self._method = method
        self._body = body
        self._timeout_s = _NEVER_S if _ENDS_NO_CALL else timeout_s
        self._hasty = hasty

    async def __aenter__(self) -> Stream:
        client, timeout_s = self._client, self._timeout_s
        if timeout_s <= 0:
            raise self._overdue()
        link = client.standing(self._address)
        if link is not None:
            deadline = link.loop.time() + timeout_s
        else:
            deadline = asyncio.get_running_loop().time() + timeout_s
            try:
                link = await client.link(self._address, deadline)
            except TimeoutError:
                raise self._overdue() from None
        client.check(link, self._method)
        self._link = link
        self._stream = self._link.open(self._method, encode(self._body), timeout_s, hasty=self._hasty)
        # The deadline ends the stream; asyncio.timeout would end the block. The block may be suspended in an async
        # generator, and a timeout would then cancel something else in its task.
        self._slot = client.deadlines.add(deadline, self)
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        self._client.deadlines.discard(self._slot, self)
        self._link.leave(self._stream)

    def expire(self) -> None:
        """End the stream at its deadline."""
        self._stream.on_end(self._overdue())

    def _overdue(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self._method} at {self._address} did not end in the {self._timeout_s:.3g} s left for it"
        )


def is_refused(error: UnreachableError) -> bool:
    """Return whether the peer's host answered that nobody listens at the address."""
    return isinstance(error.__cause__, ConnectionRefusedError)


def _is_dead(task: "asyncio.Task[_ClientLink]") -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().closed.is_set()


class _ClientLink(Link):
    def __init__(
        self,
        address: str,
        on_closed: Callable[[Link], None],
        bounds: Bounds,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(on_closed, bounds, FrameReader(MAX_FRAME_BYTES))
        self.address = address
        self.context = context
        self.is_retired = False
        self._answered: asyncio.Future[None] | None = None  # while the first answer is waited for
        self._farewell = ""  # why the peer hangs up
        self._batches = 0  # that have come
        self._waiting_bytes = 0  # of messages that consumers have not taken
        self._streams: dict[int, Stream] = {}
        self._left: dict[int, Callable[[msgspec.Raw], bool]] = {}  # `on_unread` of streams that the peer has not ended
        self._next_stream = 1
        self._calm: set[int] = set()  # streams that are not hasty: few, some of them stand all day

    @property
    def peer_name(self) -> str:
        return self.address

    def is_busy(self) -> bool:
        return bool(self._streams)

    def is_hasty(self) -> bool:
        return len(self._streams) > len(self._calm)

    def open(self, method: str, body: bytes, timeout_s: float, *, hasty: bool = False) -> Stream:
        if self.closed.is_set():
            raise PeerLostError(f"the connection to {self.address} broke")
        if len(body) > MAX_CALL_BYTES - CALL_HEAD_BYTES:
            raise WireError(f"a call of {len(body)} bytes is over the limit of {MAX_CALL_BYTES - CALL_HEAD_BYTES}")
        number, self._next_stream = self._next_stream, self._next_stream + 1
        self.write(Open(number, method, timeout_s, WINDOW_MESSAGES, msgspec.Raw(body)))
        stream = self._streams[number] = Stream(self, number)
        if not hasty:
            self._calm.add(number)
        self.watch.on_stream()
        return stream

    def leave(self, stream: Stream) -> None:
        """Forget a stream whose caller is done, and cancel the call at the peer if it has not ended."""
        stream.drop()
        if self._streams.pop(stream.number, None) is not None:
            self._calm.discard(stream.number)
            self.write(Cancel(stream.number))
            if stream.on_unread is not None:
                self._left[stream.number] = stream.on_unread
                if len(self._left) > MAX_LEFT:
                    del self._left[next(iter(self._left))]
        if self.is_retired and not self._streams:
            self.close()

    async def until_heard(self) -> None:
        """Wait for the answer to a Ping. Raises ConnectionError, or the error of the connection, if it breaks first."""
        self._answered = self.loop.create_future()
        self.on_pong = self._note_answer
        await asyncio.shield(self._answered)

    @property
    def has_answered(self) -> bool:
        answered = self._answered
        return answered is not None and answered.done() and answered.exception() is None

    def _note_answer(self) -> None:
        self.on_pong = None
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error or ConnectionResetError("the peer closed the connection"))
        super().connection_lost(error)

    def on_waiting(self, more_bytes: int) -> None:
        """Read no further while consumers leave too much. A peer may send 256 messages ahead, of whatever size."""
        self._waiting_bytes += more_bytes
        is_short = self._bounds.wait(more_bytes)
        if self._transport is None or self._transport.is_closing():
            return
        if not self.is_paused and self._waiting_bytes > (WAITING_BYTES_WHEN_SHORT if is_short else WAITING_BYTES):
            self.is_paused = True
            self._transport.pause_reading()
        elif self.is_paused and self._waiting_bytes <= (WAITING_BYTES_WHEN_SHORT if is_short else WAITING_BYTES) // 2:
            self.is_paused = False
            self._transport.resume_reading()

    def on_frame(self, frame: Frame) -> None:
        if not isinstance(frame, Batch):
            raise WireError(f"a server does not send {type(frame).__name__}")
        if frame.number and not self._is_next(frame.number):
            return
        find = self._streams.get
        for number, message in frame.messages:  # nearly all are one token: avoid every call here
            if (stream := find(number)) is None:
                self._on_unread(number, message)
                continue
            if (take := stream.take) is None:
                stream.on_message(message)
                continue
            try:
                if not take(message):
                    stream.on_taken_enough()
            except Exception as error:  # raised at the waiting caller; the connection goes on
                stream.on_taken_enough(error)
        for number, failure in frame.ends:
            if (stream := self._streams.pop(number, None)) is not None:
                self._calm.discard(number)
                stream.on_end(None if failure is None else error_of(failure))
            elif number == FAREWELL and failure is not None:
                self._farewell = str(error_of(failure))
            else:
                self._left.pop(number, None)

    def _on_unread(self, number: int, message: msgspec.Raw) -> None:
        """Handle a message whose caller has left meanwhile."""
        on_unread = self._left.get(number)
        if on_unread is not None and not on_unread(message):
            del self._left[number]

    def _is_next(self, number: int) -> bool:
        """Return whether a batch is the next one, and does not come again. Raise WireError if one is missing."""
        if number <= self._batches:
            REPEATED.labels().inc()
            return False
        if number > self._batches + 1:
            raise WireError(f"batch {self._batches + 1} of {self.address} is missing, batch {number} has come")
        self._batches = number
        return True

    def on_lost(self, reason: str) -> None:
        reason = self._farewell or reason
        streams, self._streams = self._streams, {}
        self._calm.clear()
        self._left.clear()
        for stream in streams.values():
            stream.on_end(PeerLostError(f"lost {self.address}: {reason}"))
