"""Count how often each prefix is in use: chains of sequence hashes, counted per holder. Pure.

Used for prompts in flight and for predictions. A chain is added whole, from its first block on. So a holder always uses
a leading part of any prompt.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.protocol.hashing import Buffer, unpack_hashes
from kvmesh.router.index import NATIVE, Holder


@dataclass(slots=True)
class _Used:
    counts: Counter[int] = field(default_factory=Counter)  # by sequence hash: chains that pass through it
    ends: Counter[int] = field(default_factory=Counter)  # by sequence hash: chains that end there


class PlainChainCounts:
    """The specification of `ChainCounts`; it runs where the native class could not be compiled."""

    def __init__(self) -> None:
        self._used: dict[Holder, _Used] = {}

    def add(self, holder: Holder, hashes: Buffer) -> None:
        """Count a chain once more. hashes: u64 [n], the sequence hashes of a prompt from its first block on."""
        chain = unpack_hashes(hashes)
        if chain:
            used = self._used.setdefault(holder, _Used())
            used.counts.update(chain)
            used.ends[chain[-1]] += 1

    def discard(self, holder: Holder, hashes: Buffer) -> None:
        """Count a chain once less. A chain that is not there, as after `drop`, is no error."""
        chain = unpack_hashes(hashes)
        used = self._used.get(holder)
        if used is None or not chain or not used.ends[chain[-1]]:
            return
        _subtract(used.counts, chain)
        _subtract(used.ends, chain[-1:])
        if not used.counts:
            del self._used[holder]

    def match(self, hashes: Buffer) -> dict[Holder, int]:
        """Return how many leading blocks each holder uses, for every holder that uses the first one."""
        chain = unpack_hashes(hashes)
        depths = {holder: _leading(used.counts, chain) for holder, used in self._used.items()}
        return {holder: depth for holder, depth in depths.items() if depth}

    def drop(self, holder: Holder) -> None:
        """Forget a holder with all its chains."""
        self._used.pop(holder, None)

    def blocks_of(self, holder: Holder) -> int:
        """Return the number of distinct prefixes that `holder` uses."""
        used = self._used.get(holder)
        return 0 if used is None else len(used.counts)

    @property
    def num_blocks(self) -> int:
        """The number of distinct prefixes that any holder uses."""
        return len(set[int]().union(*(used.counts for used in self._used.values())))


def _subtract(counts: Counter[int], names: memoryview) -> None:
    for name in names:
        counts[name] -= 1
        if counts[name] <= 0:
            del counts[name]


def _leading(counts: Counter[int], chain: memoryview) -> int:
    return next((depth for depth, prefix in enumerate(chain) if not counts[prefix]), len(chain))


if TYPE_CHECKING or not NATIVE:
    ChainCounts = PlainChainCounts
else:
    from kvmesh.router import _native

    ChainCounts = _native.ChainCounts
