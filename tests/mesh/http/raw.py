"""Provide an application that echoes requests, a server that can be inspected, and clients that send raw bytes."""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any, NamedTuple, NoReturn, cast

from kvmesh.mesh.http.request import Reply, ReplyStream, Request, json_reply
from kvmesh.mesh.http.server import App, HttpLimits, Route, Server
from tests.support.patience import PATIENCE_S

HOST = b"Host: x\r\n"

DEFAULT_LIMITS = HttpLimits()


class Got(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class Handlers:
    """The handlers of the routes. Those that wait are held back by `gate`."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    handled: int = 0

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/echo", self.echo),
            Route("GET", "/echo", self.echo),
            Route("GET", "/parts/{name}/{rest:path}", self.echo),
            Route("GET", "/stream", self.stream),
            Route("POST", "/wait", self.wait),
            Route("GET", "/slow", self.slow),
            Route("GET", "/endless", self.endless),
            Route("GET", "/large", self.large),
            Route("GET", "/status/{status}", self.status),
            Route("GET", "/open", self.echo, is_open=True),
        ]

    async def echo(self, request: Request) -> Reply:
        self.handled += 1
        seen = {
            "method": request.method,
            "path": request.path,
            "query": request.query,
            "params": dict(request.params),
            "headers": request.headers,
            "body": request.body.decode("latin-1"),
            "recognised": request.caller is not None,
        }
        return json_reply(seen)

    async def stream(self, request: Request) -> ReplyStream:
        """Three events, each in a turn of its own."""
        reply = request.open_stream({"content-type": "text/event-stream"})
        for number in range(3):
            reply.write(b"event %d\n" % number)
            await asyncio.sleep(0)
        reply.end(b"end\n")
        return reply

    async def wait(self, request: Request) -> Reply:
        """Wait until the gate opens."""
        self.began.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return json_reply(len(request.body))

    async def slow(self, request: Request) -> ReplyStream:
        """A stream whose end waits for the gate."""
        reply = request.open_stream({})
        reply.write(b"first")
        await self.wait(request)
        reply.end(b"last")
        return reply

    async def endless(self, request: Request) -> NoReturn:
        """Write as much as the client takes, until it leaves."""
        reply = request.open_stream({})
        try:
            while True:
                reply.write(bytes(4096))
                self.handled += 1
                await (reply.until_writable() if reply.is_full else asyncio.sleep(0))
                if reply.is_full:
                    self.began.set()
        finally:
            self.cancelled.set()

    async def large(self, request: Request) -> Reply:
        self.handled += 1
        return Reply(bytes(1 << 20), content_type="application/octet-stream")

    async def status(self, request: Request) -> Reply:
        asked = request.params["status"]
        return Reply(b"body", status=int(asked) if asked in ("204", "304") else 200)


class Site:
    """A running server."""

    def __init__(self, server: Server, port: int, handlers: Handlers) -> None:
        self.server = server
        self.port = port
        self.handlers = handlers

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def talk(self, *segments: bytes) -> bytes:
        """Send the segments one after the other; all that comes until the server hangs up."""
        reader, writer = await self.open()
        try:
            async with asyncio.timeout(PATIENCE_S):
                for segment in segments:
                    writer.write(segment)
                    await writer.drain()
                    await asyncio.sleep(0.002 if len(segments) > 1 else 0)
                return await reader.read()
        finally:
            writer.transport.abort()

    async def ask(self, *segments: bytes, methods: Sequence[str] = ("GET",)) -> list[Got]:
        return read_replies(await self.talk(*segments), methods)

    async def until_clean(self) -> None:
        """Wait until the server holds nothing, after all connections are gone."""
        async with asyncio.timeout(PATIENCE_S):
            while self.server.connections:
                await asyncio.sleep(0)
        assert self.server.body_bytes == 0


@asynccontextmanager
async def serving(
    limits: HttpLimits = DEFAULT_LIMITS,
    tls: ssl.SSLContext | None = None,
    more: Sequence[Route] = (),
    **settings: Any,
) -> AsyncIterator[Site]:
    handlers = Handlers()
    server = Server(App([*handlers.routes(), *more], limits, **settings))
    listener = await server.loop.create_server(server.connect, "127.0.0.1", 0, ssl=tls)
    try:
        yield Site(server, listener.sockets[0].getsockname()[1], handlers)
    finally:
        listener.close()
        await server.close()
        assert (server.body_bytes, server.connections) == (0, set())


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"GET {path} HTTP/{version}\r\nHost: x\r\n{lines}\r\n".encode("latin-1")


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode("latin-1") + body


def chunked(path: str, chunks: Sequence[bytes], *trailers: str) -> bytes:
    pieces = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
    lines = "".join(f"{trailer}\r\n" for trailer in trailers).encode("latin-1")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode("latin-1")
    return head + pieces + b"0\r\n" + lines + b"\r\n"


CLOSE = "Connection: close"


class _Tape(io.BytesIO):
    """Many replies in a row, each read by a reader that believes it to be a socket's last."""

    def makefile(self, mode: str) -> "_Tape":
        return self

    def close(self) -> None:
        pass


def read_replies(data: bytes, methods: Sequence[str] = ("GET",)) -> list[Got]:
    """The replies in `data`, read by the standard library. Further ones are taken for replies to the last method."""
    tape, replies = _Tape(data), []
    while tape.tell() < len(data):
        method = methods[min(len(replies), len(methods) - 1)]
        response = HTTPResponse(cast(Any, tape), method=method)
        response.begin()
        body = response.read()
        headers = [(name.lower(), value) for name, value in response.getheaders()]
        assert len(dict(headers)) == len(headers), headers
        replies.append(Got(response.status, dict(headers), body))
    return replies


class MemoryTransport(asyncio.Transport):
    """A transport that keeps what a connection writes, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False
        self.is_paused = False
        self.unsent_bytes = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True
