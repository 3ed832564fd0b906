"""The values that a handler gets and returns: a request, a whole reply, a reply that is written bit by bit."""

import asyncio
import codecs
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from kvmesh.mesh.exposition import page
from kvmesh.mesh.http.encodings import decoded
from kvmesh.mesh.identity.credentials import ShownIdentity
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import UNREADABLE

T = TypeVar("T")
JSON = "application/json"
MAX_QUERY_FIELDS = 100
PIECES_A_TURN = 4  # of an encoded body: half a millisecond
AccessLog = Callable[[dict[str, object]], None]  # takes the fields of a line
_NO_PARAMS: Mapping[str, str] = {}


def no_fields() -> Mapping[str, object]:
    """Return no further field of the access log."""
    return {}


class Channel(Protocol):
    """The part of a connection that a request and the reply to it use."""

    is_full: bool  # the client reads more slowly than is written
    member: ShownIdentity | None  # whose certificate the client has shown, where clients are members of the mesh

    def open_stream(self, request: "Request", headers: Mapping[str, str], status: int) -> "ReplyStream": ...

    async def until_writable(self) -> None:
        """Return when the client keeps up again, or has left."""
        ...

    def flush(self) -> None:
        """Send what the reply stream holds now."""
        ...

    def hold(self, size_bytes: int) -> None:
        """Count more bytes of a body. Raise OverloadedError if all requests together then hold too many."""
        ...

    def give_back(self, size_bytes: int) -> None:
        """Count fewer bytes of a body."""
        ...

    def abort(self) -> None: ...


class Caller(Protocol):
    """Whoever the guard of a listener has recognised."""

    def reply_headers(self) -> Mapping[str, str]:
        """Return further headers of each reply to this caller."""
        ...


