"""Serve routes on a TCP port or a Unix socket."""

import asyncio
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvmesh.mesh.address import cannot_listen, join_address
from kvmesh.mesh.http.accepting import Burst
from kvmesh.mesh.http.browsers import BrowserPolicy, policy_of
from kvmesh.mesh.http.connection import Connection, DateLine, refusal
from kvmesh.mesh.http.cors import Cors, is_preflight
from kvmesh.mesh.http.door import PLAIN_REFUSAL, Door, bare
from kvmesh.mesh.http.errors import MethodNotAllowedError, NotFoundError, RequestTimeoutError, error_body
from kvmesh.mesh.http.files import make_room_for_files
from kvmesh.mesh.http.request import AccessLog, Channel, Reply, ReplyStream, Request
from kvmesh.mesh.identity.listening import MemberListener
from kvmesh.mesh.memory import give_back_free_memory
from kvmesh.mesh.room import Room
from kvmesh.mesh.telemetry import ACCESS_LOG
from kvmesh.protocol.errors import ConfigError, MeshError

log = logging.getLogger(__name__)
access_log = logging.getLogger(ACCESS_LOG)

Handler = Callable[[Request], Awaitable[Reply | ReplyStream]]
Guard = Callable[[Request], None]
ErrorBody = Callable[[MeshError], bytes]
CLIENT_GONE = 499  # status in the access log if the client left before the end of its reply
REQUEST_ID_HEADER = "x-request-id"
SHUTDOWN_S = 1.0  # at the end: time for requests to finish
FLUSH_S = 2.0  # ... for clients to read the rest of complete replies, in all
CANCEL_S = 0.5  # ... for cancelled handlers to end, after that
SPARE_FILES = 256  # of this process, besides the connections of clients
FEW_CONNECTIONS = 1000  # a limit below this is worth a warning
MANY_CONNECTIONS = 256  # after whose end free memory is given back
FAIR_S = 2.0  # in which a body may arrive, however many others wait for memory
TLS_HANDSHAKE_S = 10.0
TLS_GOODBYE_S = 2.0  # for the client to close too
FIRST_ASK_S = 1.0  # in which a client that has just connected sends its request
LOOK_S = 0.02  # between looks whether connections are idle
LONG_BODY_BYTES = 256 << 10  # a handler reads so much at once, which holds the event loop up for milliseconds
LONG_BODY_PAUSE_S = 0.002  # before each long body, in which the event loop belongs to the other requests
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Route:
    """A route. In `path`, `{name}` stands for one part, and `{name:path}` at the end for the rest."""

    method: str
    path: str
    handler: Handler
    error_body: ErrorBody = error_body
    is_open: bool = False  # reached without an API key


Refusal = Callable[[MeshError, Request | None, Route | None], Reply]


