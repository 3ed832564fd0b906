"""How one worker is spread over its GPUs: tp4, tep8, dep16. Pure.

- tpN: every matrix in N parts;
- tepN: attention in N parts, the experts distributed whole;
- depN: each GPU has all of attention and sequences of its own, the experts distributed whole.
"""

import re
from enum import StrEnum

from msgspec import Struct

from protocol.errors import ConfigError

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
        """Groups of GPUs that have sequences of their own: so many prompts are computed at once."""
        return self.gpus if self.kind == MappingKind.DEP else 1


def parse_mapping(name: str) -> ParallelMapping:
    """Raises ConfigError."""
    found = re.fullmatch(r"(tp|tep|dep)([1-9]\d{0,3})", name.strip().lower())
    if found is None or int(found[2]) > MAX_GPUS:
        raise ConfigError(f"no mapping {name!r}", hint="say tp<n>, tep<n> or dep<n>, n being the worker's GPUs")
    return ParallelMapping(kind=MappingKind(found[1]), gpus=int(found[2]))
