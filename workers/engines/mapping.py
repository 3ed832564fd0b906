"""Describe how one worker is spread over its GPUs: tp4, tep8, dep16. Pure.

- tpN: every matrix in N parts;
- tepN: attention in N parts, the experts distributed whole;
- depN: each GPU has all of attention and sequences of its own, the experts distributed whole.
"""

import re
from enum import StrEnum

from msgspec import Struct

from kvmesh.protocol.errors import ConfigError

MAX_GPUS = 1024


class MappingKind(StrEnum):
    TP = "tp"
    TEP = "tep"
    DEP = "dep"


class ParallelMapping(Struct, frozen=True, kw_only=True):
    kind: MappingKind
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.kind.value}{self.gpus}"

    @property
    def ranks(self) -> int:
        """Return how many groups of GPUs have sequences of their own. Each computes one prompt at a time."""
        return self.gpus if self.has_ranks else 1

    @property
    def has_ranks(self) -> bool:
        return self.kind is MappingKind.DEP

    @property
    def has_experts_apart(self) -> bool:
        """Return whether each expert is whole on one GPU."""
        return self.kind is not MappingKind.TP

    def share_of_a_rank(self, batch: int) -> int:
        """Return how many of `batch` sequences one rank has, rounded up."""
        return -(-batch // self.ranks)


def parse_mapping(name: str) -> ParallelMapping:
    """Raise ConfigError for a name that is no mapping."""
    found = re.fullmatch(r"(tp|tep|dep)([1-9]\d{0,3})", name.strip().lower())
    if found is None or int(found[2]) > MAX_GPUS:
        raise ConfigError(f"no mapping {name!r}", hint="say tp<n>, tep<n> or dep<n>, n being the worker's GPUs")
    return ParallelMapping(kind=MappingKind(found[1]), gpus=int(found[2]))
