"""Where the KV cache of a worker lies: what a transfer backend needs to read it or write into it."""

from dataclasses import dataclass

from protocol.messages import KvLayout


@dataclass(frozen=True, slots=True)
class KvRegion:
    """`num_blocks` blocks of `layout.block_bytes` each, block after block, from `address` on."""

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
