"""Serve one HTTP/1.1 connection: httptools parses, one request at a time is handled, writes never wait.

The connection is read also while a request is handled, because reading shows that a client has left. Requests that come
meanwhile (pipelining) are kept, up to a limit. A client may close its sending side after its request.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Protocol, cast
from urllib.parse import unquote

import httptools

from kvmesh.mesh.http.chunks import ChunkSizes
from kvmesh.mesh.http.cors import Cors
from kvmesh.mesh.http.encodings import ACCEPTED, read_encodings
from kvmesh.mesh.http.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    MethodNotAllowedError,
    UnsupportedEncodingError,
    error_body,
    http_failure,
    retry_after_s,
)
from kvmesh.mesh.http.half_close import AT_ONCE_S, PROBE_AFTER_S, HalfClosed, has_input
from kvmesh.mesh.http.request import JSON, AccessLog, Channel, Reply, ReplyStream, Request
from kvmesh.mesh.identity.credentials import ShownIdentity, member_of
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 << 10  # also of trailers, and of the extensions of one chunk
MAX_HEADERS = 128
MAX_AHEAD_BYTES = 64 << 10  # of pipelined requests, while another is handled
SLICE_BYTES = 4 << 10  # parsed at once: limits how many requests are parsed at a time
SEND_BUFFER_BYTES = 128 << 10  # else the kernel would keep megabytes for a client that does not read
WRITE_BUFFER_BYTES = 64 << 10  # with more unsent bytes, a reply counts as full
KEEPALIVE = (  # two minutes of silence mean that a client is gone
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"  # in a stream of events
LINGER_S = 1.0  # after a refusal: a reset would destroy the reply before a sending client reads it
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_NAMES = {
    spelled.encode(): name
    for name in (
        "accept", "accept-encoding", "accept-language", "authorization", "connection", "content-length",
        "content-type", "expect", "host", "transfer-encoding", "user-agent", "x-api-key", "x-request-id",
    )
    for spelled in (name, name.title())
}  # fmt: skip
_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "expect", "content-encoding"})
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%v]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
MOST_KNOWN_HOSTS = 256
_known_hosts: set[str] = set()  # that are right: clients send few different ones
_AUTHORITY = re.compile(r"https?://[^/?]*", re.IGNORECASE)


class Arrival(NamedTuple):
    """A body that is on its way."""

    host: str
    held_bytes: int
    since_s: float


class ConnectionOwner(Protocol):
    """The part of a server that its connections use."""

    loop: asyncio.AbstractEventLoop
    now: Callable[[], float]
    connections: "set[Connection]"
    body_bytes: int  # of all requests that are being read or handled
    max_body_bytes: int
    is_closing: bool
    access_log: AccessLog | None
    late: MeshError  # the refusal of a request that does not end in time
    date_line: "DateLine"
    cors: Cors | None
    takes_members: bool  # clients show certificates of the mesh

    @property
    def is_draining(self) -> bool: ...

    def add(self, connection: "Connection") -> None: ...

    def is_crowded(self) -> bool: ...

    def has_room(self, asking: "Connection", more_bytes: int) -> bool: ...

    def admit(self, request: Request) -> None: ...

    async def answer(self, request: Request) -> Reply | ReplyStream: ...

    def refuse(self, error: MeshError, request: Request | None) -> Reply: ...

    def log_access(self, request: Request | None, reply: Reply | ReplyStream | None) -> None: ...

    def flush_soon(self, connection: Channel) -> None: ...


class Connection(asyncio.Protocol):
    """A connection that reads a head or a body (`_request` is set after the head), or handles a request (`_task`).

    Requests are answered in their order. The refusal of unreadable input (`_last_words`) follows the last answer.
    """

    __slots__ = (
        "_ahead",
        "_body",
        "_body_left_bytes",
        "_chunks",
        "_has_asked",
        "_has_ended",
        "_headers",
        "_held_bytes",
        "_is_closing",
        "_is_deaf",
        "_is_reading_paused",
        "_is_receiving",
        "_last_words",
        "_owes_continue",
        "_parser",
        "_request",
        "_server",
        "_since",
        "_stream",
        "_task",
        "_transport",
        "_unread_bytes",
        "_unsent_bytes",
        "_url",
        "_waiting",
        "_watch",
        "_writable",
        "is_full",
        "member",
    )

    def __init__(self, server: ConnectionOwner) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._since = server.now()  # start of the idle time, of the request being read, or of the wait for the reader
        # reading
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._unread_bytes = 0  # of a head or trailers, since the last progress
        self._request: Request | None = None
        self._body: bytes | bytearray = b""
        self._body_left_bytes = 0  # as Content-Length says
        self._chunks: ChunkSizes | None = None  # since the first chunk
        self._is_receiving = False  # a part of a request has come
        self._has_asked = False  # ... ever
        self._owes_continue = False
        self._is_deaf = False  # input is ignored
        self._has_ended = False  # the client sends no more
        self._watch: HalfClosed | None = None
        # waiting
        self._waiting: list[Request] = []  # whole requests, pipelined
        self._ahead: bytes | bytearray = b""  # of further requests, not parsed
        self._is_reading_paused = False
        self._held_bytes = 0  # of bodies: being read, waiting and being handled
        # handling and writing
        self._task: asyncio.Task[None] | None = None
        self._stream: ReplyStream | None = None
        self._last_words: tuple[Reply, bool] | None = None  # the bool: without its body
        self._is_closing = False
        self._writable: asyncio.Event | None = None  # set while a handler waits
        self.is_full = False  # the client reads more slowly than the handler writes
        self.member: ShownIdentity | None = None
        self._unsent_bytes = 0  # while it is full: at the last look

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def has_input(self) -> bool:
        """Return whether bytes of the client have come that the event loop has not brought yet."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._is_deaf:
            return False
        raw = transport.get_extra_info("socket")
        return raw is not None and has_input(raw.fileno())

    def is_asking(self, patience_s: float) -> bool:
        """Return whether a request is on its way, or comes soon: a new client gets `patience_s` for its first one."""
        if self._transport is None or self._is_deaf:
            return False
        is_new = not self._has_asked and self._server.now() - self._since < patience_s
        return self._is_receiving or is_new or self.has_input

    # --- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # the connection is gone already
                _tune(raw)
        if self._server.takes_members and (tls := transport.get_extra_info("ssl_object")).getpeercert():
            self.member = member_of(tls)
        self._server.add(self)
        if self._server.is_closing:
            self.close()
        elif self._server.is_crowded():
            self._refuse(OverloadedError("too many connections", hint="come back later"))

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._task is None and not self._ahead and not self.is_full:
            self._feed(data)
            self._go_on()
        else:
            self._keep_for_later(data)

    def eof_received(self) -> bool:
        """Answer what the client has sent, if it still reads. Return whether the connection stays open for that."""
        transport = self._transport
        if transport is None or self._is_closing:
            return False
        if transport.get_extra_info("sslcontext") is not None:  # a loop's TLS cannot send any more
            self._is_closing = True
            if self._task is not None:
                self.abort()
            return False
        self._has_ended = True
        if self._task is None:
            self._go_on()
        else:
            self._watch_half_closed(transport)
        return not self._is_closing

    def _watch_half_closed(self, transport: asyncio.Transport) -> None:
        """Keep handling while the client may read the reply."""
        is_at_once = self._server.now() - self._since <= AT_ONCE_S
        raw = transport.get_extra_info("socket")
        if raw is None or not (is_at_once or self._can_probe()):
            self.abort()
            return
        wait_s = PROBE_AFTER_S if is_at_once else 0.0
        self._watch = HalfClosed(self._server.loop, raw.fileno(), self._probe, self.abort, wait_s)

    def _can_probe(self) -> bool:
        if self._stream is None:
            return self._parser.get_http_version() != "1.0"  # which has no interim replies
        return self._stream.is_events

    def _probe(self) -> None:
        """Send what a client ignores, because a client that has left answers it with a reset."""
        if self._stream is not None:
            if self._stream.is_events:
                self._stream.write(COMMENT)
        elif self._can_probe() and self._task is not None:
            self.write(CONTINUE)

    def pause_writing(self) -> None:
        self.is_full = True
        self._since = self._server.now()
        self._unsent_bytes = 0

    def resume_writing(self) -> None:
        self.is_full = False
        self._wake_writer()
        self._since = self._server.now()
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_closing = self._is_deaf = True
        self._server.body_bytes -= self._held_bytes
        self._held_bytes = 0
        self._body, self._request, self._last_words = b"", None, None
        self._waiting.clear()
        self._ahead = b""
        self.is_full = False
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._wake_writer()  # a handler that waits to write then sees that the client has left
        if self._task is None:
            self._server.connections.discard(self)
        else:
            self._task.add_done_callback(lambda task: self._server.connections.discard(self))
            self._task.cancel()

    # --- reading -------------------------------------------------------------------------------------------

    def _feed(self, data: bytes | bytearray | memoryview) -> None:
        """Parse `data` up to the end of a request, and keep the rest."""
        if len(data) <= SLICE_BYTES:
            self._parse(data)
            return
        view, at = memoryview(data), 0
        while at < len(view) and not self._waiting and not self._ahead and not self._is_deaf:
            size = max(SLICE_BYTES, self._body_left_bytes)
            self._parse(view[at : at + size])
            at += size
        if at < len(view) and not self._is_deaf:
            self._keep_for_later(view[at:])

    def _parse(self, data: bytes | bytearray | memoryview) -> None:
        self._unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as stop:
            self._refuse(_cause(stop))
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequestError(f"this is no HTTP/1.1 request: {error}"))
        else:
            if self._unread_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
            elif self._request is not None and self._body_left_bytes <= 0:  # chunks are on their way
                self._check_chunk(data)

    def _check_chunk(self, data: bytes | bytearray | memoryview) -> None:
        """Refuse a chunk that is larger than a body may be, before its bytes arrive."""
        if self._chunks is None:
            self._chunks = ChunkSizes()
        if self._chunks.announced_bytes(data, len(self._body)) > self._server.max_body_bytes:
            self._refuse(self._body_too_large())

    def _ignore_upgrade(self, rest: bytes | bytearray | memoryview) -> None:
        """Parse the request again, without its wish for another protocol.

        Java's HttpClient asks for h2c in every first request, and the parser then stops before the body.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidRequestError("this server is no proxy", hint="send requests for itself"))
            return
        kept = "".join([f"{name}: {value}\r\n" for name, value in self._headers if name != "upgrade"])
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self._url, kept.encode("latin-1"))
        self._parser = httptools.HttpRequestParser(self)
        self._unread_bytes = 0
        self._ahead = bytearray(head + bytes(rest))

    def _keep_for_later(self, data: bytes | memoryview) -> None:
        if not self._ahead:
            self._ahead = bytearray()
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES and self._transport is not None and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    # --- httptools' callbacks: an exception ends the parsing and becomes a refusal --------------------------

    def on_message_begin(self) -> None:
        self._since = self._server.now()
        self._is_receiving = self._has_asked = True
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is not None:
            return  # a trailer must not count as a header
        text = value.decode("latin-1")
        if text and text[-1] in " \t":
            text = text.rstrip(" \t")
        self._headers.append((_NAMES.get(name) or name.decode("latin-1").lower(), text))
        if len(self._headers) > MAX_HEADERS:
            raise _head_too_large()

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        parser = self._parser
        if parser.should_upgrade():
            return
        version, is_modern = parser.get_http_version(), True
        path, query = _origin_form(self._url)
        method = parser.get_method().decode("latin-1")
        self._request = request = Request(self, method, path, query, self._headers, self._since)
        if version != "1.1":
            _check_version(version)
            request.is_http_1_0, is_modern = True, False
        length_bytes, expects_continue, encodings = _read_framing(self._headers, is_modern)
        request.keep = is_modern and parser.should_keep_alive()
        self._server.admit(request)
        if length_bytes > self._server.max_body_bytes:
            raise self._body_too_large()
        if not self._server.has_room(self, length_bytes):
            raise _memory_full()
        if encodings:
            request.encodings = read_encodings(encodings)
        self._body_left_bytes = length_bytes
        self._owes_continue = expects_continue

    def on_chunk_header(self) -> None:
        if self._chunks is None:
            self._chunks = ChunkSizes()
        self._chunks.on_header(len(self._body))

    def on_chunk_complete(self) -> None:
        if self._chunks is not None:
            self._chunks.on_complete()

    def on_body(self, data: bytes) -> None:
        size_bytes, server = len(data), self._server
        self._unread_bytes = 0
        self._body_left_bytes -= size_bytes
        self._held_bytes += size_bytes
        server.body_bytes += size_bytes
        if not self._body:
            self._body = data
        elif isinstance(self._body, bytearray):
            self._body += data
        else:
            self._body = bytearray(self._body) + data
        if len(self._body) > server.max_body_bytes:
            raise self._body_too_large()
        if not server.has_room(self, 0):
            raise _memory_full()

    def on_message_complete(self) -> None:
        request = self._request
        if request is None:
            return  # the request asks for another protocol and is parsed again
        request.body = bytes(self._body)
        self._body, self._request = b"", None
        self._body_left_bytes = 0
        self._is_receiving = self._owes_continue = False
        self._since = self._server.now()
        self._waiting.append(request)

    def _body_too_large(self) -> BodyTooLargeError:
        limit = self._server.max_body_bytes
        return BodyTooLargeError(f"the request body is larger than {limit} bytes", hint="send less")

    # --- refusals ------------------------------------------------------------------------------------------

    def _refuse(self, error: MeshError) -> None:
        """Refuse unreadable input after all earlier answers, and hang up. Further input is ignored."""
        if self._is_deaf or self._is_closing:
            return
        self._is_deaf = True
        self.give_back(len(self._body))
        request = self._request
        self._last_words = self._server.refuse(error, request), request is not None and request.method == "HEAD"
        self._body, self._request, self._ahead = b"", None, b""
        self._go_on()

    @property
    def arrival(self) -> Arrival | None:
        """Return what has come of a body that is not complete; None: no body is on its way."""
        if not self._body or self._transport is None:
            return None
        name = self._transport.get_extra_info("peername")
        return Arrival(str(name[0]) if name else "", len(self._body), self._since)

    def give_way(self) -> None:
        """End the request whose body is on its way, because it takes memory that others need."""
        self._refuse(_memory_full())

    def hold(self, size_bytes: int) -> None:
        """Count more bytes of a body. Raise OverloadedError if all requests together then hold too many."""
        if self._transport is not None:  # `connection_lost` gave all back
            self._held_bytes += size_bytes
            self._server.body_bytes += size_bytes
            if not self._server.has_room(self, 0):
                raise _memory_full()

    def give_back(self, size_bytes: int) -> None:
        if self._transport is not None:  # `connection_lost` gave all back
            self._held_bytes -= size_bytes
            self._server.body_bytes -= size_bytes

    def expire(self, now: float, receive_timeout_s: float, keep_alive_s: float) -> None:
        """Hang up on a client that does not finish its request, does not read its reply, or is idle."""
        if self.is_full:
            self._expire_reader(now, keep_alive_s)
            return
        if self._task is not None:
            return
        idle_s = now - self._since
        if self._is_receiving and not self._is_deaf:
            if idle_s > receive_timeout_s:
                self._refuse(self._server.late)
        elif idle_s > keep_alive_s:
            if self._transport is not None and self._transport.get_write_buffer_size():
                self.abort()  # close would wait for the client for ever
            else:
                self.close()

    def _expire_reader(self, now: float, patience_s: float) -> None:
        """Cut off a client that reads nothing of its reply, because a worker waits for the client."""
        unsent_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if unsent_bytes < self._unsent_bytes:
            self._since = now
        elif now - self._since > patience_s:
            log.info("cut off a client that reads no more", extra={"unsent_bytes": unsent_bytes})
            self.abort()
        self._unsent_bytes = unsent_bytes

    # --- handling --------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the next step, unless a request is being handled or the client does not read."""
        while self._task is None and not self._is_closing and not self.is_full:
            if self._waiting:
                request = self._waiting.pop(0)
                self._task = self._server.loop.create_task(self._handle(request))
            elif self._last_words is not None:
                (words, head_only), self._last_words = self._last_words, None
                self.reply(words, keep=True, is_last=True, head_only=head_only)
                self._linger()
            elif self._ahead:
                data, self._ahead = self._ahead, b""
                self._feed(data)
            elif self._has_ended:
                self._finish()
            else:
                break
        if self._owes_continue and self._task is None and not self._is_closing:
            self._owes_continue = False
            self.write(CONTINUE)
        if self._is_reading_paused and len(self._ahead) <= MAX_AHEAD_BYTES and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _finish(self) -> None:
        """End a connection whose client sends no more, and has been answered."""
        if self._is_receiving and not self._is_deaf:
            self._refuse(InvalidRequestError("the request ends too early", hint="send all of it"))
        else:
            self.close()

    async def _handle(self, request: Request) -> None:
        """Answer one request, then continue with the input that came meanwhile."""
        reply: Reply | ReplyStream | None = None
        try:
            reply = await self._server.answer(request)
            self._conclude(request, reply)
        except asyncio.CancelledError:
            self.abort()
            raise
        except Exception:  # the reply cannot be sent
            log.exception("no reply to %s %s", request.method, request.path)
            self.abort()
        finally:
            self.give_back(len(request.body))
            self._task = self._stream = None
            self._since = self._server.now()
            if self._server.access_log is not None:
                self._server.log_access(request, reply)
        self._go_on()

    def _conclude(self, request: Request, reply: Reply | ReplyStream) -> None:
        """Send the reply, or the end of the stream. Hang up if the connection is not to be kept."""
        keep = request.keep and not self._server.is_draining
        if isinstance(reply, Reply) and self._stream is None:
            self.reply(reply, keep, head_only=request.method == "HEAD")
        elif reply is not self._stream or not self._stream.is_ended:
            self.abort()  # the stream broke off, and its handler has not ended it
        elif not (keep and self._stream.is_chunked):
            self.close()  # this also ends a body without chunks

    def reply(self, reply: Reply, keep: bool, *, head_only: bool = False, is_last: bool = False) -> None:
        """Send a whole reply. With `is_last` the reply says that the connection ends, and the caller ends it."""
        has_body = reply.status not in (204, 304)
        length = f"content-type: {reply.content_type}\r\ncontent-length: {len(reply.body)}\r\n" if has_body else ""
        if is_last or not keep:
            length += "connection: close\r\n"
        head = self._head(reply.status, length, reply.headers)
        self.write(head + reply.body if has_body and not head_only else head)
        if not keep:
            self.close()

    def open_stream(self, request: Request, headers: Mapping[str, str], status: int) -> ReplyStream:
        if request.caller is not None and (added := request.caller.reply_headers()):
            headers = {**added, **headers}
        if (cors := self._server.cors) is not None:
            headers = cors.headers(request) | dict(headers)
        is_chunked = not request.is_http_1_0
        framing = "transfer-encoding: chunked\r\n" if is_chunked else ""
        if not request.keep or self._server.is_draining:
            framing += "connection: close\r\n"
        head = self._head(status, framing, headers)
        head_only = request.method == "HEAD"
        self._stream = ReplyStream(
            self, status, headers, head,
            is_chunked=is_chunked, head_only=head_only, flush_soon=self._server.flush_soon,
        )  # fmt: skip
        return self._stream

    def flush(self) -> None:
        if self._stream is None or not (data := self._stream.take()):
            return
        if (transport := self._transport) is not None and not transport.is_closing():
            transport.write(data)

    def _head(self, status: int, framing: str, fields: Mapping[str, str]) -> bytes:
        """Return the head of a reply. Raises ValueError for a header with a line break."""
        if fields:
            lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
            if lines.count("\n") != len(fields) or lines.count("\r") != len(fields):
                raise ValueError(f"a line break in the headers {fields}")
            framing += lines
        return _STATUS_LINES[status] + framing.encode("latin-1", "replace") + self._server.date_line() + b"\r\n"

    # --- writing ---------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def until_writable(self) -> None:
        """Return when the client keeps up again, or has left."""
        if self.is_full:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def _wake_writer(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def close(self) -> None:
        """Send the waiting data, then hang up."""
        self._is_closing = self._is_deaf = True
        if self._transport is not None:
            self._transport.close()

    def _linger(self) -> None:
        """Hang up, but read and discard input for a while."""
        self._is_closing = True
        transport = self._transport
        if transport is not None and transport.can_write_eof() and not transport.is_closing():
            with suppress(OSError):  # the connection is gone already
                transport.write_eof()
        self._server.loop.call_later(LINGER_S, self.close)

    def abort(self) -> None:
        self._is_closing = self._is_deaf = True
        if self._transport is not None:
            self._transport.abort()


def _tune(raw: socket.socket) -> None:
    """Set the options of a TCP socket. Raises OSError."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token must not wait for the ACK of the last one
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:  # macOS has other names
            raw.setsockopt(socket.IPPROTO_TCP, option, value)


def _cause(stop: httptools.HttpParserCallbackError) -> MeshError:
    """Return the error that a callback raised to end the parsing."""
    error = stop.__context__
    if isinstance(error, MeshError):
        return error
    log.error("a request could not be read", exc_info=error)
    return MeshError("the server failed", hint="see its log")


def _memory_full() -> OverloadedError:
    return OverloadedError("the requests in flight fill the memory set aside for them")


def _head_too_large() -> HeadTooLargeError:
    return HeadTooLargeError(
        f"the head of the request is larger than {MAX_HEAD_BYTES >> 10} KiB or {MAX_HEADERS} headers", hint="send less"
    )


def _origin_form(url: bytes) -> tuple[str, str]:
    """Return (path, query) of a request target, which may have scheme and host. Only the path is decoded."""
    target = url.decode("latin-1")
    if target[:1] != "/" and (found := _AUTHORITY.match(target)):
        target = target[found.end() :]
        if target[:1] != "/":
            target = "/" + target
    path, _, query = target.partition("?")
    return (unquote(path, errors="replace") if "%" in path else path), query


def _check_version(version: str) -> None:
    if version != "1.0":
        raise InvalidRequestError(f"this server does not speak HTTP/{version}", hint="send HTTP/1.1")


def _read_framing(headers: list[tuple[str, str]], needs_host: bool) -> tuple[int, bool, str]:
    """Return (bytes of the body, or 0 if not given; whether the client waits for 100 Continue; content encodings).

    The parser has checked that there is one length at most, and none beside chunks.
    Raises InvalidRequestError for errors that the parser does not find.
    """
    hosts, length_bytes, expects_continue, encodings = 0, 0, False, ""
    for name, value in headers:
        if name not in _FRAMING:
            continue
        if name == "host":
            hosts += 1
            if value not in _known_hosts:
                _check_host(value)
        elif name == "content-length":
            length_bytes = int(value)
        elif name == "expect":
            expects_continue = needs_host and value.lower() == "100-continue"
        elif name == "content-encoding":
            encodings = f"{encodings},{value}"
        elif not needs_host:  # an old proxy would pass this on without understanding it
            raise InvalidRequestError("HTTP/1.0 has no transfer-encoding", hint="send a Content-Length")
        elif value.lower() != "chunked":
            raise InvalidRequestError("the only known transfer-encoding is chunked", hint="send the body as it is")
    if hosts > 1 or (needs_host and hosts == 0):
        raise InvalidRequestError(f"the request has {hosts} Host headers", hint="send one")
    return length_bytes, expects_continue, encodings


def _check_host(value: str) -> None:
    """Raise InvalidRequestError if this is no host, with or without a port (RFC 9112, 3.2)."""
    if not _HOST.fullmatch(value):
        raise InvalidRequestError(f"the Host header is {value[:80]!r}", hint="send a host and a port")
    if len(_known_hosts) >= MOST_KNOWN_HOSTS:
        _known_hosts.clear()
    _known_hosts.add(value)


def refusal(error: MeshError, body: bytes | None, headers: Mapping[str, str] | None = None) -> Reply:
    """Return the reply for a failure. `body` has the endpoint's own shape; None: OpenAI's shape."""
    failure = http_failure(error.code)
    merged = dict(headers or {})
    if (seconds := retry_after_s(error)) is not None:
        merged["retry-after"] = str(seconds)
    if failure.status == HTTPStatus.UNAUTHORIZED:
        merged["www-authenticate"] = "Bearer"
    if isinstance(error, UnsupportedEncodingError):
        merged["accept-encoding"] = ACCEPTED
    if isinstance(error, MethodNotAllowedError):
        merged["allow"] = error.allow
    if failure.status >= 500:
        log.warning("replied %d: %s", failure.status, error)
    return Reply(error_body(error) if body is None else body, failure.status, JSON, merged)


class DateLine:
    """The Date header, rewritten once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def __call__(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line
