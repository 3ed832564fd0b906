"""Keep blocks in host memory."""

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.tiers.store import Payload, TierError


class HostStore:
    """A tier of `max_blocks` places in one piece of host memory, which the system gives as it is first used."""

    def __init__(self, max_blocks: int, block_bytes: int, memory: NDArray[np.uint8] | None = None) -> None:
        """Use `memory` where it is given: uint8 [max_blocks, block_bytes], for example of pinned pages."""
        self.max_blocks = max_blocks
        self.block_bytes = block_bytes
        if memory is None:
            memory = np.frombuffer(mmap.mmap(-1, max_blocks * block_bytes), np.uint8)
        self._memory: NDArray[np.uint8] | None = memory.reshape(max_blocks, block_bytes)
        self._places: dict[bytes, int] = {}  # of whole blocks
        self._free = list(range(max_blocks - 1, -1, -1))  # a stack: pages that were used before come first

    def find(self, address: bytes) -> bool:
        return address in self._places

    def load(self, address: bytes, take: Callable[[Payload], object]) -> None:
        memory, place = self._memory, self._places.get(address)
        if memory is None or place is None:
            raise TierError("host memory does not hold the block any more")
        take(memory[place])

    def store(self, address: bytes, fill: Callable[[Payload], object]) -> None:
        memory = self._memory
        try:
            place = self._free.pop()
        except IndexError:
            raise TierError(f"all {self.max_blocks} blocks of host memory are taken") from None
        try:
            if memory is None:
                raise TierError("the host memory was freed")
            fill(memory[place])
        except BaseException:
            self._free.append(place)
            raise
        self._places[address] = place

    def remove(self, address: bytes) -> None:
        place = self._places.pop(address, None)
        if place is not None:
            self._free.append(place)

    def close(self) -> None:
        self._places.clear()
        self._memory = None
