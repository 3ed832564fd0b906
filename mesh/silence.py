"""Notice that the host of a TCP peer no longer answers, long before the kernel gives the connection up by itself.

Only the network counts: the kernel of a peer answers for a process that hangs or that does not read. Without this a
connection that was cut stays for a quarter of an hour where data is on its way, and for ever where none is. After a cut
a connection also sends its next packet only after a wait that has doubled with every try: a new connection is faster.

The option TCP_USER_TIMEOUT would do for all cases. But it also breaks a healthy connection whose peer has not read for
that time, so it is set only where packets are known to get no answer.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

PROBE_S = 1  # a connection that has been silent for so long is probed, and then as often
PROBES = 3  # it breaks after so many without an answer
_TCP_INFO_BYTES = 104
_RETRANSMITS = 2  # offset of the number of times that the oldest packet was sent again
_UNACKED, _LAST_ACK_MS = 8 + 4 * 4, 8 + 4 * 12  # offsets of u32 in struct tcp_info
_AT_ONCE_MS = 1
_RECEIVED_BYTES = 8 + 4 * 24 + 8 * 3  # offset of a u64 in struct tcp_info
_CONNECT_MS = 1500  # a connection that gets no answer for so long fails; the kernel tries a second time after 1 s
_SYN_SENT = 2  # a state, in struct tcp_info and in /proc/self/net/tcp


def probe_when_silent(connection: socket.socket) -> None:
    """Have the kernel probe a silent connection, and break it after some four seconds. Other systems ignore it."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


class Wire(NamedTuple):
    """Hold what the kernel knows of the packets of a connection."""

    is_waiting: bool = False  # packets on their way have not been acknowledged
    is_cut: bool = False  # they get no answer: sent again twice, and nothing was heard for a while
    is_silent: bool = False  # packets are on their way, and nothing was heard for a while


def wire_of(connection: socket.socket, silent_ms: int = 500) -> Wire:
    """Return the state of a connection; nothing was heard on a cut one for `silent_ms`.

    A peer that does not read has acknowledged all packets, so its connection is never cut by this rule.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):
        return Wire()
    if len(info) < _LAST_ACK_MS + 4:
        return Wire()
    (unacked,) = struct.unpack_from("=I", info, _UNACKED)
    (last_ack_ms,) = struct.unpack_from("=I", info, _LAST_ACK_MS)
    is_silent = unacked > 0 and last_ack_ms >= silent_ms
    return Wire(unacked > 0, is_silent and info[_RETRANSMITS] >= 2, is_silent)


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


def received_bytes(host: str) -> int:
    """Return how many bytes this process has received over its TCP connections with a host, an IP address."""
    total = 0
    for connection in connections_of_process():
        with contextlib.suppress(OSError, AttributeError, struct.error):
            if connection.getpeername()[0] == host:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES + 8)
                total += struct.unpack_from("=Q", info, _RECEIVED_BYTES)[0]
    return total


def break_cut_connections(host: str) -> int:
    """Break the connections of this process to a host that are cut, and have the others probed. Return how many broke.

    It is for libraries that have no deadline of their own. The kernel breaks a connection at the next try to send. One
    that is still connecting fails soon: by itself it would try for two minutes, at last once a minute, and then the
    peer would not be reached for so long after a cut has healed.
    """
    broken = 0
    connecting: set[int] | None = None
    for connection in connections_of_process():
        with contextlib.suppress(OSError, AttributeError):  # it listens, or is no longer connected
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _SYN_SENT:
                if connecting is None:
                    connecting = _connecting_to(host)
                if os.fstat(connection.fileno()).st_ino in connecting:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CONNECT_MS)
                    broken += 1
            elif connection.getpeername()[0] == host:
                probe_when_silent(connection)
                if wire_of(connection).is_cut:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _AT_ONCE_MS)
                    broken += 1
    return broken


def _connecting_to(host: str) -> set[int]:
    """Return the inodes of sockets that are connecting to a host, which no call on such a socket tells."""
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError):
            words = struct.Struct(f"={'I' if family == socket.AF_INET else '4I'}")
            address = "".join(f"{word:08X}" for word in words.unpack(socket.inet_pton(family, host)))
            with open(f"/proc/self/net/{name}", encoding="ascii") as table:
                for line in table:
                    fields = line.split()
                    if fields[3] == f"{_SYN_SENT:02X}" and fields[2].startswith(f"{address}:"):
                        found.add(int(fields[9]))
    return found
