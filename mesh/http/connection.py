"""One HTTP/1.1 connection: httptools reads it, one request at a time is handled, writes never wait.

While a request is handled the connection goes on being read, because that is how a client's leaving is noticed;
what comes meanwhile (pipelining) is kept, up to a limit.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import httptools

from mesh.http.errors import BodyTooLargeError, HeadTooLargeError, error_body, http_failure, retry_after_s
from mesh.http.request import JSON, Reply, ReplyStream, Request
from protocol.errors import InvalidRequestError, MeshError, OverloadedError

if TYPE_CHECKING:
    from mesh.http.server import Server

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_AHEAD_BYTES = 64 << 10  # of pipelined requests, kept while one is handled
SEND_BUFFER_BYTES = 128 << 10  # the kernel would keep megabytes for a client that does not read
WRITE_BUFFER_BYTES = 64 << 10  # from here on a reply counts as full
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
LINGER_S = 1.0


class Connection(asyncio.Protocol):
    def __init__(self, server: "Server") -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None  # handles the current request
        self._stream: ReplyStream | None = None
        self._stream_head = b""  # goes out with what the stream holds
        self._waiting: deque[tuple[Request, bool]] = deque()  # whole requests, pipelined; with: keep the connection
        self._ahead: list[bytes] = []  # unread bytes of further ones
        self._ahead_bytes = 0
        self._is_reading_paused = False
        self._is_closing = False
        self._keep = True  # the connection, after the current request
        self.writable = asyncio.Event()
        self.writable.set()
        self.since = server.now()  # when it fell idle, or the request being read began
        self._reset()

    def _reset(self) -> None:
        """Ready for the head of a request."""
        self._head_bytes = 0
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._refused: MeshError | None = None

    @property
    def is_lost(self) -> bool:
        return self._transport is None

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def is_receiving(self) -> bool:
        """Part of a request has come."""
        return self._head_bytes > 0 or self._request is not None

    # --- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token must not wait for the last one's ACK
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._server.connections.add(self)
        if self._server.is_crowded():
            self._refuse(OverloadedError("too many connections", hint="come back later"))

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if self._task is not None:
            self._keep_for_later(data)
        else:
            self._feed(data)

    def eof_received(self) -> bool:
        return False  # a client that closes its side has left

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_closing = True
        self._server.connections.discard(self)
        self._release_body()
        self._waiting.clear()
        self._ahead.clear()
        self.writable.set()  # whoever waits to write shall see that it is over
        if self._task is not None:
            self._task.cancel()

    def _feed(self, data: bytes) -> None:
        if self._request is None:
            self._head_bytes += len(data)
            if not self._headers and self._url == b"":
                self.since = self._server.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(InvalidRequestError("this server speaks HTTP/1.1 only", hint="send no Upgrade header"))
        except httptools.HttpParserError as error:
            if not self._is_closing:
                self._refuse(InvalidRequestError(f"this is no HTTP/1.1 request: {error.__cause__ or error}"))
        if self._request is None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        self._start_next()

    def _keep_for_later(self, data: bytes) -> None:
        self._ahead.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > MAX_AHEAD_BYTES and self._transport is not None and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    # --- httptools' callbacks ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers, self._request = b"", [], None
        self._body, self._body_bytes, self._refused = [], 0, None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))
        if len(self._headers) > MAX_HEADERS:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        path, _, query = self._url.partition(b"?")
        method = self._parser.get_method().decode("latin-1")
        shown = unquote(path.decode("latin-1"), errors="replace")
        self._request = request = Request(self, method, shown, query.decode("latin-1"), self._headers)
        length = request.header("content-length") or ""
        if length.isdigit() and int(length) > self._server.max_body_bytes:
            self._refuse_body()
        elif (request.header("expect") or "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        self._server.body_bytes += len(data)
        if self._body_bytes > self._server.max_body_bytes:
            self._refuse_body()
        elif self._server.body_bytes > self._server.max_bodies_bytes:
            self._refuse(OverloadedError("the requests in flight fill the memory set aside for them"))

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._refused is not None:
            return
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self._body_bytes, self._request = [], 0, None
        self._waiting.append((request, self._parser.should_keep_alive()))

    # --- refusals ------------------------------------------------------------------------------------------

    def _refuse_head(self) -> None:
        self._refuse(HeadTooLargeError(f"the head of the request is larger than {MAX_HEAD_BYTES >> 10} KiB"))

    def _refuse_body(self) -> None:
        limit = self._server.max_body_bytes
        self._refuse(BodyTooLargeError(f"the request body is larger than {limit} bytes", hint="send less"))

    def _refuse(self, error: MeshError) -> None:
        """Answer what cannot be read to its end, and hang up. Nothing more is read."""
        if self._refused is not None or self._is_closing:
            return
        self._refused = error
        self._release_body()
        self._server.on_refused(error)
        self._is_closing = True
        if self._task is None:  # else: an earlier request is being answered; its reply must stay whole
            self.reply(refusal(error, None), keep=False, linger=True)

    def _release_body(self) -> None:
        """Give back what was reserved for bodies that nobody will handle."""
        self._server.body_bytes -= self._body_bytes + sum(len(request.body) for request, _ in self._waiting)
        self._body, self._body_bytes = [], 0
        self._waiting.clear()

    def expire(self, error: MeshError) -> None:
        """A request that does not come to its end, or a connection that nobody uses."""
        if self.is_receiving:
            self._refuse(error)
        else:
            self.close()

    # --- handling --------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        if self._task is None and self._waiting and not self._is_closing:
            request, keep = self._waiting.popleft()
            self._task = self._server.loop.create_task(self._handle(request, keep))

    async def _handle(self, request: Request, keep: bool) -> None:
        """Answer one request, then go on with what came meanwhile."""
        try:
            self._keep = keep
            reply = await self._server.answer(request)
            if isinstance(reply, ReplyStream):
                keep = keep and reply.is_chunked  # else nothing but the end of the connection ends the body
            elif self._stream is not None:
                keep = False
                self.abort()  # a failure in the middle of a stream that its handler has not reported
            else:
                self.reply(reply, keep, head_only=request.method == "HEAD")
        except asyncio.CancelledError:
            keep = False
            if self._transport is not None:
                self._transport.abort()
            raise
        finally:
            self._server.body_bytes -= len(request.body)
            self._task = self._stream = None
            self.since = self._server.now()
            if not keep or self._is_closing or self._server.is_closing:
                self.close()
        self._go_on()

    def _go_on(self) -> None:
        if self._is_closing:
            return
        self._start_next()
        while self._task is None and self._ahead and not self._is_closing:
            self._ahead_bytes -= len(self._ahead[0])
            self._feed(self._ahead.pop(0))
        if self._is_reading_paused and not self._ahead and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def reply(self, reply: Reply, keep: bool, *, head_only: bool = False, linger: bool = False) -> None:
        """Send a whole reply. `linger`: the client may be sending still, and would miss a reply that a reset follows."""
        fields = {"content-type": reply.content_type, "content-length": str(len(reply.body)), **reply.headers}
        if reply.status in (204, 304):
            del fields["content-type"], fields["content-length"]
        if not keep:
            fields["connection"] = "close"
        head = self._head(reply.status, fields)
        self.write(head if head_only else head + reply.body)
        if linger:
            self._server.loop.call_later(LINGER_S, self.close)
        elif not keep:
            self.close()

    def open_stream(self, headers: Mapping[str, str], status: int) -> ReplyStream:
        is_chunked = self._parser.get_http_version() != "1.0"
        framing = {"transfer-encoding": "chunked"} if is_chunked else {}
        if not (is_chunked and self._keep):
            framing["connection"] = "close"
        self._stream = ReplyStream(self, status, self._head(status, {**headers, **framing}), is_chunked=is_chunked)
        return self._stream

    def plan_flush(self, head: bytes = b"") -> None:
        """Send what the stream holds at the end of this turn, after `head`."""
        self._stream_head += head
        self._server.flush_soon(self)

    def flush(self, tail: bytes = b"") -> None:
        if self._stream is not None:
            data = self._stream_head + self._stream.take() + tail
            self._stream_head = b""
            if data:
                self.write(data)

    def _head(self, status: int, fields: Mapping[str, str]) -> bytes:
        """Header values must be free of line breaks: they are our own, or were checked."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        return _STATUS_LINES[status] + lines.encode("latin-1", "replace") + self._server.date_line() + b"\r\n"

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send what waits, then hang up."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()


def refusal(error: MeshError, body: bytes | None, headers: Mapping[str, str] | None = None) -> Reply:
    """The reply for a failure; `body` in the endpoint's own shape, None: in OpenAI's."""
    failure = http_failure(error.code)
    merged = dict(headers or {})
    if (seconds := retry_after_s(error)) is not None:
        merged["retry-after"] = str(seconds)
    if failure.status >= 500:
        log.warning("replied %d: %s", failure.status, error)
    return Reply(error_body(error) if body is None else body, failure.status, JSON, merged)


class DateLine:
    """The Date header, written anew once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def __call__(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line
