"""Have the kernel break a TCP connection whose peer's host no longer answers.

Only the network counts: the kernel of a peer answers for a process that hangs. Without these options a connection that
was cut stays for a quarter of an hour where data is on its way, and for ever where none is. After a cut a connection
also sends its next packet only after a wait that has doubled with every try: a new connection is faster.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

PROBE_S = 1  # a connection that has been silent for so long is probed, and then as often
SILENCE_S = 1.5  # without an answer for so long the connection breaks


def limit_silence(connection: socket.socket) -> None:
    """Break the connection when the peer's host has not answered for some two seconds. Other systems ignore it."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))


def connections_of_process() -> Iterator[socket.socket]:
    """Yield a copy of every socket of this process that is connected over IP. Each is closed after its turn."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection


def limit_silence_of(host: str) -> int:
    """Do so for every connection of this process to a host, also of libraries. Return how many there are."""
    found = 0
    for connection in connections_of_process():
        with contextlib.suppress(OSError):  # it listens, or is no longer connected
            if connection.getpeername()[0] == host:
                limit_silence(connection)
                found += 1
    return found
