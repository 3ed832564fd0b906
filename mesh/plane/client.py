"""Make calls over one connection per peer, opened on first use and again after it broke."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from mesh.address import split_address
from mesh.deadlines import Deadlines
from mesh.plane.frames import OUR_HELLO, Batch, Cancel, Credit, Frame, Open
from mesh.plane.link import Link
from protocol.errors import (
    DeadlineExceededError,
    MeshError,
    PeerLostError,
    UnreachableError,
    WireError,
)
from protocol.messages import UNREADABLE, decode, decoder, encode, error_of, unreadable

log = logging.getLogger(__name__)

WINDOW_MESSAGES = 256  # that a peer may be ahead of a stream's consumer; after half of them a frame of credit is sent
CONNECT_TIMEOUT_S = 1.5  # one lost packet costs 1 s
KNOWN_AWAY_TIMEOUT_S = 0.3  # to connect to a peer whose host did not answer the last time
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

    __slots__ = ("_ended", "_failure", "_link", "_messages", "_refusal", "_taken", "_waiter", "number", "take")

    def __init__(self, link: "_ClientLink", number: int) -> None:
        self._link = link
        self.number = number
        self._messages: deque[msgspec.Raw] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._taken = 0
        self._ended = False
        self._failure: MeshError | None = None
        self._refusal: Exception | None = None  # of the consumer
        self.take: Callable[[msgspec.Raw], bool] | None = None  # while a consumer is fed; False: stop calling it

    def on_message(self, message: msgspec.Raw) -> None:
        """Keep a message that nobody takes at once."""
        if len(self._messages) >= WINDOW_MESSAGES:
            raise WireError(f"{self._link.address} sends beyond its credit of {WINDOW_MESSAGES} messages")
        self._messages.append(message)
        self._wake()

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
        return self._messages.popleft()

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
                    feeding.way(self._messages.popleft())
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

    def __init__(self) -> None:
        self._links: dict[str, asyncio.Task[_ClientLink]] = {}
        self._away: dict[str, None] = {}  # addresses that gave no answer the last time, so that silence costs once
        self.deadlines = Deadlines()

    def open(self, address: str, method: str, body: object, timeout_s: float) -> "_Opening":
        """Call `method` at host:port. To leave the block before the end cancels the call at the peer.

        Raises UnreachableError if the peer cannot be reached; a passed deadline is DeadlineExceededError.
        """
        return _Opening(self, address, method, body, timeout_s)

    async def ask(self, address: str, method: str, body: object, reply: type[T], timeout_s: float) -> T:
        """Make a call whose answer is one message, and return the message."""
        async with self.open(address, method, body, timeout_s) as stream:
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
        """Ask a peer that is said to be gone. Without an answer soon, its calls fail, long before the keepalive."""
        if (link := self.standing(address)) is not None:
            link.suspect(reason)

    async def close(self) -> None:
        tasks, self._links = list(self._links.values()), {}
        for task in tasks:
            if not task.done():
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, _ClientLink):
                outcome.close()

    def standing(self, address: str) -> "_ClientLink | None":
        """Return the connection to a peer if there is one."""
        task = self._links.get(address)
        return task.result() if task is not None and task.done() and not _is_dead(task) else None

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
        timeout_s = KNOWN_AWAY_TIMEOUT_S if address in self._away else CONNECT_TIMEOUT_S
        try:
            host, port = split_address(address)
            async with asyncio.timeout(timeout_s):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: _ClientLink(address, self._forget), host, port
                )
        except (OSError, ValueError, OverflowError) as error:  # TimeoutError is an OSError
            self._links.pop(address, None)
            if isinstance(error, TimeoutError):
                self._note_away(address)
            reason = str(error) or f"no answer in {timeout_s} s"
            raise UnreachableError(f"cannot connect to {address}: {reason}") from error
        self._away.pop(address, None)
        link.write(OUR_HELLO)
        return link

    def _forget(self, link: Link) -> None:
        assert isinstance(link, _ClientLink)
        if link.was_cut:
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

    __slots__ = ("_address", "_body", "_client", "_link", "_method", "_slot", "_stream", "_timeout_s")

    def __init__(self, client: PlaneClient, address: str, method: str, body: object, timeout_s: float) -> None:
        self._client = client
        self._address = address
        self._method = method
        self._body = body
        self._timeout_s = timeout_s

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
        self._link = link
        self._stream = self._link.open(self._method, encode(self._body), timeout_s)
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


def _is_dead(task: "asyncio.Task[_ClientLink]") -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().closed.is_set()


class _ClientLink(Link):
    def __init__(self, address: str, on_closed: Callable[[Link], None]) -> None:
        super().__init__(on_closed)
        self.address = address
        self._streams: dict[int, Stream] = {}
        self._next_stream = 1

    def is_busy(self) -> bool:
        return bool(self._streams)

    def open(self, method: str, body: bytes, timeout_s: float) -> Stream:
        if self.closed.is_set():
            raise PeerLostError(f"the connection to {self.address} broke")
        number, self._next_stream = self._next_stream, self._next_stream + 1
        self.write(Open(number, method, timeout_s, WINDOW_MESSAGES, msgspec.Raw(body)))
        stream = self._streams[number] = Stream(self, number)
        self.watch_peer()
        return stream

    def leave(self, stream: Stream) -> None:
        """Forget a stream whose caller is done, and cancel the call at the peer if it has not ended."""
        if self._streams.pop(stream.number, None) is not None:
            self.write(Cancel(stream.number))

    def on_frame(self, frame: Frame) -> None:
        if not isinstance(frame, Batch):
            raise WireError(f"a server does not send {type(frame).__name__}")
        find = self._streams.get
        for number, message in frame.messages:  # nearly all are one token: avoid every call here
            if (stream := find(number)) is None:
                continue  # the caller has left meanwhile
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
                stream.on_end(None if failure is None else error_of(failure))

    def on_lost(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_end(PeerLostError(f"lost {self.address}: {reason}"))
