"""Run the memory service: hand the packets of workers to the shelf, and do what it decides.

It never maps an image itself, and it works on the event loop alone: no packet needs more than a few system calls.
"""

import asyncio
import logging
import os
import socket
import stat
import time
from contextlib import AsyncExitStack
from pathlib import Path

from kvmesh.mesh.exposition import labelled
from kvmesh.mesh.lifecycle import watch_parent
from kvmesh.mesh.telemetry import serve_metrics
from kvmesh.protocol.errors import ConfigError, WireError
from kvmesh.workers.memory.client import peer_uid
from kvmesh.workers.memory.config import MemoryConfig
from kvmesh.workers.memory.messages import (
    MAX_LABEL_CHARS,
    MAX_PACKET_BYTES,
    FromWorker,
    Holdings,
    MayWrite,
    NoImage,
    SharedImage,
    Space,
    Told,
    WantHoldings,
    WantImage,
    WantSpace,
    Wrote,
    from_worker,
    packed,
)
from kvmesh.workers.memory.metrics import ANSWERS, FREED, HELD, read_shelf
from kvmesh.workers.memory.pages import make_space, read_only, seal
from kvmesh.workers.memory.shelf import (
    Cut,
    Finished,
    Free,
    HandOver,
    ImageShelf,
    LetWrite,
    Looked,
    MakeSpace,
    Refuse,
    Seal,
    Sealed,
    ShelfEffect,
    ShelfEvent,
    SpaceWanted,
    UserId,
    UserLeft,
    Wanted,
)

log = logging.getLogger(__name__)

GIB = 1 << 30
MAX_CONNECTIONS = 4096


async def serve(config: MemoryConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Workers keep what they have mapped. Raise ConfigError if the socket cannot be made."""
    watch_parent(stop)
    async with AsyncExitStack() as cleanup:
        cleanup.enter_context(labelled("memory", config.namespace))
        shelf = ImageShelf(int(config.limit_gib * GIB), config.writer_deadline_s)
        HELD.read("memory", lambda: read_shelf(shelf))
        cleanup.callback(HELD.forget, "memory")
        url, close_metrics = serve_metrics(config.host, config.metrics_port, allowed_hosts=config.allowed_hosts)
        cleanup.push_async_callback(asyncio.to_thread, close_metrics)
        counter = ImageCounter(shelf, listening(Path(config.socket)), config.writer_deadline_s)
        cleanup.callback(Path(config.socket).unlink, missing_ok=True)
        cleanup.callback(counter.close)
        log.info("ready", extra={"metrics": url, "socket": config.socket, "limit_gib": config.limit_gib})
        await stop.wait()


def listening(path: Path) -> socket.socket:
    """Return a socket at `path` that only our user can reach. Raise ConfigError if another service is there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            _remove_left(path)
        listener.bind(str(path))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {path}: {error}", hint="give --socket a short path in a folder of your own"
        ) from error
    finally:
        os.umask(before)
    return listener


