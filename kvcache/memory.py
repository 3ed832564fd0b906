"""Describe where the KV cache of a worker lies, for a transfer backend that reads or writes it."""

from dataclasses import dataclass

from kvmesh.protocol.messages import KvLayout


@dataclass(frozen=True, slots=True)
class KvRegion:
    """The memory of a KV cache: `num_blocks` blocks of `layout.block_bytes`, one after the other from `address` on."""

    address: int
    num_blocks: int
    layout: KvLayout
    device: str  # "cpu" or "cuda:<n>"
    owner: object  # keeps the memory alive

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def block_address(self, block_id: int) -> int:
        return self.address + block_id * self.layout.block_bytes