class Request:
    """A request whose body has been read. `params` holds the values of the `{name}` parts of the route's path."""

    __slots__ = (
        "_connection",
        "_query_string",
        "body",
        "caller",
        "encodings",
        "headers",
        "is_http_1_0",
        "keep",
        "log_fields",
        "method",
        "params",
        "path",
        "since",
    )

    def __init__(
        self,
        connection: Channel,
        method: str,
        path: str,
        query_string: str,
        headers: list[tuple[str, str]],
        since: float,
    ) -> None:
        self._connection = connection
        self._query_string = query_string
        self.method = method
        self.path = path
        self.headers = headers  # names in lower case
        self.since = since  # when its first byte came, in the loop's time
        self.is_http_1_0 = False  # the client does not know chunks
        self.keep = False  # keep the connection after the reply
        self.log_fields = no_fields  # returns further fields of the access log, without secrets
        self.body = b""
        self.encodings: tuple[str, ...] = ()  # of the body as the client sent it, in the order of their use
        self.params: Mapping[str, str] = _NO_PARAMS
        self.caller: Caller | None = None  # None: there is no guard

    @property
    def member(self) -> ShownIdentity | None:
        return self._connection.member

    def header(self, name: str) -> str | None:
        """Return the first header called `name`, which is in lower case."""
        for found, value in self.headers:
            if found == name:
                return value
        return None

    @property
    def query(self) -> dict[str, str]:
        """Return the fields of the query; the last value of a repeated field counts. Raises InvalidRequestError."""
        try:
            return dict(parse_qsl(self._query_string, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
        except ValueError as error:
            raise InvalidRequestError(f"the query has more than {MAX_QUERY_FIELDS} fields") from error

    async def decode_body(self, limit_bytes: int) -> None:
        """Undo the content encodings of the body. Raise BodyTooLargeError, OverloadedError, InvalidRequestError."""
        sent, whole, channel = self.body, bytearray(), self._connection
        try:
            for number, piece in enumerate(decoded(sent, self.encodings, limit_bytes), 1):
                whole += piece
                channel.hold(len(piece))
                if number % PIECES_A_TURN == 0:
                    await asyncio.sleep(0)  # other requests are served meanwhile
            self.body, self.encodings = bytes(whole), ()
            channel.give_back(len(sent))
        except BaseException:
            channel.give_back(len(whole))
            raise

    def json(self, kind: type[T]) -> T:
        """Return the body, read as JSON of type `kind`. Raises InvalidRequestError."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNREADABLE as error:
            if (text := utf8_text(self.body)) is not self.body:
                self._connection.give_back(len(self.body) - len(text))
                self.body = text
                return self.json(kind)
            raise InvalidRequestError(f"the body of the request cannot be used: {error}") from error

    def open_stream(self, headers: Mapping[str, str], status: int = 200) -> "ReplyStream":
        """Send the head of a reply whose body is written in parts. The handler then returns the stream."""
        return self._connection.open_stream(self, headers, status)


def utf8_text(body: bytes) -> bytes:
    """Return a body that is no JSON, without the byte order mark at its beginning if it has one.

    Two marks stay, so that a reader tries the result once and not again. Raise InvalidRequestError if the body is
    UTF-16 or UTF-32.
    """
    if body.startswith(codecs.BOM_UTF8):
        if body.startswith(codecs.BOM_UTF8, len(codecs.BOM_UTF8)):
            return body
        return body.removeprefix(codecs.BOM_UTF8)
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (len(body) > 1 and 0 in body[:4]):
        raise InvalidRequestError("the request body is not valid JSON: it is UTF-16 or UTF-32", hint="send UTF-8")
    return body


class Reply(msgspec.Struct):
    """A whole reply."""

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class ReplyStream:
    """The body of a reply as it is written. Writing never waits: a handler that writes much looks at `is_full` first.

    Writes of one turn of the event loop are sent together, because a send costs more than a token.
    """

    __slots__ = (
        "_connection",
        "_flush_soon",
        "_head",
        "_head_only",
        "_pending",
        "headers",
        "is_chunked",
        "is_ended",
        "sent_bytes",
        "status",
    )

    def __init__(
        self,
        connection: Channel,
        status: int,
        headers: Mapping[str, str],
        head: bytes,
        *,
        is_chunked: bool,
        head_only: bool,
        flush_soon: Callable[[Channel], None],
    ) -> None:
        """Open a stream. `flush_soon` makes the connection send the result of `take` at the end of this turn."""
        self._connection = connection
        self._flush_soon = flush_soon
        self._head = head  # sent with the first data
        self._head_only = head_only
        self._pending: list[bytes] = []
        self.status = status
        self.headers = headers  # as the handler gave them
        self.is_chunked = is_chunked
        self.is_ended = False
        self.sent_bytes = 0  # of the body
        flush_soon(connection)

    def write(self, data: bytes) -> bool:
        """Send `data`, unless the client has left or the stream has ended. Return whether the client keeps up."""
        if self.is_ended:
            return True
        if not self._pending and not self._head:
            self._flush_soon(self._connection)
        self._pending.append(data)
        return not self._connection.is_full

    def end(self, data: bytes = b"") -> None:
        """Send the last `data` and the end of the body, now. A second call does nothing."""
        if self.is_ended:
            return
        self._pending.append(data)
        self.is_ended = True
        self._connection.flush()

    def take(self) -> bytes:
        """Return the data written since the last call, as it goes on the wire."""
        pending = self._pending
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        pending.clear()
        if self._head or self.is_ended or self._head_only or not self.is_chunked:
            return self._take_edge(data)
        self.sent_bytes += len(data)
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""

    def _take_edge(self, data: bytes) -> bytes:
        """Return data with the head before it, with the end after it, or without chunks."""
        head, self._head = self._head, b""
        if self._head_only:
            return head
        self.sent_bytes += len(data)
        if not self.is_chunked:
            return head + data
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return head + chunk + (b"0\r\n\r\n" if self.is_ended else b"")

    @property
    def is_events(self) -> bool:
        """True if clients ignore comments in the body, as in each stream of events, and more can be written."""
        return self.headers.get("content-type") == "text/event-stream" and not (self.is_ended or self._head_only)

    @property
    def is_full(self) -> bool:
        """True if the client reads more slowly than the handler writes: await `until_writable` then."""
        return self._connection.is_full

    async def until_writable(self) -> None:
        """Return when the client keeps up again, or has left."""
        await self._connection.until_writable()

    def abort(self) -> None:
        """Cut the connection: a client that does not read cannot be told in another way that its reply broke off."""
        self._connection.abort()


def json_reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(msgspec.json.encode(value), status, headers=headers or {})


async def live(request: Request) -> Reply:
    """Answer that the process runs."""
    return json_reply({"status": "live"})


async def show_metrics(request: Request) -> Reply:
    return Reply(page(), content_type=CONTENT_TYPE_LATEST)
