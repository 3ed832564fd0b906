"""Names of things in the mesh. Plain types on the wire, distinct types in the code."""

import secrets
import time
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)  # an engine in a process; new on every start, and when it changes its role
BlockHash = NewType("BlockHash", int)  # u64, the tokens of one block alone
SequenceHash = NewType("SequenceHash", int)  # u64, a block and all blocks before it
EngineHash = NewType("EngineHash", int)  # u64, what an engine calls a block in its KV events


def new_request_id(prefix: str = "req") -> RequestId:
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")


def new_worker_id(name: str) -> WorkerId:
    """A worker's id: its name, then a part that no earlier process of that name had."""
    return WorkerId(f"{name}-{int(time.time()) & 0xFFFFFF:06x}{secrets.token_hex(2)}")


def new_generation() -> int:
    """A non-zero u63 that tells one start of a process (or one offer of blocks) from every other."""
    return secrets.randbits(62) | 1 << 62