def plain_refusal(error: MeshError, request: Request | None, route: Route | None) -> Reply:
    """Return the reply for a failure. Without `request` its head was not read, without `route` it has none."""
    return refusal(error, route.error_body(error) if route is not None else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    max_body_bytes: int = 16 << 20
    max_bodies_bytes: int = 1 << 30  # of all requests in flight together
    max_connections: int = 20_000
    receive_timeout_s: float = 60.0  # for a request to arrive
    keep_alive_s: float = 75.0  # of a connection without a request, or whose client does not read
    sweep_s: float = 5.0  # between looks for expired connections, while there are connections


@dataclass(slots=True)
class App:
    """The routes of a listener, and the hooks around them."""

    routes: Sequence[Route]
    limits: HttpLimits = HttpLimits()
    guard: Guard | None = None  # raises MeshError for a request that may not pass; sees only the head
    on_reply: Callable[[str, int], None] | None = None  # gets the route's path and the status of every reply
    is_draining: Callable[[], bool] | None = None  # if True, no connection is kept after its reply
    access_log: AccessLog | None = None  # takes the fields of every request
    cors: Cors | None = None  # None: no page of another origin may call
    allowed_hosts: str = ""  # further names that browsers may use for a port without a guard, as AllowedHosts
    refusal: Refusal = plain_refusal  # makes the reply for a failure that no handler has answered
    _exact: dict[str, dict[str, Route]] = field(default_factory=dict)
    _patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = field(default_factory=list)
    _anywhere: dict[str, Route] = field(default_factory=dict)  # a route of every method

    def __post_init__(self) -> None:
        patterns: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            table = patterns if "{" in route.path else self._exact
            table.setdefault(route.path, {})[route.method] = route
        self._anywhere = {route.method: replace(route, path="other") for route in self.routes}
        self._patterns = [(_pattern(path), methods) for path, methods in patterns.items()]

    def find(self, request: Request) -> Route:
        """Return the route of a request. Raises NotFoundError, MethodNotAllowedError."""
        methods = self._exact.get(request.path)
        if methods is None:
            methods = self._find_methods(request)
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            if request.method == "OPTIONS":
                return Route("OPTIONS", next(iter(methods.values())).path, partial(self._tell_methods, methods))
            raise MethodNotAllowedError(
                f"{request.path[:200]} does not take {request.method}", allowed=_allowed(methods)
            )
        return route

    def _find_methods(self, request: Request) -> dict[str, Route]:
        """Return the routes of a path with parameters, or with a slash at its end. Raise NotFoundError."""
        path = request.path
        if path[-1:] == "/":
            path = path[:-1]
            if (methods := self._exact.get(path)) is not None:
                return methods
        for pattern, methods in self._patterns:
            if found := pattern.fullmatch(path):
                request.params = found.groupdict()
                return methods
        is_for_all = request.path == "*" or (self.cors is not None and is_preflight(request))
        if request.method == "OPTIONS" and is_for_all and self._anywhere:
            return self._anywhere
        raise NotFoundError(f"there is no {request.path[:200]!r} here")

    async def _tell_methods(self, methods: Mapping[str, Route], request: Request) -> Reply:
        """Answer OPTIONS; a browser asks so whether a page may send its request."""
        allowed = _allowed(methods)
        headers = {"allow": ", ".join(allowed)}
        if self.cors is not None:
            headers |= self.cors.preflight_headers(request, allowed)
        return Reply(status=204, headers=headers)

    def find_or_none(self, request: Request) -> Route | None:
        try:
            return self.find(request)
        except MeshError:
            return None


def _allowed(methods: Iterable[str]) -> list[str]:
    """Return the methods of a path whose routes have `methods`."""
    found = {*methods, "OPTIONS"}
    return sorted(found | {"HEAD"} if "GET" in found else found)


def _pattern(path: str) -> re.Pattern[str]:
    def part(found: re.Match[str]) -> str:
        return f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})"

    literal = re.split(r"(\{\w+(?::path)?\})", path)
    return re.compile(
        "".join(
            re.sub(r"\{(\w+)(:path)?\}", part, piece) if piece.startswith("{") else re.escape(piece)
            for piece in literal
        ),
        re.DOTALL,
    )


