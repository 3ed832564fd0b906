"""The paged KV cache: where the keys and values of all sequences lie."""

import torch
from torch import Tensor

from kvmesh.kvcache.memory import KvRegion
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedKv:
    """The KV cache, `blocks`: [num_blocks, num_layers, 2 (k, v), num_kv_heads, block_size, head_dim].

    Block-major, because a block moves between workers as one piece of memory.
    """

    def __init__(self, blocks: Tensor, layout: KvLayout) -> None:
        self.layout = layout
        self.blocks = blocks
        heads_per_block = 2 * layout.num_layers * layout.num_kv_heads
        heads = blocks.view(-1, layout.block_size * layout.head_dim)  # row: one head's k or v in one block
        # Layer by layer: what is written token by token, and what is gathered head by head.
        self._writable = [blocks[:, layer] for layer in range(layout.num_layers)]
        self._gatherable = [heads[2 * layout.num_kv_heads * layer :] for layer in range(layout.num_layers)]
        self._block_stride = heads_per_block
        self._head_offsets = torch.arange(2 * layout.num_kv_heads, device=blocks.device).view(2, 1, -1, 1)

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    def region(self) -> KvRegion:
        return KvRegion(
            address=self.blocks.data_ptr(),
            num_blocks=self.num_blocks,
            layout=self.layout,
            device=str(self.blocks.device),
            owner=self.blocks,
        )

    def clear(self, blocks: Tensor) -> None:
        """Zero the blocks of these ids: int64 [N]."""
        if self.blocks.device.type == "cpu":  # a third of the time
            for block in blocks.tolist():
                self.blocks[block].zero_()
        else:
            self.blocks.index_fill_(0, blocks, 0.0)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, kv: Tensor) -> None:
        """Put token t of `kv` [T, 2, num_kv_heads, head_dim] at (blocks[t], offsets[t]): both int64 [T]."""
        self._writable[layer][blocks, :, :, offsets] = kv

    def gather_index(self, tables: Tensor) -> Tensor:
        """Return what `gather` needs for these block ids: int64 [B, N] -> int64 [2 * B * num_kv_heads * N]."""
        return (tables[None, :, None, :] * self._block_stride + self._head_offsets).flatten()

    def gather(self, layer: int, index: Tensor, num_rows: int) -> Tensor:
        """Keys and values of `num_rows` rows of N blocks: [2, B, num_kv_heads, N * block_size, head_dim]."""
        layout = self.layout
        heads = self._gatherable[layer].index_select(0, index)
        return heads.view(2, num_rows, layout.num_kv_heads, -1, layout.head_dim)


def allocate(layout: KvLayout, num_blocks: int, memory: memoryview | None, device: torch.device) -> PagedKv:
    """Make a zeroed cache, in `memory` where it is given. Raises ConfigError if there is no room."""
    if num_blocks < 1:
        raise ConfigError(f"a KV cache of {num_blocks} blocks", hint="give at least one block")
    num_bytes = num_blocks * layout.block_bytes
    raw = _own_memory(num_bytes, device) if memory is None else _given_memory(num_bytes, memory, device)
    shape = (
        num_blocks,
        layout.num_layers,
        2,
        layout.num_kv_heads,
        layout.block_size,
        layout.head_dim,
    )
    return PagedKv(raw.view(TORCH_DTYPES[layout.dtype]).view(shape), layout)


def _own_memory(num_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is the CPU allocator's
        raise ConfigError(
            f"no room for a KV cache of {num_bytes / 2**30:.2f} GiB on {device}", hint="ask for fewer blocks"
        ) from error


def _given_memory(num_bytes: int, memory: memoryview, device: torch.device) -> Tensor:
    if device.type != "cpu":
        raise ConfigError(
            f"the KV cache cannot lie in host memory on device {device}",
            hint="use a KV transfer backend that reads device memory, or --device cpu",
        )
    if memory.readonly or memory.nbytes < num_bytes:
        raise ConfigError(
            f"the memory for the KV cache has {memory.nbytes} bytes, readonly={memory.readonly}",
            hint=f"{num_bytes} writable bytes are needed",
        )
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).zero_()
