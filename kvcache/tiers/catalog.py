"""Remember what a worker knows of shared storage: which objects there are, and which blocks they hold. No I/O.

Several threads use it at once, and none waits for storage while it has the lock.
"""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.store import TierError
from kvmesh.protocol.ids import SequenceHash

TOUCH_EVERY_S = 60.0  # of one object


class NamedBlock(NamedTuple):
    """Name a block in both ways."""

    name: SequenceHash
    address: bytes


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Name the part of an object that is a block, and the checksum that its bytes must have."""

    name: str  # of the object
    offset: int
    checksum: bytes


@dataclass(slots=True)
class KnownObject:
    """Track one object and its blocks."""

    num_bytes: int
    blocks: list[NamedBlock]
    touched_s: float = 0.0  # time.monotonic


class Catalog:
    """The objects of one epoch that a worker knows of, with at most `max_blocks` blocks."""

    def __init__(self, max_blocks: int, limit_bytes: int, block_bytes: int) -> None:
        self.epoch = b""
        self.is_closed = False
        self.is_full = False  # somebody found no room in the storage
        self._max_blocks = max_blocks
        self._limit_bytes = limit_bytes
        self._block_bytes = block_bytes
        self._places: dict[bytes, BlockPlace] = {}
        self._objects: dict[str, KnownObject] = {}
        self._stored_bytes = 0
        self._lost: list[NamedBlock] = []
        self._lock = threading.Lock()

    def __contains__(self, address: bytes) -> bool:
        return address in self._places

    def names(self) -> set[str]:
        """Return the names of the objects."""
        with self._lock:
            return set(self._objects)

    def places(self, addresses: Sequence[bytes]) -> list[BlockPlace]:
        """Return where blocks lie, up to the first one that is not here."""
        found: list[BlockPlace] = []
        with self._lock:
            for address in addresses:
                if (place := self._places.get(address)) is None:
                    break
                found.append(place)
        return found

    def refusal(self, count: int) -> TierError | None:
        """Return why so many blocks cannot be stored, None if they can."""
        with self._lock:
            if self.is_closed:
                return TierError("shared storage was closed")
            if len(self._places) + count > self._max_blocks:
                return TierError(f"this worker knows {self._max_blocks} blocks of shared storage, and no more")
            if self._stored_bytes + count * self._block_bytes > self._limit_bytes:
                self.is_full = True
                return TierError("shared storage is full until the next collection")
        return None

    def learn(
        self, epoch: bytes, name: str, begin: int, blocks: Sequence[TierBlock], checksums: Sequence[bytes]
    ) -> None:
        """Take note of an object, whose payloads begin at `begin`. Raise TierError if its epoch has ended."""
        num_bytes = begin + len(blocks) * self._block_bytes
        with self._lock:
            if epoch != self.epoch or self.is_closed:
                raise TierError("shared storage was reset meanwhile")
            self._add(name, num_bytes, [NamedBlock(block.name, block.address) for block in blocks])
            for number, (block, checksum) in enumerate(zip(blocks, checksums, strict=True)):
                self._places[block.address] = BlockPlace(name, begin + number * self._block_bytes, checksum)

    def learn_empty(self, name: str, num_bytes: int) -> None:
        """Take note of an object that holds no block for this worker: it is not read again."""
        with self._lock:
            self._add(name, num_bytes, [])

    def _add(self, name: str, num_bytes: int, blocks: list[NamedBlock]) -> None:
        if (before := self._objects.get(name)) is not None:
            self._stored_bytes -= before.num_bytes
        self._stored_bytes += num_bytes
        self._objects[name] = KnownObject(num_bytes, blocks)

    def forget_block(self, address: bytes) -> None:
        with self._lock:
            self._places.pop(address, None)

    def forget(self, names: Iterable[str]) -> list[NamedBlock]:
        """Forget objects; return the blocks that are nowhere now."""
        gone: list[NamedBlock] = []
        with self._lock:
            for name in names:
                if (known := self._objects.pop(name, None)) is None:
                    continue
                self._stored_bytes -= known.num_bytes
                for block in known.blocks:
                    place = self._places.get(block.address)
                    if place is not None and place.name == name:
                        del self._places[block.address]
                        gone.append(block)
        return gone

    def lose(self, name: str) -> None:
        """Forget an object that could not be read; `take_lost` reports its blocks."""
        lost = self.forget([name])
        with self._lock:
            self._lost += lost

    def take_lost(self) -> list[NamedBlock]:
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def begin(self, epoch: bytes) -> None:
        """Forget everything: another epoch has begun."""
        with self._lock:
            self.epoch = epoch
            self._forget_all()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._forget_all()

    def _forget_all(self) -> None:
        self._places.clear()
        self._objects.clear()
        self._lost.clear()
        self._stored_bytes = 0

    def to_touch(self, names: Collection[str]) -> list[str]:
        """Return those of some used objects that were not counted as used lately."""
        now, due = time.monotonic(), list[str]()
        with self._lock:
            for name in names:
                known = self._objects.get(name)
                if known is not None and now - known.touched_s >= TOUCH_EVERY_S:
                    known.touched_s = now
                    due.append(name)
        return due
