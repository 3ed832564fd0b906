"""The types of facts about a server. Pure.

A `ServerKind` says how servers of one kind differ from others: workers/engines/attached/kinds.py has all of them. An
`AttachedServer` has the facts that one server reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.protocol.messages import Feature, GenerateRequest, Role

Body = dict[str, Any]  # of a request, to be written as JSON


@dataclass(frozen=True, slots=True)
class EventSource:
    """The address where one data-parallel rank publishes its KV events."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The way in which a SGLang server was started."""

    mode: str  # prefill, decode, or "null": both
    transfer: str  # mooncake, nixl, ...
    bootstrap_port: int


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The names of a server's load metrics."""

    running: str
    waiting: str
    cache_usage: str


@dataclass(frozen=True, slots=True)
class ServerLoad:
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # share of the KV blocks that running requests hold


@dataclass(frozen=True, slots=True)
class Probe:
    """A question about the server, and how its answer is added to the facts."""

    paths: Sequence[str]  # asked in order until one answers 200
    read: Callable[["AttachedServer", bytes, str], "AttachedServer"]  # also takes the server's host; raises WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """The differences between servers of one kind and others."""

    name: str
    owner: str = ""  # their `owned_by` in /v1/models
    features: tuple[Feature, ...] = (Feature.COMPLETIONS,)  # of those that generate
    honours: frozenset[str]  # parameters that they do not drop
    fields: Callable[[GenerateRequest, int], Body]  # of /v1/completions, beside those that all servers take
    max_seed: int = 0x7FFF_FFFF
    takes_token_ids: bool = True  # as the prompt
    returns_token_ids: bool = False
    takes_stream_options: bool = True
    salts_embeddings: bool = False  # /v1/embeddings takes `cache_salt`
    metrics_prefix: str = ""  # of their own metrics; "": none are passed on
    load_metrics: LoadMetrics | None = None
    probes: Sequence[Probe] = ()
    transfer: Callable[[Role, "AttachedServer"], str]  # its name; "": both halves run there; raises ConfigError
    counts_stream_tokens: bool = False  # takes stream_options.continuous_usage_stats


@dataclass(frozen=True, slots=True)
class AttachedServer:
    """The facts that one server told. None: it did not say."""

    kind: ServerKind
    model: str  # as the server calls it
    loras: tuple[str, ...] = ()
    root: str = ""  # where it has the model from
    context_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    slots: int | None = None  # sequences at once
    event_sources: Mapping[int, EventSource] = field(default_factory=dict)  # by rank
    disaggregation: Disaggregation | None = None
    generates: bool = True
    embeds: bool = False

    @property
    def features(self) -> tuple[Feature, ...]:
        generates = self.kind.features if self.generates else ()
        return (*generates, Feature.EMBEDDINGS) if self.embeds else generates
