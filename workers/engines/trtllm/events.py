"""TensorRT-LLM's KV events and statistics, as it answers polls. Pure.

An event is `{"event_id", "window_size", "attention_dp_rank"?, "data": {"type": ...}}`, and its data

- `created`: `num_blocks_per_cache_level`, the GPU's first; one per window size, before all others;
- `stored`: `parent_hash`, `blocks` of `block_hash`, `tokens` of `token_id` and `token_extra_id`, `cache_salt`?;
- `removed`: `block_hashes`;
- `updated`: a block went to another cache level. It can still be reused from there, so this says nothing here.

Block hashes are u64. A model whose layers look back differently far has blocks per window size under the same
hashes: those of the largest one count. Numbers of a rank's events follow each other; TensorRT-LLM drops the oldest ones
that nobody asked for in time, so where a number is missing what is held is no longer known.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash

MAX_BLOCKS = 65_536  # of one event

_U64 = 0xFFFF_FFFF_FFFF_FFFF


class _Token(msgspec.Struct):
    token_id: int
    token_extra_id: int = 0


class _Block(msgspec.Struct):
    block_hash: int
    tokens: list[_Token]
    cache_salt: str | None = None
    mm_keys: list[Any] | None = None


class _Data(msgspec.Struct):
    type: str
    parent_hash: int | None = None
    blocks: list[_Block] = []
    block_hashes: list[int] = []
    num_blocks_per_cache_level: list[int] = []


class _Event(msgspec.Struct):
    data: _Data
    event_id: int | None = None
    window_size: int | None = None
    attention_dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """The news of one rank. `lost`: earlier events are missing, so forget all that was known of the rank."""

    rank: int
    events: tuple[KvEvent, ...] = ()
    lost: bool = False


class TrtllmEventReader:
    """Reads the events of one engine, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next_ids: dict[int, int] = {}  # by rank
        self._window: int | None = None  # the largest
        self.gpu_blocks = 0  # of one rank, known after `created`

    def read(self, raw: object) -> News:
        """Return the news in one event. Raises WireError for anything else."""
        event = _decode(raw)
        data = event.data
        lost = self._is_gap(event)
        if data.type == "created":
            self._on_created(event)
            return News(event.attention_dp_rank, lost=lost)
        if self._window is not None and event.window_size not in (None, self._window):
            return News(event.attention_dp_rank, lost=lost)
        events: tuple[KvEvent, ...] = ()
        if data.type == "stored":
            events = self._stored(data)
        elif data.type == "removed" and data.block_hashes:
            events = (Removed(tuple(_hash(block_hash) for block_hash in data.block_hashes)),)
        return News(event.attention_dp_rank, events, lost)

    def _is_gap(self, event: _Event) -> bool:
        if event.event_id is None:
            return False
        expected = self._next_ids.get(event.attention_dp_rank)
        self._next_ids[event.attention_dp_rank] = event.event_id + 1
        return expected is not None and event.event_id != expected

    def _on_created(self, event: _Event) -> None:
        if event.window_size is not None:
            self._window = max(self._window or 0, event.window_size)
        if event.window_size in (None, self._window) and event.data.num_blocks_per_cache_level:
            self.gpu_blocks = event.data.num_blocks_per_cache_level[0]

    def _stored(self, data: _Data) -> tuple[KvEvent, ...]:
        """Up to the first block that is not full, or of an image: tokens alone do not name that, nor what follows."""
        full: list[_Block] = []
        for block in data.blocks:
            if len(block.tokens) > self._block_size:
                raise WireError(f"a block of {len(block.tokens)} tokens, TensorRT-LLM was given {self._block_size}")
            if len(block.tokens) < self._block_size or block.mm_keys or any(one.token_extra_id for one in block.tokens):
                break
            full.append(block)
        if not full:
            return ()
        return (
            Stored(
                hashes=tuple(_hash(block.block_hash) for block in full),
                parent=None if data.parent_hash is None else _hash(data.parent_hash),
                token_ids=tuple(token.token_id for block in full for token in block.tokens),
                block_size=self._block_size,
                salt=full[0].cache_salt,
            ),
        )


def _decode(raw: object) -> _Event:
    """Dicts, or JSON from older releases."""
    try:
        event = msgspec.convert(json.loads(raw) if isinstance(raw, str | bytes) else raw, _Event)
    except (ValueError, msgspec.MsgspecError) as error:
        raise WireError(f"unreadable event of TensorRT-LLM: {error}") from error
    if len(event.data.blocks) > MAX_BLOCKS:
        raise WireError(f"an event with {len(event.data.blocks)} blocks; at most {MAX_BLOCKS} are read")
    return event


def _hash(value: int) -> EngineHash:
    return EngineHash(value & _U64)


@dataclass(frozen=True, slots=True)
class RankStats:
    """The load of one rank after one step."""

    rank: int
    active: int  # running or waiting for their turn
    waiting: int
    used_blocks: int
    total_blocks: int


def read_stats(raw: object) -> RankStats | None:
    """Return None for statistics without the KV cache. Raise WireError for anything else."""
    try:
        stats = json.loads(raw) if isinstance(raw, str | bytes) else raw
    except ValueError as error:
        raise WireError(f"unreadable statistics of TensorRT-LLM: {error}") from error
    if not isinstance(stats, Mapping):
        raise WireError(f"statistics of TensorRT-LLM that are a {type(stats).__name__}")
    cache = stats.get("kvCacheStats")
    if not isinstance(cache, Mapping) or not isinstance(cache.get("usedNumBlocks"), int):
        return None
    return RankStats(
        rank=_count(stats, "attentionDpRank"),
        active=_count(stats, "numActiveRequests"),
        waiting=_count(stats, "numQueuedRequests"),
        used_blocks=_count(cache, "usedNumBlocks"),
        total_blocks=_count(cache, "maxNumBlocks"),
    )


def _count(stats: Mapping[str, Any], key: str) -> int:
    value = stats.get(key)
    return value if isinstance(value, int) and value >= 0 else 0
