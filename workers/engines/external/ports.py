"""Find ports for engines that count on from the first one they are given."""

import socket
from contextlib import ExitStack

from kvmesh.protocol.errors import ConfigError

_TRIES = 64


def free_ports(number: int, host: str = "127.0.0.1") -> int:
    """Return the first of `number` ports in a row on which nobody listens at `host`. Raise ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_TRIES):
        with ExitStack() as held:
            first = 0
            try:
                for offset in range(number):
                    probe = held.enter_context(socket.socket(family))
                    probe.bind((host, first + offset if first else 0))
                    first = first or int(probe.getsockname()[1])
                return first
            except (OSError, OverflowError):
                continue
    raise ConfigError(f"no {number} free ports in a row on {host}", hint="see `ss -tln` for who listens there")