class Server:
    """The connections of one listener, and the state that they share."""

    def __init__(self, app: App, door: Door | None = None, browsers: BrowserPolicy | None = None) -> None:
        """Serve an application; with `door`, to members of the mesh as the table of rights says.

        `browsers` says what a port that anybody may use refuses.
        """
        self.takes_members = door is not None
        self._door = door
        self._browsers = browsers
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.connections: set[Connection] = set()
        self.max_body_bytes = app.limits.max_body_bytes
        self.max_bodies_bytes = app.limits.max_bodies_bytes
        self.body_bytes = 0  # of all requests that are being read or handled
        self.max_connections = app.limits.max_connections
        self.is_closing = False
        self.is_leaving = False  # no connection is kept after its reply
        self.access_log = app.access_log
        self.late: MeshError = RequestTimeoutError(
            f"the request did not arrive within {app.limits.receive_timeout_s:g} s"
        )
        self.date_line = DateLine()
        self.cors = app.cors
        self._app = app
        self._sweep: asyncio.TimerHandle | None = None
        self._unflushed: list[Channel] = []
        self._most_connections = 0  # since memory was given back
        self._long_bodies = asyncio.Lock()

    def flush_soon(self, connection: Channel) -> None:
        """Flush the stream of `connection` at the end of this turn."""
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            try:
                connection.flush()
            except Exception:  # the streams of other handlers go on
                log.exception("a stream cannot be written")
                connection.abort()

    def connect(self) -> Connection:
        return Connection(self)

    def add(self, connection: Connection) -> None:
        """Add an established connection: a TLS handshake may lie between `connect` and this."""
        self.connections.add(connection)
        if self._sweep is None and not self.is_closing:
            self._sweep = self.loop.call_later(self._app.limits.sweep_s, self._expire)

    @property
    def is_draining(self) -> bool:
        return self.is_closing or self.is_leaving or (self._app.is_draining is not None and self._app.is_draining())

    def is_crowded(self) -> bool:
        return len(self.connections) > self.max_connections

    def has_room(self, asking: Connection, more_bytes: int) -> bool:
        """Return whether `more_bytes` of a body fit. Bodies of others that come slowly give way."""
        while self.body_bytes + more_bytes > self.max_bodies_bytes:
            if (slowest := self._longest_arrival(asking)) is None:
                return False
            slowest.give_way()
        return True

    def _longest_arrival(self, asking: Connection) -> Connection | None:
        """Return the connection whose body holds most for longest, of the host with the most; None: all are quick."""
        now = self.now()
        coming: Room[Connection] = Room(0, self.max_bodies_bytes)
        for connection in self.connections:
            if connection is asking or (arrival := connection.arrival) is None:
                continue
            if now - arrival.since_s > FAIR_S:
                coming.hold(connection, arrival.host, arrival.held_bytes, arrival.since_s, anew=False)
        return coming.who_gives_way("", now)

    def make_room(self) -> None:
        """Let this process open a file for every connection; if the system refuses, take fewer connections."""
        wanted = self.max_connections
        possible = max(1, make_room_for_files(wanted + SPARE_FILES) - SPARE_FILES)
        if possible < wanted:
            self.max_connections = possible
            log.log(
                logging.WARNING if possible < FEW_CONNECTIONS else logging.DEBUG,
                "at most %d clients can connect, not %d, because the process may open no more files; "
                "raise its hard limit (`ulimit -Hn`, LimitNOFILE=)",
                possible,
                wanted,
            )

    def admit(self, request: Request) -> None:
        """Check the head of a request, before the body takes memory. Raises MeshError."""
        if self._browsers is not None:
            self._browsers.check(request.method, request.headers)
        if self._door is not None:
            self._door.check(request, self._app.find_or_none(request))
        guard = self._app.guard
        if guard is None or request.method == "OPTIONS":  # a browser sends no key with a preflight
            return
        if not ((route := self._app.find_or_none(request)) and route.is_open):
            guard(request)

    async def answer(self, request: Request) -> Reply | ReplyStream:
        """Return the reply to a request. A failure that the handler raises becomes a reply here, and nowhere else."""
        route: Route | None = None
        try:
            route = self._app.find(request)
            if request.encodings:
                await request.decode_body(self.max_body_bytes)
            if len(request.body) > LONG_BODY_BYTES:
                async with self._long_bodies:  # several that begin in one turn would add up
                    await asyncio.sleep(LONG_BODY_PAUSE_S)
            reply = await route.handler(request)
            if self._door is not None and request.member is None:
                reply = bare(reply)
        except MeshError as error:
            reply = self._app.refusal(error, request, route)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            reply = self._app.refusal(MeshError("the server failed", hint="see its log"), request, route)
        if isinstance(reply, Reply):
            self._complete(request, reply)
        self._count(route, reply)
        return reply

    def refuse(self, error: MeshError, request: Request | None) -> Reply:
        """Return the reply to input that is not read to its end. `request` is set if the head was read."""
        log.info("refused a request before it was read: %s", error)
        route = self._app.find_or_none(request) if request is not None else None
        reply = self._app.refusal(error, request, route)
        if request is not None:
            self._complete(request, reply)
        self._count(route, reply)
        if self.access_log is not None:
            self.log_access(request, reply)
        return reply

    def _complete(self, request: Request, reply: Reply) -> None:
        """Add the headers that every whole reply has."""
        give_id_back(request, reply)
        if request.caller is not None:
            reply.headers = dict(request.caller.reply_headers()) | dict(reply.headers)
        if self.cors is not None:
            reply.headers = self.cors.headers(request) | dict(reply.headers)

    def _count(self, route: Route | None, reply: Reply | ReplyStream) -> None:
        if self._app.on_reply is not None:
            self._app.on_reply(route.path if route is not None else "other", reply.status)

    def log_access(self, request: Request | None, reply: Reply | ReplyStream | None) -> None:
        """Log one line for a request, without its query and headers, which may hold secrets."""
        sent_bytes = reply.sent_bytes if isinstance(reply, ReplyStream) else len(reply.body) if reply else 0
        fields: dict[str, object] = {"status": reply.status if reply is not None else CLIENT_GONE, "bytes": sent_bytes}
        if request is not None:
            fields |= {
                "method": request.method,
                "path": request.path[:200],
                "duration_ms": round((self.now() - request.since) * 1e3, 3),
                **request.log_fields(),
            }
        if reply is not None and (request_id := reply.headers.get(REQUEST_ID_HEADER)):
            fields["request_id"] = request_id
        if self.access_log is not None:
            self.access_log(fields)

    def _expire(self) -> None:
        """Hang up on clients that take too long. Runs while there are connections."""
        limits, now = self._app.limits, self.now()
        self._sweep = self.loop.call_later(limits.sweep_s, self._expire) if self.connections else None
        for connection in list(self.connections):
            connection.expire(now, limits.receive_timeout_s, limits.keep_alive_s)
        self._most_connections = max(self._most_connections, len(self.connections))
        if self._most_connections >= MANY_CONNECTIONS and len(self.connections) < self._most_connections / 2:
            self._most_connections = len(self.connections)
            give_back_free_memory()

    async def let_go(self) -> None:
        """Hang up on idle connections. A request that is on its way is answered; its reply ends the connection.

        Return when no request is on its way any more.
        """
        while True:
            asking = False
            for connection in list(self.connections):
                if connection.is_busy:
                    continue
                if connection.is_asking(FIRST_ASK_S):
                    asking = True
                else:
                    connection.close()
            if not asking:
                return
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Hang up on idle connections at once, on busy ones after SHUTDOWN_S, on clients that read after FLUSH_S."""
        began = self.now()
        self.is_closing = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            if not (connection.is_busy or connection.has_input):
                connection.close()
        await self._until(lambda: not any(c.is_busy or c.has_input for c in self.connections), began + SHUTDOWN_S)
        for connection in list(self.connections):
            if connection.is_busy:
                connection.abort()
        await self._until(lambda: not self.connections, began + FLUSH_S)
        for connection in list(self.connections):
            connection.abort()
        await self._until(lambda: not self.connections, self.now() + CANCEL_S)
        if self.connections:
            log.warning("%d cancelled handlers still run", len(self.connections))

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition() and self.now() < deadline:  # noqa: ASYNC110 - three times in a server's life
            await asyncio.sleep(0.01)


def log_line(fields: dict[str, object]) -> None:
    """Write a line of the access log among the lines of the service."""
    access_log.info("request", extra=fields)


def client_request_id(request: Request) -> str | None:
    """Return the client's own id, if it is safe for logs and headers."""
    text = request.header(REQUEST_ID_HEADER) or ""
    return text if _SANE_ID.fullmatch(text) else None


