"""Run ZMQ sockets on the event loop, several times faster than zmq.asyncio.

A ZMQ file descriptor is edge triggered: it signals once, and any call on the socket may consume the signal. So every
wake-up reads until there is nothing left, and every send is followed by another look.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence

import zmq

from kvmesh.mesh.address import join_address, split_address
from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)

Frames = list[bytes]

_MAX_SOCKETS = 16_384  # of a process; two for each worker that it hosts or follows. ZMQ's default is 1023
_SLICE_S = 0.001  # about, for one socket before the turn of others
_CLOCK_EVERY = 8  # messages
_PORT_RANGE = re.compile(r"(\d+)-(\d+)")


class LoopSocket:
    """A socket whose messages go to `on_message`: in a turn of the loop at most `budget`, for about a millisecond.

    `on_wake` is called when the socket woke the loop, because a message may be sendable now. It is a hint, and can be
    missed.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Frames], None],
        *,
        on_wake: Callable[[], None] | None = None,
        budget: int = 256,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_wake = on_wake
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._next_look: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._on_readable)
        self.look_soon()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send now. Return False if the socket cannot take the message now; raise zmq.ZMQError if it never will."""
        self.look_soon()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def read_all(self) -> None:
        """Read all messages that have come, however long that takes."""
        while not self._drain():
            pass

    def look_soon(self) -> None:
        """Look at the socket in the next turn of the loop, also without a signal of its descriptor."""
        if self._next_look is None and not self.closed:
            self._next_look = self._loop.call_soon(self._look)

    def close(self) -> None:
        """A second call does nothing."""
        if self.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._next_look is not None:
            self._next_look.cancel()
        self._socket.close()

    def _on_readable(self) -> None:
        self._look()
        if self._on_wake is not None and not self.closed:
            self._on_wake()

    def _look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if not self._drain():
            self.look_soon()

    def _drain(self) -> bool:
        """Read until nothing is left (True) or the turn is used up (False)."""
        end = self._loop.time() + _SLICE_S
        for number in range(self._budget):
            if self.closed:  # by on_message
                return True
            if number % _CLOCK_EVERY == _CLOCK_EVERY - 1 and self._loop.time() > end:
                return False
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                self._on_message(frames)
            except Exception:  # a bug met by one message must not stop the others
                log.exception("a message from %s was lost", self._socket)
        return False


def _bind_first_free(socket: zmq.Socket[bytes], base: str, first: int, last: int) -> None:
    """Raise zmq.ZMQError if no port can be bound: the error of the last one."""
    for port in range(first, last):
        try:
            socket.bind(f"{base}:{port}")
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
    socket.bind(f"{base}:{last}")


def open_socket(
    kind: int,
    *,
    receive: int = 1000,
    send: int = 1000,
    max_bytes: int = -1,
    context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
) -> zmq.Socket[bytes]:
    """Open a socket that closes without waiting, and queues at most so many messages for each peer.

    A peer that sends a message of more than `max_bytes` is disconnected. Without `context` it is the process's own.
    """
    context = context or zmq.Context[zmq.Socket[bytes]].instance()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)  # has an effect only before the first socket
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, receive)
    socket.setsockopt(zmq.SNDHWM, send)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    return socket


def bind_socket(socket: zmq.Socket[bytes], address: str, advertise_host: str | None, *, to: str) -> str:
    """Bind, and return the address for peers. `to` says what for, in the text of the ConfigError.

    A port `5700-5799` in `address` means the first one that is free.
    """
    base, _, port = address.rpartition(":")
    try:
        if (range_ := _PORT_RANGE.fullmatch(port)) is None:
            socket.bind(address)
        else:
            _bind_first_free(socket, base, int(range_[1]), int(range_[2]))
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot {to} on {address}: {error}", hint="choose another port") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    if advertise_host is None or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{join_address(advertise_host, split_address(bound)[1])}"
