"""Define the events by which a cache reports the prefixes that it holds now, and those that it has dropped."""

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.protocol.ids import EngineHash


@dataclass(frozen=True, slots=True)
class Stored:
    """Full blocks that follow each other were stored. `parent` precedes the first; None: it starts a sequence."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]  # len(hashes) * block_size
    block_size: int
    lora: str | None = None
    salt: str | None = None
    medium: str = "GPU"  # the engines' word for device memory, also on a CPU


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[EngineHash, ...]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache has dropped all blocks."""


KvEvent = Stored | Removed | Cleared


class Digest(NamedTuple):
    """A hash of a set of prefixes: two caches compare their sets without listing them (hashing.digest_term)."""

    blocks: int
    value: int  # u64