def give_id_back(request: Request, reply: Reply) -> None:
    """Add the client's id to the reply, unless the handler has set one."""
    if REQUEST_ID_HEADER not in reply.headers and (sent := client_request_id(request)) is not None:
        reply.headers = {**reply.headers, REQUEST_ID_HEADER: sent}


class Leaving:
    """Lets the owner of a listener stop the listener before its block ends."""

    def __init__(self) -> None:
        self._followed: list[tuple[asyncio.Server, Burst, Server]] = []

    def follow(self, listener: asyncio.Server, burst: Burst, server: Server) -> None:
        """Take what `leave` stops."""
        self._followed.append((listener, burst, server))

    async def leave(self) -> None:
        """Take no new clients, so that they go elsewhere at once; return when the others ask for nothing more."""
        for listener, burst, server in self._followed:
            server.is_leaving = True
            await burst.stop()
            listener.close()
            await burst.until_open()
            await server.let_go()


@asynccontextmanager
async def listening(
    app: App,
    host: str,
    port: int,
    *,
    advertise_host: str = "",
    tls: ssl.SSLContext | None = None,
    door: Door | None = None,
    reuse_port: bool = False,
    leaving: Leaving | None = None,
) -> AsyncIterator[str]:
    """Serve on a TCP port while the block runs; yields the URL. A client that leaves cancels its handler.

    With `door`, only members of the mesh are served. A port with neither door nor guard refuses strangers' web pages
    (mesh/http/browsers.py). Port 0 takes a free one. Raises ConfigError if the address cannot be used.
    """
    if door is not None:
        async with _listening_to_members(app, host, port, advertise_host, door, reuse_port) as url:
            yield url
        return
    server = Server(app, browsers=_browser_policy(app, host, advertise_host, tls))
    server.make_room()
    secured: dict[str, Any] = {}
    if tls is not None:
        secured = {"ssl": tls, "ssl_handshake_timeout": TLS_HANDSHAKE_S, "ssl_shutdown_timeout": TLS_GOODBYE_S}
    burst = Burst(server.connect, secured)

    def accept() -> Connection:
        burst.accept()
        return server.connect()

    try:
        how = {"backlog": 2048, "reuse_port": reuse_port or None, **secured}
        listener = await server.loop.create_server(accept, host, port, **how)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    try:
        burst.follow(listener)
        if leaving is not None:
            leaving.follow(listener, burst, server)
        scheme = "http" if tls is None else "https"
        bound = listener.sockets[0].getsockname()[1]
        yield f"{scheme}://{join_address(advertise_host or host, bound)}"
    finally:
        listener.close()
        await burst.close()
        await server.close()


