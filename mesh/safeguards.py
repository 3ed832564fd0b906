"""Switch safeguards off, one at a time, to show that they are needed. For `kvmesh lab faults --without NAME` alone.

The environment variable KVMESH_WITHOUT names them, comma-separated. It is read once, at import; code asks `is_off` at
import or at start and keeps the answer, so that a request pays nothing.
"""

import os
from typing import Literal, get_args

from kvmesh.protocol.errors import ConfigError

VARIABLE = "KVMESH_WITHOUT"
Safeguard = Literal[
    "nonce",  # a KV offer that ended is not read
    "lease_expiry",  # offers and bookings that nobody ends are ended
    "replay",  # lost KV events are found and asked for
    "migration",  # a stream whose worker is lost continues on another one
    "avoidance",  # a worker that failed a request gets none for a while
    "deadline",  # a request ends at its deadline
    "credit",  # nobody sends more than a reader takes
    "progress_watch",  # an engine that makes no step is noticed
]
SAFEGUARDS: tuple[str, ...] = get_args(Safeguard)


def read_switched_off(value: str) -> frozenset[str]:
    """Return the safeguards that are named. Raises ConfigError for an unknown one."""
    names = frozenset(name.strip() for name in value.split(",") if name.strip())
    if unknown := sorted(names - set(SAFEGUARDS)):
        raise ConfigError(f"{VARIABLE}={value}: no safeguard {unknown[0]!r}", hint=f"one of: {', '.join(SAFEGUARDS)}")
    return names


_OFF = read_switched_off(os.environ.get(VARIABLE, ""))


def is_off(name: Safeguard) -> bool:
    return name in _OFF
