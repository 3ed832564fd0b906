"""Heads of a block between workers of unequal tensor parallelism: every byte comes once, from a shard that has it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.transfer.heads import BlockPart, BlockPiece, HeadShard, heads_of, layout_of, plan_heads
from kvmesh.kvcache.transfer.offers import plan_spans
from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.messages import KvLayout

SIZES = [1, 2, 3, 4, 6, 8, 16]


def whole_layout(num_kv_heads: int, num_layers: int = 2, block_size: int = 2, head_dim: int = 3) -> KvLayout:
    return KvLayout(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype="float32"
    )


def block_of(whole: KvLayout) -> np.ndarray:
    """Return a block in which every item differs."""
    shape = (whole.num_layers, 2, whole.num_kv_heads, whole.block_size, whole.head_dim)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def shard_of(block: np.ndarray, shard: HeadShard) -> np.ndarray:
    heads = heads_of(block.shape[2], shard)
    return np.ascontiguousarray(block[:, :, heads.start : heads.stop])


def fits(num_kv_heads: int, size: int) -> bool:
    return num_kv_heads % size == 0 or size % num_kv_heads == 0


shapes = st.builds(
    whole_layout,
    st.sampled_from([1, 2, 4, 6, 8]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)


@settings(deadline=None, max_examples=100)
@given(shapes, st.sampled_from(SIZES), st.sampled_from(SIZES), st.data())
def test_a_shard_gets_exactly_its_heads(whole: KvLayout, source_size: int, size: int, data: st.DataObject) -> None:
    if not fits(whole.num_kv_heads, source_size) or not fits(whole.num_kv_heads, size):
        return
    reader = HeadShard(data.draw(st.integers(0, size - 1)), size)
    block = block_of(whole)
    sources = [shard_of(block, HeadShard(rank, source_size)).tobytes() for rank in range(source_size)]
    into = bytearray(layout_of(whole, reader).block_bytes)
    written = 0
    for rank, part in plan_heads(whole, source_size, reader).items():
        assert part.source == layout_of(whole, HeadShard(rank, source_size))
        for piece in part.pieces:
            into[piece.local : piece.local + piece.num_bytes] = sources[rank][piece.remote :][: piece.num_bytes]
            written += piece.num_bytes
    assert bytes(into) == shard_of(block, reader).tobytes()
    assert written == len(into), "nothing is copied twice"


@settings(deadline=None, max_examples=50)
@given(shapes, st.sampled_from(SIZES))
def test_every_head_is_held_and_alike_often(whole: KvLayout, size: int) -> None:
    if not fits(whole.num_kv_heads, size):
        return
    held = [head for rank in range(size) for head in heads_of(whole.num_kv_heads, HeadShard(rank, size))]
    assert sorted(held) == held
    assert {held.count(head) for head in range(whole.num_kv_heads)} == {max(1, size // whole.num_kv_heads)}


def test_equal_shards_copy_whole_blocks() -> None:
    whole = whole_layout(4)
    [(rank, part)] = plan_heads(whole, 2, HeadShard(1, 2)).items()
    assert (rank, part.pieces) == (1, [BlockPiece(0, 0, layout_of(whole, HeadShard(1, 2)).block_bytes)])


def test_one_shard_reads_a_piece_of_each_layer_from_both_others() -> None:
    parts = plan_heads(whole_layout(4), 2, HeadShard(0, 1))
    assert [len(part.pieces) for part in parts.values()] == [4, 4]  # two layers, keys and values


def test_readers_share_the_shards_that_hold_one_head() -> None:
    """Two KV heads on four shards: shards 0 and 1 hold the first."""
    chosen = [list(plan_heads(whole_layout(2), 4, HeadShard(rank, 4))) for rank in range(4)]
    assert chosen == [[0], [1], [2], [3]]
    assert [list(plan_heads(whole_layout(1), 4, HeadShard(rank, 2))) for rank in range(2)] == [[0], [1]]


@pytest.mark.parametrize(("heads", "shard"), [(4, (0, 3)), (4, (4, 4)), (4, (-1, 2)), (3, (0, 2)), (0, (0, 1))])
def test_heads_that_cannot_be_split_are_refused(heads: int, shard: tuple[int, int]) -> None:
    with pytest.raises(TransferError, match="cannot be split"):
        heads_of(heads, HeadShard(*shard))


def test_a_piece_outside_of_a_block_is_refused() -> None:
    layout = whole_layout(1)
    size = layout.block_bytes
    pieces = [BlockPiece(0, 4, 8), BlockPiece(8, 0, 4)]
    assert plan_spans([3, 1], [5, 2], layout, BlockPart(layout, pieces)).tolist() == [
        [3 * size, 5 * size + 4, 8],
        [3 * size + 8, 5 * size, 4],
        [size, 2 * size + 4, 8],
        [size + 8, 2 * size, 4],
    ]
    for piece in (BlockPiece(-1, 0, 4), BlockPiece(0, -1, 4), BlockPiece(0, size, 1), BlockPiece(size - 3, 0, 4)):
        with pytest.raises(TransferError, match="outside of blocks"):
            plan_spans([3], [5], layout, BlockPart(layout, [piece]))
    with pytest.raises(TransferError, match="outside of blocks"):
        plan_spans([3], [5], layout, BlockPart(layout, [BlockPiece(0, 0, 0)]))
