"""Promises about what HTTP clients send: requests in any number of pieces, and bodies of calls."""

import asyncio
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from kvmesh.frontend.anthropic.shapes import MessagesRequest
from kvmesh.frontend.openai.shapes import ChatRequest, CompletionRequest
from kvmesh.frontend.responses.shapes import ResponsesRequest
from kvmesh.mesh.http.request import Reply, Request, json_reply, utf8_text
from kvmesh.mesh.http.server import App, HttpLimits, Route, Server
from kvmesh.protocol.errors import InvalidRequestError
from tests.fuzz.surfaces.short import must_be_short
from tests.mesh.http.raw import MemoryTransport, read_replies

LIMITS = HttpLimits(max_body_bytes=20_000, max_bodies_bytes=50_000)
STATUSES = {200, 204, 400, 404, 405, 413, 415, 429, 431, 503, 505}
MOST_TURNS = 1000


class _Errors(logging.Handler):
    """Collects what the server logs as its own error, and lines that are more than one."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            self.found.append(text)


@cache
def _site() -> tuple[asyncio.AbstractEventLoop, App, _Errors]:
    async def echo(request: Request) -> Reply:
        return json_reply([request.method, request.path, request.query, request.body.decode("latin-1")])

    errors = _Errors()
    log = logging.getLogger("kvmesh.mesh.http")
    log.propagate = False
    log.setLevel(logging.DEBUG)
    log.addHandler(errors)
    routes = [Route("POST", "/echo", echo), Route("GET", "/echo", echo), Route("GET", "/p/{name}/{rest:path}", echo)]
    return asyncio.new_event_loop(), App(routes, LIMITS), errors


def http_requests(data: bytes) -> None:
    """Any cutting gives the same replies, each reply is whole, nothing is held after it, and nothing fails inside."""
    if not data:
        return
    cut, data = data[0], data[1:]
    loop, app, errors = _site()
    whole = loop.run_until_complete(_served(app, [data]))
    pieces = loop.run_until_complete(_served(app, [data[:cut], data[cut : 3 * cut], data[3 * cut :]]))
    assert not errors.found, errors.found
    assert pieces == whole, (pieces, whole)
    assert {status for status, _, _ in whole} <= STATUSES, whole


async def _served(app: App, pieces: Sequence[bytes]) -> list[Any]:
    server = Server(app)
    connection, transport = server.connect(), MemoryTransport()
    connection.connection_made(transport)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(MOST_TURNS):
        if transport.is_closed or not (connection.is_busy or connection._waiting or connection._ahead):
            break
        await asyncio.sleep(0)
    assert not connection.is_busy
    connection.connection_lost(None)
    await server.close()
    assert (server.body_bytes, server.connections) == (0, set())
    written = bytes(transport.written).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    if _may_be_head(pieces):
        return []  # replies without bodies cannot be told apart here
    return [(reply.status, reply.headers.get("allow"), reply.body) for reply in read_replies(written)]


def _may_be_head(pieces: Sequence[bytes]) -> bool:
    data = b"".join(pieces)
    return b"HEAD" in data or b"OPTIONS" in data


BODIES = (ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest)


class _NoChannel:
    """Counts nothing: the body of a request in these tests belongs to no connection."""

    def give_back(self, size_bytes: int) -> None:
        pass


def api_bodies(data: bytes) -> None:
    """A body is refused by InvalidRequestError, or it is a request that can be written and read again."""
    if not data:
        return
    kind = BODIES[data[0] % len(BODIES)]
    request = Request(_NoChannel(), "POST", "/", "", [], 0.0)
    request.body = data[1:]
    try:
        found = request.json(kind)
    except InvalidRequestError as error:
        must_be_short(error, 2000)
        return
    assert msgspec.json.encode(found)
    utf8_text(data[1:])


def queries(data: bytes) -> None:
    """A query is read or refused."""
    request = Request(_NoChannel(), "GET", "/", data.decode("latin-1"), [], 0.0)
    try:
        found = request.query
    except InvalidRequestError:
        return
    assert len(found) <= 100
