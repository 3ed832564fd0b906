"""The executor seam: runs one forward step over a paged KV cache. The step engine drives it.

Torch and mock engine differ in their executor alone; scheduling, prefix cache, offers and pulls are shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.memory import KvRegion
from protocol.messages import KvLayout, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an executor knows once its model is loaded."""

    layout: KvLayout
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: compute `token_ids`, whose first stands at position `start`.

    The KV of positions < start is in `block_table` already; the step writes that of the new tokens.
    `block_table[i]` holds positions [i * block_size, (i + 1) * block_size).
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


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None  # where the row's sampling asks for it


class Executor(Protocol):
    """All methods block; the step engine calls them one at a time from a thread of its own."""

    def load(self) -> ModelInfo:
        """Read the model. Raises ConfigError if the folder or the device will not do."""

    def allocate_kv(self, num_blocks: int, memory: memoryview | None) -> KvRegion:
        """Make the KV cache: num_blocks * layout.block_bytes, zeroed, in `memory` where one is given."""

    def execute(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Run one step; one result per row, None where the row does not sample."""

    def close(self) -> None: ...
