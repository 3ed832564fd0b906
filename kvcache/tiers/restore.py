"""Rebuild the index of a tier from what a restart has found. Pure.

A block counts only if all blocks before it were found too, and if name and address are those of its tokens after them.
"""

from collections.abc import Sequence

from kvcache.tiers.index import TierBlock, TierIndex
from kvcache.tiers.slots import follows
from protocol.ids import SequenceHash


def restore(
    index: TierIndex, found: Sequence[tuple[TierBlock, int]], fingerprint: bytes, block_size: int
) -> set[bytes]:
    """Fill an empty index with blocks and their stamps; return the addresses of those that it holds now.

    The latest written counts as the latest used.
    """
    by_age = [block for block, _ in sorted(found, key=lambda each: each[1])]
    by_name = {block.name: block for block in by_age if len(block.tokens) == block_size}
    children: dict[SequenceHash | None, list[TierBlock]] = {}
    for block in by_name.values():
        children.setdefault(block.parent, []).append(block)
    kept: set[bytes] = set()
    pending: list[tuple[TierBlock, TierBlock | None]] = [(block, None) for block in children.get(None, [])]
    while pending:
        block, parent = pending.pop()
        if not follows(block, parent, fingerprint) or len(index) >= index.max_blocks or not index.admit(block):
            continue
        index.arrived(block)
        kept.add(block.address)
        pending += [(child, block) for child in children.get(block.name, [])]
    for block in by_age:
        index.touch(block.name)
    return kept