def _remove_left(path: Path) -> None:
    """Remove the socket of a service that was killed. Raise ConfigError if one still listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"a memory service listens at {path} already", hint="give --socket another path")


class ImageCounter:
    """Serves the connections of workers. `shelf` decides."""

    def __init__(self, shelf: ImageShelf, listener: socket.socket, writer_deadline_s: float) -> None:
        self._shelf = shelf
        self._writer_deadline_s = writer_deadline_s
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._users: dict[UserId, socket.socket] = {}
        self._memory: dict[bytes, int] = {}  # descriptors by key
        self._next_user = 1
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in self._users.values():
            self._loop.remove_reader(connection.fileno())
            connection.close()
        for fd in self._memory.values():
            os.close(fd)
        self._users, self._memory = {}, {}

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left already, or there are no descriptors
            return
        uid = peer_uid(connection)
        if uid != os.geteuid() or len(self._users) >= MAX_CONNECTIONS:
            log.warning("a process of user %d was refused; %d connections are open", uid, len(self._users))
            connection.close()
            return
        connection.setblocking(False)
        user, self._next_user = self._next_user, self._next_user + 1
        self._users[user] = connection
        self._loop.add_reader(connection.fileno(), self._read, user)

    def _read(self, user: UserId) -> None:
        connection = self._users[user]
        try:
            packet = connection.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._end(user)
            return
        try:
            message = from_worker(packet)
        except WireError as error:
            self._cut(user, str(error))
            return
        self._take(user, message)

    def _take(self, user: UserId, message: FromWorker) -> None:
        match message:
            case WantImage(key=key, label=label):
                self._do(Wanted(user, key, label[:MAX_LABEL_CHARS]))
            case WantSpace(num_bytes=num_bytes):
                self._do(SpaceWanted(user, num_bytes))
            case Wrote():
                self._do(Finished(user))
            case WantHoldings():
                held = tuple(self._shelf.held())
                self._tell(user, Holdings(pid=os.getpid(), limit_bytes=self._shelf.limit_bytes, images=held))

    def _do(self, event: ShelfEvent) -> None:
        for effect in self._shelf.on_event(event, time.monotonic()):
            self._carry_out(effect)

    def _carry_out(self, effect: ShelfEffect) -> None:
        match effect:
            case LetWrite(user):
                ANSWERS.labels("write").inc()
                self._loop.call_later(self._writer_deadline_s + 1.0, self._do, Looked())
                self._tell(user, MayWrite())
            case MakeSpace(user, key, num_bytes):
                self._make(user, key, num_bytes)
            case Seal(key):
                self._seal(key)
            case HandOver(user, key, num_bytes):
                self._share(user, key, num_bytes)
            case Refuse(user, reason):
                ANSWERS.labels("refused").inc()
                log.warning("a worker loads its weights by itself: %s", reason)
                self._tell(user, NoImage(reason=reason))
            case Free(key, outcome):
                FREED.labels(outcome).inc()
                log.info("an image is freed", extra={"why": outcome})
                if (fd := self._memory.pop(key, None)) is not None:
                    self._loop.run_in_executor(None, os.close, fd)  # pages take time to free
            case Cut(user, reason):
                ANSWERS.labels("cut").inc()
                self._cut(user, reason)

    def _share(self, user: UserId, key: bytes, num_bytes: int) -> None:
        try:
            fd = read_only(self._memory[key])
        except OSError as error:
            self._tell(user, NoImage(reason=f"there is no descriptor: {error}"))
            return
        ANSWERS.labels("mapped").inc()
        self._tell(user, SharedImage(num_bytes=num_bytes), fd)
        os.close(fd)

    def _make(self, user: UserId, key: bytes, num_bytes: int) -> None:
        try:
            self._memory[key] = fd = make_space(num_bytes)
        except OSError as error:
            self._do(Sealed(key, f"no memory could be made: {error}"))
            return
        self._tell(user, Space(), fd)

    def _seal(self, key: bytes) -> None:
        problem = "" if key in self._memory else "it was finished before it had space"
        if not problem:
            try:
                seal(self._memory[key])
            except OSError as error:
                problem = f"it could not be sealed: {error}"
        self._do(Sealed(key, problem))

    def _tell(self, user: UserId, message: Told, fd: int | None = None) -> None:
        """Send a packet. A worker whose buffer is full, after a handful of packets, does not read: it is cut off."""
        connection = self._users.get(user)
        if connection is None:
            return
        try:
            if fd is None:
                connection.send(packed(message))
            else:
                socket.send_fds(connection, [packed(message)], [fd])
        except OSError as error:
            log.warning("a worker could not be told: %s", error)
            self._loop.call_soon(self._end, user)  # not now: the shelf is in the middle of an event

    def _cut(self, user: UserId, reason: str) -> None:
        log.warning("a worker is cut off: %s", reason)
        self._end(user)

    def _end(self, user: UserId) -> None:
        connection = self._users.pop(user, None)
        if connection is None:
            return
        self._loop.remove_reader(connection.fileno())
        connection.close()
        self._do(UserLeft(user))
