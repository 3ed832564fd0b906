"""Find ports for servers of other projects and for processes that are told their port."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 10_000
_TRIES = 200
_draw = random.SystemRandom()  # two processes of the tests must not draw the same ports


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens."""
    return free_ports_in_a_row(1)


def free_ports_in_a_row(count: int) -> int:
    """Return the first of `count` ports in a row on which nobody listens.

    The kernel gives none of them to somebody else before the server listens: all are below the range that it takes
    ports of outgoing connections and of `port 0` from.
    """
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(_TRIES):
        first = _draw.randrange(_LOWEST, highest - count)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError(f"no {count} free ports in a row between {_LOWEST} and {highest}")
