"""What a block pool tells the world: which prefixes it now holds, and which no longer."""

from dataclasses import dataclass
from typing import NamedTuple

from protocol.ids import EngineHash


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other, each full; `parent` precedes the first (None: they start a sequence)."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]  # len(hashes) * block_size
    block_size: int
    lora: str | None = None
    salt: str | None = None
    medium: str = "GPU"  # the engines' word for device memory, also where the device is a CPU


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[EngineHash, ...]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything is gone."""


KvEvent = Stored | Removed | Cleared


class Digest(NamedTuple):
    """Tells two sets of prefixes apart without listing them: see `protocol.hashing.digest_term`."""

    blocks: int
    value: int  # u64
