"""The executor seam: runs one forward step over a paged KV cache. The step engine drives it.

Torch and mock engine differ in their executor alone; scheduling, prefix cache, offers and pulls are shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.tiers.store import DeviceBlocks
from kvmesh.protocol.messages import Feature, KvLayout, Role, SamplingParams, TokenLogprob
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.guides import Guides, Matcher


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts that an executor knows once its model is loaded."""

    layout: KvLayout
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    features: tuple[Feature, ...] = ()  # beside GUIDED
    loras: tuple[str, ...] = ()
    guides: Guides | None = None  # None: it cannot be held to a guide
    pace: "Pace | None" = None  # None: a step takes the time that it takes, in a thread
    start_s: float = 0.0  # it takes so much longer until the engine is ready
    roles: tuple[Role, ...] = tuple(Role)  # that it can have
    capacity: float = 1.0  # as in EngineInfo
    kv_settings: str = ""  # what changes KV beside the model's files and the layout


@dataclass(slots=True)
class Row:
    """A sequence's share of a step: compute `token_ids`, the first of which is at position `start`.

    The KV of positions < start is in `block_table` already; the step writes the KV of the new tokens. `block_table[i]`
    holds positions [i * block_size, (i + 1) * block_size).
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool  # choose the token after the last one; else the row only fills the KV cache
    sampling: SamplingParams
    prompt: Sequence[int]  # all prompt tokens, for the penalties
    output: Sequence[int]  # all tokens of the answer so far; its length numbers the random draw
    banned: Sequence[int] = ()  # tokens that must not be chosen now (stop tokens below min_tokens)
    guide: Matcher | None = None  # only tokens that it allows are chosen, whatever else the row asks for
    embed: bool = False  # a vector of the prompt instead of a token: `sample` says when
    lora: str | None = None
    scored_from: int | None = None  # the logprobs of the prompt's tokens from this one on are wanted; None: of none

    @property
    def scored_tokens(self) -> range:
        """Return the numbers of the prompt's tokens whose logprobs this row can tell, if they are wanted.

        What the model knows at position i is the logprobs of token i + 1.
        """
        if self.scored_from is None:
            return range(0)
        return range(max(self.start + 1, self.scored_from), min(self.start + len(self.token_ids) + 1, len(self.prompt)))


class Sampled(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None  # where the row's sampling asks for it


class Embedded(NamedTuple):
    vector: bytes  # float32 little endian, of length 1


class Scored(NamedTuple):
    """The result of a row whose prompt's logprobs are wanted."""

    logprobs: tuple[TokenLogprob, ...]  # one for each of the row's `scored_tokens`
    sampled: Sampled | None  # where the row samples


Result = Sampled | Embedded | Scored | None  # of a row: None where it has nothing to tell


class Pace(Protocol):
    """The pace of an executor that computes next to nothing: its steps run on the event loop, after `keep` has
    returned.
    """

    async def keep(self, rows: Sequence[Row]) -> None: ...

    def rest(self) -> None:
        """There is nothing to compute until the next step begins."""

    def pull_s(self, num_tokens: int) -> float:
        """The least time that the KV of so many tokens takes to come from a prefill worker."""

    def tier_s(self, num_tokens: int, tier: Tier) -> float:
        """The least time that the KV of so many tokens takes to or from a tier below the device."""


class Executor(Protocol):
    """All methods block; the step engine calls them one at a time, from a thread of its own unless there is a pace."""

    def load(self) -> ModelInfo:
        """Read the model. Raises ConfigError if the folder or the device cannot be used."""

    def allocate_kv(self, num_blocks: int, memory: memoryview | None) -> KvRegion:
        """Make the KV cache: num_blocks * layout.block_bytes, zeroed, in `memory` where one is given."""

    def execute(self, rows: Sequence[Row]) -> Sequence[Result]:
        """Run one step; one result per row. For a row whose guide allows no token, any will do."""

    def close(self) -> None: ...


@runtime_checkable
class CopiesBlocks(Protocol):
    """An executor whose KV cache is not always in host memory."""

    def device_blocks(self) -> DeviceBlocks:
        """Return the copier of single blocks of the KV cache, which has been made. Copies may run beside a step."""
