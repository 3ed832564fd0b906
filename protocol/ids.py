"""Define the ids of the mesh: plain types on the wire, distinct types in the code."""

import os
import secrets
import time
from collections.abc import Iterator
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)  # an engine in a process; new on every start, and when it changes its role
BlockHash = NewType("BlockHash", int)  # u64, the tokens of one block alone
SequenceHash = NewType("SequenceHash", int)  # u64, a block and all blocks before it
EngineHash = NewType("EngineHash", int)  # u64, what an engine calls a block in its KV events


_DRAW_BYTES = 12
_DRAWS_AT_ONCE = 256
_draws: Iterator[bytes] = iter(())


def draw() -> bytes:
    """Return 12 random bytes of the system. A supply of them is fetched at once, because every request needs some.

    Several threads may call this: a step of a list's iterator is atomic.
    """
    global _draws
    for drawn in _draws:
        return drawn
    supply = os.urandom(_DRAW_BYTES * _DRAWS_AT_ONCE)
    _draws = draws = iter([supply[at : at + _DRAW_BYTES] for at in range(0, len(supply), _DRAW_BYTES)])
    return next(draws)


def _forget_draws() -> None:
    global _draws
    _draws = iter(())


if hasattr(os, "register_at_fork"):  # two processes must not draw the same bytes
    os.register_at_fork(after_in_child=_forget_draws)


def new_request_id(prefix: str = "req") -> RequestId:
    return RequestId(f"{prefix}-{draw().hex()}")


def new_worker_id(name: str) -> WorkerId:
    """Return a worker's id: its name, then a part that no earlier process of that name had."""
    return WorkerId(f"{name}-{int(time.time()) & 0xFFFFFF:06x}{secrets.token_hex(2)}")


def new_generation() -> int:
    """Return a non-zero u63 that is unique to one start of a process, or to one offer of blocks."""
    return secrets.randbits(62) | 1 << 62
