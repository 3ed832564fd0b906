"""The seam to the bytes of one tier, and the seam to those of the device."""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.kvcache.memory import KvRegion
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.protocol.errors import MeshError

Payload = NDArray[np.uint8]  # [block_bytes]: the bytes of one block


class TierError(MeshError):
    """A tier cannot give or take a block. What it should have given is computed instead."""

    code = "kv_tier"


class TierCorruptError(TierError):
    """The bytes of a block are not those that were stored."""

    code = "kv_tier_corrupt"


class TierIoError(TierError):
    """The storage of a tier did not do what it was asked for. Many of these switch the tier off."""

    code = "kv_tier_io"


class TierStore(Protocol):
    """Keeps the bytes of blocks by their content address. Every store passes tests/contracts/test_tier_store.py.

    All methods but `close` may be called by several threads at once. A caller stores no address that is stored or on
    its way already, and removes none that is being read. Only `load`, `store` and `clear` may wait for a device.
    """

    block_bytes: int
    max_blocks: int
    ios: Counter[str]  # blocks that were read or written, by the path that they took

    def find(self, address: bytes) -> bool:
        """Return whether a block is here, whole."""

    def load(self, addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        """Give the bytes of each block, in order, to `take`, which copies them.

        Raises TierError if a block is not here, TierCorruptError if it is not whole, and TierIoError: the blocks before
        it have been taken, those after it have not. What `take` raises passes through.
        """

    def store(
        self, blocks: Sequence[TierBlock], fill: Callable[[TierBlock, Payload], object]
    ) -> list[Exception | None]:
        """Keep blocks, whose bytes `fill` writes. Return for each None, or the error for which it is not here.

        That is TierError if there is no room, TierIoError, or what `fill` raised.
        """

    def remove(self, address: bytes) -> None:
        """Forget a block. An unknown address is no error."""

    def clear(self) -> None:
        """Forget all blocks, also for whoever opens this storage next. Raises TierIoError."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""


class DeviceBlocks(Protocol):
    """Copies single blocks from and to the KV cache of an engine, in any thread, one copy at a time in each."""

    def read(self, block_id: int, into: Payload) -> None:
        """Copy a block of the device into host memory."""

    def write(self, block_id: int, payload: Payload) -> None:
        """Copy host memory into a block of the device. When it returns, steps that begin later see the bytes."""


class HostRegionBlocks:
    """The blocks of a KV cache that lies in host memory."""

    def __init__(self, region: KvRegion) -> None:
        memory: Any = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
        self._blocks = np.frombuffer(memory, np.uint8).reshape(region.num_blocks, region.layout.block_bytes)
        self._owner = region.owner

    def read(self, block_id: int, into: Payload) -> None:
        np.copyto(into, self._blocks[block_id])  # numpy releases the GIL meanwhile

    def write(self, block_id: int, payload: Payload) -> None:
        np.copyto(self._blocks[block_id], payload)
