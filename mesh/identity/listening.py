"""Accept connections of members of the mesh, and nobody else's.

Handshakes are bounded in number and time. A peer without TLS is told why it is refused; the log says it once per host.
"""

import asyncio
import errno
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable

from kvmesh.mesh.address import cannot_listen
from kvmesh.mesh.identity.credentials import GOODBYE_S, HANDSHAKE_S, Credentials
from kvmesh.mesh.identity.metrics import HANDSHAKES
from kvmesh.mesh.identity.problems import handshake_problem

log = logging.getLogger(__name__)

MOST_HANDSHAKES = 256  # under way; of more, the oldest is given up: a member's takes milliseconds
MOST_AT_ONCE = 64  # accepted in one turn of the loop, so that other connections go on between two turns
MAX_HOSTS = 1024  # that are remembered as told
NO_FILE_S = 1.0  # until the next try to accept, where the process may open no more files
BACKLOG = 2048
_TLS = b"\x16\x03"  # the beginning of a client's first record


class ToldOnce:
    """Remembers what was said already, so that the log says it once. Of too many, the oldest are forgotten."""

    def __init__(self, most: int = MAX_HOSTS) -> None:
        self._most = most
        self._told: OrderedDict[str, None] = OrderedDict()

    def is_new(self, what: str) -> bool:
        if what in self._told:
            self._told.move_to_end(what)
            return False
        self._told[what] = None
        if len(self._told) > self._most:
            self._told.popitem(last=False)
        return True


class MemberListener:
    """Listens on a port, and makes a protocol by `connect` for each client whose handshake succeeds."""

    def __init__(
        self,
        credentials: Credentials,
        connect: Callable[[], asyncio.BaseProtocol],
        *,
        refusal: bytes,
        with_probes: bool = False,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Take `refusal`, which a peer without TLS is sent in its own protocol."""
        self._credentials = credentials
        self._connect = connect
        self._refusal = refusal
        self._with_probes = with_probes
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._opening: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._told = ToldOnce()
        self._pause: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; return the port. Raises ConfigError."""
        try:
            found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=reuse_port)
                listener.setblocking(False)
                self._sockets.append(listener)
        except OSError as error:
            await self.close()
            raise cannot_listen(host, port, error) from error
        self._resume()
        return int(self._sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop accepting. Connections that are open already stay."""
        if self._pause is not None:
            self._pause.cancel()
        for listener in self._sockets:
            self._loop.remove_reader(listener)
            listener.close()
        self._sockets = []
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening)

    def _resume(self) -> None:
        self._pause = None
        for listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                client, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._wait_for_files(error)
                return
            client.setblocking(False)
            opening = self._loop.create_task(self._open(client, str(address[0])), name="open a connection")
            self._opening[opening] = None
            opening.add_done_callback(self._forget)
            if len(self._opening) > MOST_HANDSHAKES:
                next(iter(self._opening)).cancel("too many handshakes")

    def _forget(self, opening: asyncio.Task[None]) -> None:
        self._opening.pop(opening, None)

    def _wait_for_files(self, error: OSError) -> None:
        log.error("cannot accept a connection: %s", error)
        for listener in self._sockets:
            self._loop.remove_reader(listener)
        if self._pause is None:
            self._pause = self._loop.call_later(NO_FILE_S, self._resume)

    async def _open(self, client: socket.socket, host: str) -> None:
        """Make the connection of a client, or refuse it. Takes the socket over."""
        outcome = "failed"
        try:
            async with asyncio.timeout(self._handshake_s):
                first = await self._first_bytes(client)
                if not first:
                    outcome = "left"
                elif first == _TLS:
                    await self._shake_hands(client)
                    outcome = "ok"
                    return
                else:
                    outcome = "plain"
                    self._say(host, "it does not use TLS", "start it with --mesh-tls")
                    await self._loop.sock_sendall(client, self._refusal)
        except TimeoutError:
            outcome = "slow"
            self._say(host, f"its handshake did not end in {self._handshake_s:g} s", "")
        except OSError as error:
            self._say(host, *handshake_problem(error))
        except asyncio.CancelledError:
            outcome = "crowded"
            raise
        finally:
            HANDSHAKES.labels(outcome).inc()
            if outcome != "ok":
                client.close()

    async def _shake_hands(self, client: socket.socket) -> None:
        context = self._credentials.server_context(with_probes=self._with_probes)
        await self._loop.connect_accepted_socket(
            self._connect, client, ssl=context, ssl_handshake_timeout=self._handshake_s, ssl_shutdown_timeout=GOODBYE_S
        )

    async def _first_bytes(self, client: socket.socket) -> bytes:
        """Return the first two bytes that come, and leave them in the socket. b"" if the client has left."""
        while True:
            try:
                first = client.recv(len(_TLS), socket.MSG_PEEK)
            except BlockingIOError:
                first = None
            if first == b"" or (first is not None and (len(first) == len(_TLS) or not _TLS.startswith(first))):
                return first
            if first is not None:  # one byte: the socket stays readable, so nothing says when the second has come
                await asyncio.sleep(0.01)
                continue
            readable: asyncio.Future[None] = self._loop.create_future()
            self._loop.add_reader(client, _set, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(client)

    def _say(self, host: str, why: str, hint: str) -> None:
        if self._told.is_new(f"{host} {why}"):
            log.warning("refusing connections from %s: %s%s", host, why, f"; {hint}" if hint else "")


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
