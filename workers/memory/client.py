"""A worker's side of the memory service: blocking calls, made by the thread that loads the weights."""

import os
import socket
import struct
import time
from dataclasses import dataclass

from kvmesh.protocol.errors import ConfigError, EngineError, MeshError
from kvmesh.workers.memory.messages import (
    MAX_PACKET_BYTES,
    FromService,
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
    from_service,
    packed,
)

ANSWER_S = 10.0  # for what needs no work
START_S = 2.0  # for a service that starts at the same time as its workers
_START_POLL_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A descriptor of sealed memory, which whoever takes it closes."""

    fd: int
    num_bytes: int


class ImageLease:
    """One image of a memory service. The service keeps the image at least until `close`.

    All methods raise OSError or EngineError when the service is gone, silent or refuses.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(ANSWER_S)
            _connect(self._socket, path)
            if (uid := peer_uid(self._socket)) != os.geteuid():
                raise EngineError(f"the memory service at {path} belongs to user {uid}, this worker to {os.geteuid()}")
        except BaseException:
            self._socket.close()
            raise

    def want(self, key: bytes, label: str, patience_s: float) -> SharedMemory | None:
        """Return the image, after waiting for its writer if it has one; None if this worker is to write it."""
        reply, fd = self._ask(WantImage(key=key, label=label), patience_s)
        return None if isinstance(reply, MayWrite) else _memory_of(reply, fd)

    def space(self, num_bytes: int) -> int:
        """Return a descriptor to write so many bytes to, which the caller closes before `commit`."""
        reply, fd = self._ask(WantSpace(num_bytes=num_bytes), ANSWER_S)
        if not isinstance(reply, Space) or fd is None:
            raise EngineError(_unexpected(reply))
        return fd

    def commit(self) -> SharedMemory:
        """Return the image that this worker has written, sealed."""
        return _memory_of(*self._ask(Wrote(), ANSWER_S))

    def holdings(self) -> Holdings:
        reply, _ = self._ask(WantHoldings(), ANSWER_S)
        if not isinstance(reply, Holdings):
            raise EngineError(_unexpected(reply))
        return reply

    def close(self) -> None:
        """Tell the service that this worker does not need the image any more. A second call does nothing."""
        self._socket.close()

    def _ask(self, message: Told, patience_s: float) -> tuple[FromService, int | None]:
        self._socket.settimeout(patience_s)
        try:
            self._socket.send(packed(message))
            packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
        except TimeoutError as error:
            raise EngineError(f"the memory service gave no answer within {patience_s:g} s") from error
        fd = fds[0] if fds else None
        try:
            if not packet:
                raise EngineError("the memory service ended the connection")
            reply = from_service(packet)
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        if isinstance(reply, NoImage):
            raise EngineError(f"the memory service has no room: {reply.reason}")
        return reply, fd


def _connect(connection: socket.socket, path: str) -> None:
    give_up_s = time.monotonic() + START_S
    while True:
        try:
            connection.connect(path)
            return
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_START_POLL_S)


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


def _memory_of(reply: FromService, fd: int | None) -> SharedMemory:
    if not isinstance(reply, SharedImage) or fd is None:
        raise EngineError(_unexpected(reply))
    return SharedMemory(fd, reply.num_bytes)


def _unexpected(reply: FromService) -> str:
    return f"the memory service answered with {type(reply).__name__}"


def read_holdings(path: str) -> Holdings:
    """Return what the service at `path` holds. Raise ConfigError if none answers."""
    try:
        lease = ImageLease(path)
        try:
            return lease.holdings()
        finally:
            lease.close()
    except (OSError, MeshError) as error:
        raise ConfigError(
            f"no memory service at {path}: {error}", hint="start one: `kvmesh memory --socket`"
        ) from error
