"""Which worker holds which prefix. Pure; fed by KV events, asked by every placement.

Prompts are matched by *sequence hash*, computed here from the token ids in the events. What an engine calls a
block (its engine hash) only links the events of one worker to each other: two workers may name equal blocks
differently.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.events import Cleared, KvEvent, Removed, Stored
from protocol.hashing import block_hashes, extend_chain, hash_seed
from protocol.ids import EngineHash, SequenceHash, WorkerId


class Holder(NamedTuple):
    """A KV cache of its own: one data-parallel rank of one worker."""

    worker_id: WorkerId
    dp_rank: int


@dataclass(slots=True)
class _Held:
    """What one holder has. Two engine hashes may name the same prefix, hence the counts."""

    names: dict[EngineHash, SequenceHash] = field(default_factory=dict)
    counts: Counter[SequenceHash] = field(default_factory=Counter)


@dataclass(slots=True)
class IndexStats:
    stored_blocks: int = 0
    removed_blocks: int = 0
    orphan_blocks: int = 0  # stored after a parent that is not known: dropped
    unknown_removals: int = 0
    refused_blocks: int = 0  # over the limit of one holder


class PrefixIndex:
    """At most `max_blocks` entries per holder, so that no worker can fill the router's memory."""

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._held: dict[Holder, _Held] = {}
        self._holders: dict[SequenceHash, set[Holder]] = {}
        self.stats = IndexStats()

    def apply(self, holder: Holder, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    self._store(holder, event)
                case Removed():
                    self._remove(holder, event.hashes)
                case Cleared():
                    self.drop(holder)

    def match(self, hashes: Sequence[SequenceHash]) -> dict[Holder, int]:
        """For every holder of a prefix of `hashes` its length in blocks, >= 1."""
        depths: dict[Holder, int] = {}
        active: set[Holder] = set()
        for depth, name in enumerate(hashes):
            here: AbstractSet[Holder] = self._holders.get(name, frozenset())
            remaining = set(here) if depth == 0 else active & here
            for holder in active - remaining:
                depths[holder] = depth
            active = remaining
            if not active:
                return depths
        return depths | dict.fromkeys(active, len(hashes))

    def drop(self, holder: Holder) -> None:
        """Forget all that a holder has."""
        held = self._held.pop(holder, None)
        if held is not None:
            for name in held.counts:
                self._forget(holder, name)

    def drop_worker(self, worker_id: WorkerId) -> None:
        for holder in [holder for holder in self._held if holder.worker_id == worker_id]:
            self.drop(holder)

    def blocks_of(self, holder: Holder) -> int:
        held = self._held.get(holder)
        return 0 if held is None else len(held.counts)

    def content(self, holder: Holder) -> frozenset[SequenceHash]:
        held = self._held.get(holder)
        return frozenset() if held is None else frozenset(held.counts)

    @property
    def num_blocks(self) -> int:
        """Distinct prefixes that anyone holds."""
        return len(self._holders)

    def _store(self, holder: Holder, event: Stored) -> None:
        held = self._held.setdefault(holder, _Held())
        parent = None
        if event.parent is not None and (parent := held.names.get(event.parent)) is None:
            self.stats.orphan_blocks += len(event.hashes)
            return
        if len(held.names) + len(event.hashes) > self._max_blocks:
            self.stats.refused_blocks += len(event.hashes)
            return
        blocks = block_hashes(event.token_ids, event.block_size, hash_seed(event.lora, event.salt))
        for engine_hash, name in zip(event.hashes, extend_chain(parent, blocks), strict=False):
            before = held.names.get(engine_hash)
            if before == name:
                continue
            if before is not None:
                self._uncount(holder, held, before)
            held.names[engine_hash] = name
            held.counts[name] += 1
            self._holders.setdefault(name, set()).add(holder)
            self.stats.stored_blocks += 1

    def _remove(self, holder: Holder, hashes: Iterable[EngineHash]) -> None:
        held = self._held.get(holder)
        for engine_hash in hashes:
            name = None if held is None else held.names.pop(engine_hash, None)
            if held is None or name is None:
                self.stats.unknown_removals += 1
                continue
            self.stats.removed_blocks += 1
            self._uncount(holder, held, name)

    def _uncount(self, holder: Holder, held: _Held, name: SequenceHash) -> None:
        held.counts[name] -= 1
        if held.counts[name] == 0:
            del held.counts[name]
            self._forget(holder, name)

    def _forget(self, holder: Holder, name: SequenceHash) -> None:
        holders = self._holders[name]
        holders.discard(holder)
        if not holders:
            del self._holders[name]
