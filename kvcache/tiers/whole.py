"""See the pool of the device and the tiers below it as one cache, as its followers do. Pure."""

from collections.abc import Collection

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.stack import TierStack
from kvmesh.protocol.events import Digest, KvEvent
from kvmesh.protocol.tiers import Tier

_U64 = 0xFFFF_FFFF_FFFF_FFFF


class WholeCache:
    """Hold what one engine, or one rank of it, reports of its cache."""

    def __init__(self, pool: BlockPool, tiers: TierStack | None = None) -> None:
        self._pool = pool
        self._tiers = tiers
        self._again: list[KvEvent] = []  # of tiers that were kept when the device was cleared

    def take_events(self) -> list[KvEvent]:
        """Return the changes since the last call. Each tier is whole by itself, so their order does not matter."""
        events = self._pool.take_events() + self._again
        self._again = []
        if self._tiers is not None:
            for level in self._tiers.levels:
                events += level.index.take_events()
        return events

    def snapshot(self) -> list[KvEvent]:
        """Return events that rebuild the present content of all tiers."""
        events = self._pool.snapshot()
        if self._tiers is not None:
            for level in self._tiers.levels:
                events += level.index.snapshot()
        return events

    @property
    def digest(self) -> Digest:
        """The digest of all prefixes in all tiers: the sum of those of the tiers."""
        digest = self._pool.digest
        if self._tiers is None:
            return digest
        parts = [digest, *[level.index.digest for level in self._tiers.levels]]
        return Digest(sum([part.blocks for part in parts]), sum([part.value for part in parts]) & _U64)

    def clear(self, tiers: Collection[Tier] = tuple(Tier)) -> None:
        """Forget some tiers. All events so far have been taken.

        To clear the device is one event, which means all tiers to those who follow: the others are told again.
        """
        if self._tiers is not None:
            self._tiers.clear(tiers)
        if Tier.DEVICE not in tiers:
            return
        self._pool.clear()
        if self._tiers is not None:
            kept = [level for level in self._tiers.levels if level.tier not in tiers]
            self._again = [event for level in kept for event in level.index.snapshot()]