def _browser_policy(app: App, host: str, advertise_host: str, tls: ssl.SSLContext | None) -> BrowserPolicy | None:
    """Return what a port refuses that asks for no key; None if it asks for keys, which no stranger's page knows."""
    if app.guard is not None:
        return None
    return policy_of(app.allowed_hosts, (host, advertise_host), app.cors, is_tls=tls is not None)


@asynccontextmanager
async def _listening_to_members(
    app: App, host: str, port: int, advertise_host: str, door: Door, reuse_port: bool
) -> AsyncIterator[str]:
    server = Server(app, door)
    server.make_room()
    listener = MemberListener(door.credentials, server.connect, refusal=PLAIN_REFUSAL, with_probes=door.answers_probes)
    bound = await listener.start(host, port, reuse_port=reuse_port)
    try:
        yield f"https://{join_address(advertise_host or host, bound)}"
    finally:
        await listener.close()
        await server.close()


@asynccontextmanager
async def listening_unix(app: App, path: Path) -> AsyncIterator[str]:
    """Serve on a Unix socket while the block runs; yields `unix:<path>`. Whoever may open the file may connect.

    A socket that a killed process left at `path` is replaced. Raises ConfigError if the path cannot be used.
    """
    server = Server(app)
    try:
        listener = await server.loop.create_unix_server(server.connect, str(path))
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error}", hint="choose another directory") from error
    try:
        yield f"unix:{path}"
    finally:
        listener.close()
        await server.close()
        with suppress(FileNotFoundError):  # an event loop of a later Python has removed it
            os.unlink(path)
