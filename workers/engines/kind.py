"""Describe an engine before it starts. An extension gives an `EngineKind` at the seam `engine`."""

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.protocol.messages import Feature, Role
from kvmesh.workers.engines.mapping import ParallelMapping

SAMPLES = (Feature.COMPLETIONS, Feature.LOGPROBS)  # features of several engines
STEERS = (*SAMPLES, Feature.LOGIT_BIAS, Feature.ALLOWED_TOKENS)

MappingFlags = Callable[[ParallelMapping, int], list[str]]
"""Returns the engine's own flags for a mapping and the most sequences at once (0: the engine decides)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Facts about an engine that are known before it starts."""

    name: str  # the value of --engine
    title: str  # its name in a sentence
    summary: str  # for --help
    folder: str = ""  # below workers/engines; default: the name
    features: tuple[Feature, ...]  # the most it can do; the card of a started worker has the features of that worker
    roles: tuple[Role, ...] = tuple(Role)
    flips: bool = False  # its workers can change their role while they run
    takes: frozenset[str] = frozenset()  # those of `OPTIONAL` that it reads
    package: str = ""  # Python package that has to be installed, "": none
    distributions: tuple[str, ...] = ()  # names under which the package is installed
    install: str = ""  # how to install it
    mapping_flags: MappingFlags | None = None  # for deployments; None: one GPU, and no flags of its own
    is_bundled: bool = False  # our container image can run it
    is_started: bool = True  # the worker starts it; else it runs already and the worker connects to it

    @property
    def opening(self) -> str:
        """The name of the module that opens the engine."""
        return f"kvmesh.workers.engines.{self.folder or self.name}.opening"

    @property
    def has_ranks(self) -> bool:
        """True if one worker can hold several data-parallel ranks (--dp-size)."""
        return "dp_size" in self.takes
