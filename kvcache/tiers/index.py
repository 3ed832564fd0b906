"""Track which prefixes one tier holds, which may go, and what has to be told. Pure; the bytes are the store's.

Invariants, checked by the property test:

1. The ready blocks are a set of whole prefixes: the parent of a ready block is ready.
2. There are never more blocks than `max_blocks`, those that are on their way here included.
3. Only leaves that nobody reads are evicted, the least recently used first.
4. The announced events, replayed, give exactly the ready blocks, and `digest` is the digest of those.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.protocol.events import Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term
from kvmesh.protocol.ids import EngineHash, SequenceHash
from kvmesh.protocol.tiers import MEDIA, Tier

_U64 = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class TierBlock:
    """A block below the device. It is this prefix and no other if `address` and `tokens` are equal."""

    name: SequenceHash
    parent: SequenceHash | None
    address: bytes
    tokens: tuple[int, ...]
    lora: str | None = None
    salt: str | None = None
    is_ready: bool = False  # its bytes are here
    is_gone: bool = False  # it was dropped while somebody read or wrote it
    pins: int = 0  # loads that read it
    last_used: int = 0
    children: set[SequenceHash] = field(default_factory=set)


class TierIndex:
    """The content of one tier. `on_drop` is called with the address of each block whose bytes are not needed."""

    def __init__(self, tier: Tier, max_blocks: int, block_size: int, on_drop: Callable[[bytes], object]) -> None:
        self.tier = tier
        self.max_blocks = max_blocks
        self._block_size = block_size
        self._on_drop = on_drop
        self._blocks: dict[SequenceHash, TierBlock] = {}
        self._leaving = 0  # dropped blocks that are still read or written, and hold their place
        self._evictable: list[tuple[int, SequenceHash]] = []  # heap of (last_used, name), checked when popped
        self._tick = 0
        self._ready = 0
        self._digest = 0
        self._events: list[KvEvent] = []

    def __len__(self) -> int:
        return self._ready

    def __contains__(self, name: object) -> bool:
        """Return whether a block of this name is here, or on its way."""
        return name in self._blocks

    @property
    def used_blocks(self) -> int:
        """Return the places that are taken, also those of blocks that come or go."""
        return len(self._blocks) + self._leaving

    @property
    def digest(self) -> Digest:
        return Digest(self._ready, self._digest & _U64)

    def get(self, name: SequenceHash) -> TierBlock | None:
        """Return the ready block of this name."""
        block = self._blocks.get(name)
        return block if block is not None and block.is_ready else None

    def holds(self, name: SequenceHash, address: bytes) -> bool:
        """Return whether this very block is here, or on its way."""
        block = self._blocks.get(name)
        return block is not None and block.address == address

    # --- coming ----------------------------------------------------------------------------------------

    def admit(self, block: TierBlock) -> bool:
        """Take a place for a block whose bytes are to come; evict where needed. False: there is no room for it.

        Its parent is here or on its way, and stays while the block does.
        """
        if block.name in self._blocks:
            return False
        parent = None if block.parent is None else self._blocks.get(block.parent)
        if block.parent is not None and parent is None:
            return False
        if parent is not None:
            parent.children.add(block.name)
        while self.used_blocks >= self.max_blocks:
            if not self._evict_one():
                if parent is not None:
                    self._lose_child(parent, block.name)
                return False
        self._blocks[block.name] = block
        return True

    def arrived(self, block: TierBlock) -> bool:
        """Take that the bytes of an admitted block are here. False: it is of no use any more, and gone."""
        parent = None if block.parent is None else self.get(block.parent)
        if block.is_gone or (block.parent is not None and parent is None):
            self.lost(block)
            return False
        block.is_ready = True
        self._ready += 1
        self._digest += digest_term(block.name, self.tier)
        self._announce_stored(block)
        self._use(block)
        return True

    def lost(self, block: TierBlock) -> None:
        """Take that the bytes of an admitted block will not come."""
        if block.is_gone:
            self._leaving -= 1
        else:
            del self._blocks[block.name]
            block.is_gone = True
            self._forget_below(block)
            if block.parent is not None and (parent := self._blocks.get(block.parent)) is not None:
                self._lose_child(parent, block.name)
        self._on_drop(block.address)

    # --- reading ---------------------------------------------------------------------------------------

    def pin(self, blocks: Sequence[TierBlock]) -> None:
        """Keep blocks until `unpin`, and count them as used, leaves first: parents are not older."""
        self._tick += 1
        for block in blocks:
            block.pins += 1
            block.last_used = self._tick

    def unpin(self, blocks: Sequence[TierBlock]) -> None:
        for block in blocks:
            block.pins -= 1
            if block.is_gone and not block.pins:
                self._leaving -= 1
                self._on_drop(block.address)
            else:
                self._offer(block)

    def touch(self, name: SequenceHash) -> None:
        """Count a block as used, for example because the device holds it and it was used there."""
        if (block := self.get(name)) is not None:
            self._use(block)

    # --- going -----------------------------------------------------------------------------------------

    def drop(self, block: TierBlock) -> None:
        """Drop a ready block, and all that follow it: its bytes cannot be read."""
        if block.is_gone:
            return
        parent = None if block.parent is None else self._blocks.get(block.parent)
        self._forget_below(block)
        self._forget(block)
        if parent is not None:
            self._lose_child(parent, block.name)

    def drop_all(self) -> None:
        """Drop all blocks, and say so: the tier is not used any more."""
        for block in [block for block in self._blocks.values() if block.parent is None]:
            self.drop(block)

    def clear(self) -> None:
        """Forget everything. Nothing is announced: what clears a cache announces it once for all tiers."""
        for block in list(self._blocks.values()):
            self._forget(block, is_told=False)
        self._evictable.clear()
        self._events.clear()

    # --- telling ---------------------------------------------------------------------------------------

    def take_events(self) -> list[KvEvent]:
        """Return the changes since the last call."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[KvEvent]:
        """Return events that rebuild the present content, parents before children."""
        told = TierIndex(self.tier, self.max_blocks, self._block_size, _ignore)
        pending = [block for block in self._blocks.values() if block.parent is None and block.is_ready]
        while pending:
            block = pending.pop()
            told._announce_stored(block)
            pending += [child for name in block.children if (child := self.get(name)) is not None]
        return told.take_events()

    # --- inside ----------------------------------------------------------------------------------------

    def _use(self, block: TierBlock) -> None:
        self._tick += 1
        block.last_used = self._tick
        self._offer(block)

    def _offer(self, block: TierBlock) -> None:
        """Let a block be evicted if it is a leaf that nobody reads."""
        if self._may_go(block):
            heapq.heappush(self._evictable, (block.last_used, block.name))
            if len(self._evictable) > 2 * self.max_blocks + 16:
                self._evictable = [entry for entry in set(self._evictable) if self._stands(*entry)]
                heapq.heapify(self._evictable)

    @staticmethod
    def _may_go(block: TierBlock) -> bool:
        return block.is_ready and not (block.is_gone or block.pins or block.children)

    def _stands(self, last_used: int, name: SequenceHash) -> bool:
        block = self._blocks.get(name)
        return block is not None and block.last_used == last_used and self._may_go(block)

    def _evict_one(self) -> bool:
        while self._evictable:
            last_used, name = heapq.heappop(self._evictable)
            if self._stands(last_used, name):
                self.drop(self._blocks[name])
                return True
        return False

    def _forget_below(self, block: TierBlock) -> None:
        """Forget all that follow a block, children before parents."""
        below: list[TierBlock] = []
        pending = [block]
        while pending:
            children = [self._blocks[name] for name in pending.pop().children]
            below += children
            pending += children
        for child in reversed(below):
            self._forget(child)

    def _forget(self, block: TierBlock, *, is_told: bool = True) -> None:
        del self._blocks[block.name]
        block.children.clear()
        if block.is_ready:
            self._ready -= 1
            self._digest -= digest_term(block.name, self.tier)
            if is_told:
                self._announce_removed(block.name)
        block.is_gone = True
        if block.pins or not block.is_ready:
            self._leaving += 1  # its bytes are still read or written
        else:
            self._on_drop(block.address)

    def _lose_child(self, parent: TierBlock, name: SequenceHash) -> None:
        parent.children.discard(name)
        self._offer(parent)

    def _announce_stored(self, block: TierBlock) -> None:
        last = self._events[-1] if self._events else None
        name = EngineHash(block.name)
        if (
            isinstance(last, Stored)
            and int(last.hashes[-1]) == block.parent
            and (last.lora, last.salt) == (block.lora, block.salt)
            and len(last.hashes) < _MOST_IN_EVENT
        ):
            self._events[-1] = self._stored((*last.hashes, name), last.parent, last.token_ids + block.tokens, block)
        else:
            parent = None if block.parent is None else EngineHash(block.parent)
            self._events.append(self._stored((name,), parent, block.tokens, block))

    def _stored(
        self, hashes: tuple[EngineHash, ...], parent: EngineHash | None, tokens: tuple[int, ...], block: TierBlock
    ) -> Stored:
        return Stored(hashes, parent, tokens, self._block_size, block.lora, block.salt, MEDIA[self.tier])

    def _announce_removed(self, name: SequenceHash) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and len(last.hashes) < _MOST_IN_EVENT:
            self._events[-1] = Removed((*last.hashes, EngineHash(name)), MEDIA[self.tier])
        else:
            self._events.append(Removed((EngineHash(name),), MEDIA[self.tier]))


_MOST_IN_EVENT = 64  # an event that grows is written again each time


def _ignore(_: bytes) -> None:
    """Drop nothing: a snapshot has no bytes."""
