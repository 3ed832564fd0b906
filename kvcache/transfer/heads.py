"""Plan copies of KV between workers whose tensor parallelism differs: which heads of a block lie where. Pure.

A worker of `size` shards splits its KV heads between them, in order. Where there are more shards than heads,
`size / heads` shards in a row hold the same head. A shard's block has the layout of a whole one, with fewer heads:
`[num_layers, 2 (k, v), heads of the shard, block_size, head_dim]`. So the heads that one shard needs of another are two
pieces for each layer: keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import KvLayout


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Shard `rank` of the `size` that hold the KV heads of one worker."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Bytes that are copied from one block into another, at these offsets in both."""

    remote: int
    local: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The part of each block that is fetched, of blocks that have another layout than ours."""

    source: KvLayout
    pieces: Sequence[BlockPiece]


def heads_of(num_kv_heads: int, shard: HeadShard) -> range:
    """Return the KV heads that a shard holds. Raise TransferError if they cannot be split so."""
    size = shard.size
    if not 0 <= shard.rank < size or num_kv_heads < 1 or (num_kv_heads % size and size % num_kv_heads):
        raise TransferError(f"{num_kv_heads} KV heads cannot be split into shard {shard.rank} of {size}")
    if num_kv_heads >= size:
        each = num_kv_heads // size
        return range(shard.rank * each, (shard.rank + 1) * each)
    head = shard.rank * num_kv_heads // size
    return range(head, head + 1)


def layout_of(whole: KvLayout, shard: HeadShard) -> KvLayout:
    """Return the layout of a shard's blocks. `whole`: that of a worker without tensor parallelism."""
    return msgspec.structs.replace(whole, num_kv_heads=len(heads_of(whole.num_kv_heads, shard)))


def plan_heads(whole: KvLayout, source_size: int, reader: HeadShard) -> Mapping[int, BlockPart]:
    """Return the part of a block that a shard reads, by the rank of the source's shard that it reads it from.

    Every head is read once. Of shards that hold the same head, readers of different rank choose different ones.
    """
    mine = heads_of(whole.num_kv_heads, reader)
    runs: dict[int, range] = {}
    for head in mine:
        rank = _holder(whole.num_kv_heads, source_size, head, reader.rank)
        runs[rank] = range(runs[rank].start, head + 1) if rank in runs else range(head, head + 1)
    parts: dict[int, BlockPart] = {}
    for rank, run in runs.items():
        shard = HeadShard(rank, source_size)
        theirs = heads_of(whole.num_kv_heads, shard)
        parts[rank] = BlockPart(layout_of(whole, shard), _pieces(whole, run, theirs, mine))
    return parts


def _holder(num_kv_heads: int, size: int, head: int, reader_rank: int) -> int:
    """Return the rank of a shard that holds the head."""
    if num_kv_heads >= size:
        return head // (num_kv_heads // size)
    copies = size // num_kv_heads
    return head * copies + reader_rank % copies


def _pieces(whole: KvLayout, run: range, theirs: range, mine: range) -> list[BlockPiece]:
    """Return where the heads of `run` lie in blocks with the heads `theirs` and `mine`. Neighbours are joined."""
    head_bytes = msgspec.structs.replace(whole, num_layers=1, num_kv_heads=1).block_bytes // 2
    if len(run) == len(theirs) == len(mine):
        return [BlockPiece(0, 0, 2 * whole.num_layers * len(run) * head_bytes)]
    return [
        BlockPiece(
            (plane * len(theirs) + run.start - theirs.start) * head_bytes,
            (plane * len(mine) + run.start - mine.start) * head_bytes,
            len(run) * head_bytes,
        )
        for plane in range(2 * whole.num_layers)
    ]
