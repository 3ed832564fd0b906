"""Keep blocks in host memory."""

import mmap
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.store import Payload, TierError


class HostStore:
    """A tier of `max_blocks` places in one piece of host memory, which the system gives as it is first used."""

    def __init__(self, max_blocks: int, block_bytes: int, memory: NDArray[np.uint8] | None = None) -> None:
        """Use `memory` where it is given: uint8 [max_blocks, block_bytes], for example of pinned pages."""
        self.max_blocks = max_blocks
        self.block_bytes = block_bytes
        self.ios = Counter[str]()
        if memory is None:
            memory = np.frombuffer(mmap.mmap(-1, max_blocks * block_bytes), np.uint8)
        self._memory: NDArray[np.uint8] | None = memory.reshape(max_blocks, block_bytes)
        self._places: dict[bytes, int] = {}  # of whole blocks
        self._free = list(range(max_blocks - 1, -1, -1))  # a stack: pages that were used before come first

    def find(self, address: bytes) -> bool:
        return address in self._places

    def load(self, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        for address in addresses:
            memory, place = self._memory, self._places.get(address)
            if memory is None or place is None:
                raise TierError("host memory does not hold the block any more")
            take(memory[place])
            self.ios["memory"] += 1

    def store(
        self, blocks: Sequence[TierBlock], fill: Callable[[TierBlock, Payload], object]
    ) -> list[Exception | None]:
        return [self._store(block, fill) for block in blocks]

    def _store(self, block: TierBlock, fill: Callable[[TierBlock, Payload], object]) -> Exception | None:
        memory = self._memory
        if memory is None:
            return TierError("the host memory was freed")
        try:
            place = self._free.pop()
        except IndexError:
            return TierError(f"all {self.max_blocks} blocks of host memory are taken")
        try:
            fill(block, memory[place])
        except Exception as error:
            self._free.append(place)
            return error
        self._places[block.address] = place
        self.ios["memory"] += 1
        return None

    def remove(self, address: bytes) -> None:
        place = self._places.pop(address, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        for address in list(self._places):
            self.remove(address)

    def close(self) -> None:
        self._places.clear()
        self._memory = None
