"""The seam to the bytes of one tier, and the seam to those of the device."""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.memory import KvRegion
from protocol.errors import MeshError

Payload = NDArray[np.uint8]  # [block_bytes]: the bytes of one block


class TierError(MeshError):
    """A tier cannot give or take a block. What it should have given is computed instead."""

    code = "kv_tier"


class TierStore(Protocol):
    """Keeps the bytes of blocks by their content address. Every store passes tests/contracts/test_tier_store.py.

    All methods but `close` may be called by several threads at once. A caller stores no address that is stored or on
    its way already, and removes none that is being read.
    """

    block_bytes: int
    max_blocks: int

    def find(self, address: bytes) -> bool:
        """Return whether a block is here, whole."""

    def load(self, address: bytes, take: Callable[[Payload], object]) -> None:
        """Give the bytes of a block to `take`, which copies them.

        Raises TierError if they are not here, or not whole.
        """

    def store(self, address: bytes, fill: Callable[[Payload], object]) -> None:
        """Keep a block, whose bytes `fill` writes. After any error it is not here.

        Raises TierError if there is no room.
        """

    def remove(self, address: bytes) -> None:
        """Forget a block. An unknown address is no error."""

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
