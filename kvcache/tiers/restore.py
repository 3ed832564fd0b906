"""Rebuild the index of a tier from what a restart has found, or others have stored. Pure.

A block counts only if all blocks before it were found too, and if name and address are those of its tokens after them.
"""

from collections.abc import Sequence

from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.slots import follows
from kvmesh.protocol.ids import SequenceHash


def restore(
    index: TierIndex,
    found: Sequence[tuple[TierBlock, int]],
    fingerprint: bytes,
    block_size: int,
    *,
    evicts: bool = False,
) -> set[bytes]:
    """Add blocks with their stamps to an index; return the addresses of those that it has taken.

    The latest written counts as the latest used. `evicts`: they may take the place of those that are there.
    """
    by_age = [block for block, _ in sorted(found, key=lambda each: each[1])]
    by_name = {block.name: block for block in by_age if len(block.tokens) == block_size}
    children: dict[SequenceHash | None, list[TierBlock]] = {}
    for block in by_name.values():
        children.setdefault(block.parent, []).append(block)
    kept: set[bytes] = set()
    pending: list[tuple[TierBlock, TierBlock | None]] = [(block, None) for block in children.get(None, [])]
    for name in children:
        if name is not None and (parent := index.get(name)) is not None:
            pending += [(block, parent) for block in children[name]]
    while pending:
        block, parent = pending.pop()
        if block.address in kept or not follows(block, parent, fingerprint):
            continue
        if not (evicts or len(index) < index.max_blocks) or not (index.admit(block) and index.arrived(block)):
            continue
        kept.add(block.address)
        pending += [(child, block) for child in children.get(block.name, [])]
    for block in by_age:
        if block.address in kept:
            index.touch(block.name)
    return kept
