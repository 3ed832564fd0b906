"""Ask one endpoint over HTTP/1.1 with kept connections, on bare protocols: little of the machine goes to the client."""

import asyncio
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvmesh.commands.bench.reading import CUT, NO_CONNECTION, TIMEOUT, UNREADABLE, StreamReading
from kvmesh.protocol.errors import ConfigError

MOST_ERROR_BYTES = 4096  # of an answer that is no stream


class EndpointClient:
    """Holds the connections to one endpoint."""

    def __init__(self, url: str, path: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a server", hint="give one like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        target = parts.path.rstrip("/").removesuffix("/v1") + path
        self._head = f"POST {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"
        self._idle: list[_StreamConnection] = []

    async def open(self, count: int) -> None:
        """Open connections before the clock starts. A server that is not there is found by the requests."""
        try:
            self._idle += await asyncio.gather(*[self._connect() for _ in range(count)])
        except OSError:
            return

    async def ask(self, body: bytes, reading: StreamReading, timeout_s: float) -> float:
        """Send a request and read its answer into `reading`. Return when it was sent (`time.perf_counter`)."""
        request = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        sent_s = time.perf_counter()
        connection: _StreamConnection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    is_kept, connection = await self._take()
                    await connection.ask(request, reading)
                    if not (is_kept and connection.is_silent):
                        break  # a server may close a kept connection while the request is on its way
                    connection.close()
            reading.end(connection.status, connection.broken, bytes(connection.body))
        except TimeoutError:
            reading.end(0, TIMEOUT)
            if connection is not None:
                connection.close()
        except OSError as error:
            reading.end(0, NO_CONNECTION)
            reading.detail = str(error)[:200]
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        if connection is not None and not connection.is_closed:
            self._idle.append(connection)
        return sent_s

    async def _take(self) -> "tuple[bool, _StreamConnection]":
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return True, connection
        return False, await self._connect()

    async def _connect(self) -> "_StreamConnection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _StreamConnection(loop), self._host, self._port, ssl=self._ssl
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _StreamConnection(asyncio.Protocol):
    """One request at a time. Each read has one time, which all events have that end in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._reading = StreamReading()
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self.status = 0
        self.broken = ""
        self.body = bytearray()  # of an answer that is no stream
        self.is_closed = False
        self.is_silent = True  # nothing of the answer has come

    def ask(self, request: bytes, reading: StreamReading) -> asyncio.Future[None]:
        self._reading, self._done = reading, self._loop.create_future()
        self.status, self.broken, self.is_silent = 0, "", True
        self.body.clear()
        if self.is_closed:
            self._finish(CUT)
        else:
            self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._finish(CUT)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self.is_silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish(UNREADABLE)
            self.close()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self._reading.feed(body, self._now_s)
        elif len(self.body) < MOST_ERROR_BYTES:
            self.body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._finish("")

    def _finish(self, broken: str) -> None:
        if self._done is not None and not self._done.done():
            self.broken = broken
            self._done.set_result(None)
