"""Track which KV blocks are free, held or cached. Pure: no clock, no I/O, no tensor; serves every engine of ours.

A block is *free* (has no content), *held* (has references) or *cached* (has no reference, but a prefix that the next
prompt may share). Invariants, checked by the property test:

1. Every block is exactly one of free, held, cached.
2. A prefix is cached in at most one block: `commit` merges a second one into the first.
3. If a block is held or cached under a sequence hash, its parent's hash is cached too. The pool therefore always
   announces a set of whole prefixes; eviction takes only leaves, the least recently used first.
4. The announced events, replayed, give exactly the committed prefixes, and `digest` is the digest of those.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import TIER_MARK, digest_term
from kvmesh.protocol.ids import EngineHash, SequenceHash

_FEW = 16


def digest_terms(hashes: Sequence[int]) -> int:
    """Return the sum of `kvmesh.protocol.hashing.digest_term` (of the device tier) over `hashes`, mod 2**64."""
    if not hashes:
        return 0
    if len(hashes) < _FEW:
        return sum(map(digest_term, hashes))
    mixed = np.array(hashes, np.uint64) + np.uint64(TIER_MARK)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


_U64 = 0xFFFF_FFFF_FFFF_FFFF
_AT_ONCE = 256


class PoolExhaustedError(Exception):
    """The pool has fewer free or evictable blocks than were asked for. The caller queues or preempts."""


@dataclass(slots=True)
class _Block:
    refs: int = 0
    hash: SequenceHash | None = None  # set when the block is full and committed
    parent: SequenceHash | None = None
    children: int = 0  # committed blocks whose parent this is
    last_used: int = 0  # the pool's tick at the last release
    tokens: tuple[int, ...] = ()
    lora: str | None = None
    salt: str | None = None
    version: int = 0  # of the content: counts how often a committed prefix was forgotten


class CommittedBlock(NamedTuple):
    """A committed block as somebody who copies it needs it. It is the same block while its version is."""

    block_id: int
    version: int
    name: SequenceHash
    parent: SequenceHash | None
    tokens: tuple[int, ...]
    lora: str | None
    salt: str | None


@dataclass(slots=True)
class PoolJournal:
    """The blocks that a pool has committed, and the prefixes that it has evicted, since the journal was read."""

    committed: list[int] = field(default_factory=list)
    evicted: list[SequenceHash] = field(default_factory=list)


@dataclass(slots=True)
class _StoredRun:
    """Stored blocks that follow each other, and become one event."""

    parent: SequenceHash | None
    hashes: list[SequenceHash]
    tokens: list[int]
    lora: str | None
    salt: str | None

    def goes_on_with(self, parent: SequenceHash | None, lora: str | None, salt: str | None) -> bool:
        return self.hashes[-1] == parent and self.lora == lora and self.salt == salt


_News = _StoredRun | list[SequenceHash] | Cleared  # a list: removed
_CLEARED = Cleared()


class BlockPool:
    """A pool of blocks 0..num_blocks-1 of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first
        self._by_hash: dict[SequenceHash, int] = {}
        self._evictable: list[tuple[int, int]] = []  # heap of (last_used, block id), checked when popped
        self._num_cached = 0  # committed blocks without references
        self._tick = 0
        self._events: list[_News] = []  # neighbours are merged where possible
        self._digest = 0  # sum of the terms of _by_hash, without _came and _went; taken mod 2**64 where it is read
        self._came: list[SequenceHash] = []  # not summed up yet: many at once cost a tenth of one by one
        self._went: list[SequenceHash] = []
        self.journal: PoolJournal | None = None  # for whoever keeps copies; its owner empties it after each step
        self.num_allocated = 0  # blocks that `allocate` has given

    @property
    def available_blocks(self) -> int:
        """The number of blocks that `allocate` can give now: the free ones and, by invariant 3, every cached one."""
        return len(self._free) + self._num_cached

    @property
    def cached_blocks(self) -> int:
        return self._num_cached

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def held_blocks(self) -> int:
        return self.num_blocks - self.available_blocks

    @property
    def digest(self) -> Digest:
        """The digest of all committed prefixes, also of those that `take_events` has not returned yet."""
        self._sum_up()
        return Digest(len(self._by_hash), self._digest & _U64)

    def match(self, hashes: Sequence[SequenceHash]) -> list[int]:
        """Take a reference on the longest cached prefix of `hashes`; return its blocks, in order."""
        matched: list[int] = []
        for name in hashes:
            block_id = self._by_hash.get(name)
            if block_id is None:
                break
            matched.append(block_id)
        self.acquire(matched)
        return matched

    def peek(self, hashes: Sequence[SequenceHash]) -> int:
        """Return the length in blocks of the longest cached prefix of `hashes`, without taking a reference."""
        depth = 0
        for name in hashes:
            if name not in self._by_hash:
                break
            depth += 1
        return depth

    def has_room(self, hashes: Sequence[SequenceHash], count: int) -> bool:
        """Return whether the pool can give `count` blocks that begin with the longest cached prefix of `hashes`."""
        matched = [self._by_hash[name] for name in hashes[: self.peek(hashes)]]
        to_reuse = sum([self._blocks[block_id].refs == 0 for block_id in matched])
        return count - len(matched) <= self.available_blocks - to_reuse

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, and evict prefixes where needed. Raises PoolExhaustedError, and then takes none."""
        if count > self.available_blocks:
            raise PoolExhaustedError(f"{count} blocks wanted, {self.available_blocks} of {self.num_blocks} left")
        while len(self._free) < count:
            self._evict_one()
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._blocks[block_id].refs = 1
        self.num_allocated += count
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are held or cached."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0:
                if block.hash is None:
                    raise ValueError(f"block {block_id} is free, it cannot be shared")
                self._num_cached -= 1
            block.refs += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference from each block of a sequence, given in sequence order."""
        self._tick += 1
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0:
                raise ValueError(f"block {block_id} is released more often than it was taken")
            block.refs -= 1
            if block.refs:
                continue
            if block.hash is None:
                self._free.append(block_id)
                continue
            block.last_used = self._tick
            self._num_cached += 1
            if not block.children:
                self._offer_to_evictor(block_id)

    def commit(
        self,
        block_id: int,
        name: SequenceHash,
        previous: int | None,
        tokens: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
    ) -> int:
        """Share a full, held block as prefix `name`; return the block to use from now on.

        `previous` is the block before it in the same sequence, None for the first. If the prefix is cached already, the
        returned block is another one: the reference moves there and `block_id` is free again, so that equal prefixes
        are kept once. After a `clear` in mid-sequence `previous` has no name; then the block stays private, because
        its prefix could not be announced.
        """
        block = self._blocks[block_id]
        if block.refs == 0:
            raise ValueError(f"block {block_id} is not held, it cannot be committed")
        parent = None if previous is None else self._blocks[previous].hash
        if block.hash == name or (previous is not None and parent is None):
            return block_id
        known = self._by_hash.get(name)
        if known is not None:
            self.acquire([known])
            self.release([block_id])
            return known
        if block.hash is not None:
            raise ValueError(f"block {block_id} is committed under another name already")
        if previous is not None:
            self._blocks[previous].children += 1
        block.hash, block.parent, block.tokens = name, parent, tuple(tokens)
        block.lora, block.salt = lora, salt
        self._by_hash[name] = block_id
        self._came.append(name)
        if len(self._came) >= _AT_ONCE:
            self._sum_up()
        if self.journal is not None:
            self.journal.committed.append(block_id)
        events = self._events
        last = events[-1] if events else None
        if type(last) is _StoredRun and last.goes_on_with(parent, lora, salt):
            last.hashes.append(name)
            last.tokens += block.tokens
        else:
            events.append(_StoredRun(parent, [name], list(block.tokens), lora, salt))
        return block_id

    def clear(self) -> None:
        """Forget every prefix. Held blocks stay held, but are not shared from now on."""
        for block_id in self._by_hash.values():
            block = self._blocks[block_id]
            if block.refs == 0:
                self._free.append(block_id)
            self._forget(block)
        self._by_hash.clear()
        self._evictable.clear()
        self._num_cached = 0
        self._digest = 0
        self._came.clear()
        self._went.clear()
        self._events.append(_CLEARED)

    def committed(self, block_id: int) -> CommittedBlock | None:
        """Return what a block holds now, None if it has no committed prefix."""
        block = self._blocks[block_id]
        if block.hash is None:
            return None
        return CommittedBlock(block_id, block.version, block.hash, block.parent, block.tokens, block.lora, block.salt)

    def block_of(self, name: SequenceHash) -> int | None:
        """Return the block that holds a prefix."""
        return self._by_hash.get(name)

    def is_unchanged(self, block: CommittedBlock) -> bool:
        """Return whether a block has kept its content since `committed` returned it."""
        return self._blocks[block.block_id].version == block.version

    def next_victims(self, count: int) -> list[int]:
        """Return the `count` cached blocks that would be evicted next, in order. Nothing changes."""
        heap = self._evictable.copy()  # only what is popped is looked at: a pool may be large
        lost: dict[int, int] = {}  # children that would be gone
        victims: dict[int, None] = {}
        while heap and len(victims) < count:
            last_used, block_id = heapq.heappop(heap)
            block = self._blocks[block_id]
            is_leaf = block.hash is not None and block.refs == 0 and block.children == lost.get(block_id, 0)
            if not is_leaf or block.last_used != last_used or block_id in victims:
                continue
            victims[block_id] = None
            if (parent := block.parent) is None:
                continue
            parent_id = self._by_hash[parent]
            lost[parent_id] = lost.get(parent_id, 0) + 1
            block = self._blocks[parent_id]
            if block.refs == 0 and block.children == lost[parent_id]:
                heapq.heappush(heap, (block.last_used, parent_id))
        return list(victims)

    def take_events(self) -> list[KvEvent]:
        """Return the changes since the last call. Stored blocks that follow each other become one event."""
        if not self._events:
            return []
        news, self._events = self._events, []
        return [self._event(each) for each in news]

    def snapshot(self) -> list[KvEvent]:
        """Return events that rebuild the present content, parents before children."""
        children: dict[SequenceHash | None, list[int]] = {}
        for block_id in self._by_hash.values():
            children.setdefault(self._blocks[block_id].parent, []).append(block_id)
        runs: list[_StoredRun] = []
        pending = list(reversed(children.get(None, [])))
        while pending:
            block = self._blocks[pending.pop()]
            assert block.hash is not None
            last = runs[-1] if runs else None
            if last is not None and last.goes_on_with(block.parent, block.lora, block.salt):
                last.hashes.append(block.hash)
                last.tokens += block.tokens
            else:
                runs.append(_StoredRun(block.parent, [block.hash], list(block.tokens), block.lora, block.salt))
            pending.extend(reversed(children.get(block.hash, [])))
        return [self._event(run) for run in runs]

    def _event(self, news: "_News") -> KvEvent:
        if isinstance(news, list):
            return Removed(tuple(map(EngineHash, news)))
        if isinstance(news, Cleared):
            return news
        return Stored(
            hashes=tuple(map(EngineHash, news.hashes)),
            parent=None if news.parent is None else EngineHash(news.parent),
            token_ids=tuple(news.tokens),
            block_size=self.block_size,
            lora=news.lora,
            salt=news.salt,
        )

    def _sum_up(self) -> None:
        self._digest += digest_terms(self._came) - digest_terms(self._went)
        self._came.clear()
        self._went.clear()

    def _offer_to_evictor(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.refs == 0 and block.hash is not None and block.children == 0:
            heapq.heappush(self._evictable, (block.last_used, block_id))
            if len(self._evictable) > 2 * self.num_blocks + 16:
                self._drop_stale_entries()

    def _drop_stale_entries(self) -> None:
        """Keep the heap within twice the pool: each reuse of a cached leaf leaves a stale entry behind."""
        self._evictable = [entry for entry in set(self._evictable) if not self._is_stale(*entry)]
        heapq.heapify(self._evictable)

    def _is_stale(self, last_used: int, block_id: int) -> bool:
        block = self._blocks[block_id]
        return bool(block.refs or block.hash is None or block.children or block.last_used != last_used)

    def _evict_one(self) -> None:
        """Free the least recently used leaf. Stale heap entries are skipped."""
        while True:
            last_used, block_id = heapq.heappop(self._evictable)
            if not self._is_stale(last_used, block_id):
                break
        block = self._blocks[block_id]
        name, parent = block.hash, block.parent
        assert name is not None
        del self._by_hash[name]
        self._went.append(name)
        if len(self._went) >= _AT_ONCE:
            self._sum_up()
        if self.journal is not None:
            self.journal.evicted.append(name)
        self._num_cached -= 1
        events = self._events
        if events and type(events[-1]) is list:
            events[-1].append(name)
        else:
            events.append([name])
        self._forget(block)
        self._free.append(block_id)
        if parent is not None:
            parent_id = self._by_hash[parent]
            self._blocks[parent_id].children -= 1
            self._offer_to_evictor(parent_id)

    @staticmethod
    def _forget(block: _Block) -> None:
        block.hash = block.parent = block.lora = block.salt = None
        block.children = 0
        block.tokens = ()
        block.version += 1
