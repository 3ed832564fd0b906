"""Decide whether blocks that leave the device are worth a copy. Pure."""

from collections.abc import Iterable

from kvmesh.protocol.ids import SequenceHash


class Reuse:
    """Stop copying when `patience_blocks` copies were made and none was asked for; begin again when one is missed.

    Blocks that left without a copy are remembered by name, as many as the tier could hold. Traffic without reuse then
    costs nothing. The first prefix that comes back is computed, and those after it are kept: while what comes back is
    missed, copying goes on, however long it takes until the first copy can be asked for.
    """

    def __init__(self, capacity_blocks: int, patience_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._patience = self._credit = min(capacity_blocks, patience_blocks)
        self._lost: dict[SequenceHash, None] = {}

    @property
    def pays(self) -> bool:
        return self._credit > 0

    def copied(self, blocks: int = 1) -> None:
        self._credit = max(0, self._credit - blocks)

    def hit(self) -> None:
        """A copy was asked for."""
        self._credit = self._patience

    def lost(self, names: Iterable[SequenceHash]) -> None:
        """Take the names of blocks that left the device and the tiers."""
        for name in names:
            self._lost.pop(name, None)
            self._lost[name] = None
        while len(self._lost) > self._capacity:
            del self._lost[next(iter(self._lost))]

    def missed(self, name: SequenceHash) -> bool:
        """Return whether a block that is asked for has been here; then copying pays again."""
        if self._lost.pop(name, 0) is None:
            self._credit = self._patience
            return True
        return False

    def clear(self) -> None:
        """Begin anew."""
        self._credit = self._patience
        self._lost.clear()
