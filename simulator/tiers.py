"""Simulate the tiers below a worker's device: the live stack, with copies that take simulated time."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.objects import FolderObjects
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.stack import BlockSave, TierLevel, TierStack
from kvmesh.kvcache.tiers.whole import WholeCache
from kvmesh.protocol.tiers import Tier
from kvmesh.simulator.sequence import HALVES
from kvmesh.workers.scheduler import TierLoad

MAX_IN_FLIGHT = 64  # blocks that are copied down to a tier at a time


class SimTier(NamedTuple):
    """One tier of each worker."""

    tier: Tier
    blocks: int
    block_s: float  # time to copy one block, down or up


class SimStorage:
    """Storage that all workers share: the latest blocks, in the order in which they were stored."""

    def __init__(self, blocks: int) -> None:
        self._stored: deque[tuple[float, TierBlock]] = deque(maxlen=max(1, blocks))
        self._count = 0  # also of those that are gone

    def add(self, block: TierBlock, now: float) -> None:
        self._stored.append((now, block))
        self._count += 1

    def since(self, seen: int, until_s: float) -> Iterator[TierBlock]:
        """Yield copies of the blocks behind the first `seen` ones, as far as they were stored by then."""
        for stored_s, block in islice(self._stored, max(0, len(self._stored) - self._count + seen), None):
            if stored_s > until_s:
                return
            yield TierBlock(block.name, block.parent, block.address, block.tokens, block.lora, block.salt)

    def seen(self, seen: int, taken: int) -> int:
        """Return how many blocks a worker has seen that had seen `seen` and took `taken` more."""
        return max(seen, self._count - len(self._stored)) + taken


class SimTiers:
    """The tiers of one worker. Copies down and copies up come one after the other, of each tier by itself."""

    def __init__(
        self, pool: BlockPool, tiers: Sequence[SimTier], block_bytes: int, storage: SimStorage | None = None
    ) -> None:
        """Take at least one tier, the fastest first, and the storage behind the shared one."""
        self._storage = storage
        self._seen = 0  # blocks of the storage
        self._block_s: Mapping[Tier, float] = {one.tier: one.block_s for one in tiers}
        levels = [
            TierLevel(TierIndex(one.tier, one.blocks, HALVES, _no_bytes), TierRates(block_bytes)) for one in tiers
        ]
        self.stack = TierStack(pool, levels, b"simulated", max_in_flight=MAX_IN_FLIGHT)
        self.cache = WholeCache(pool, self.stack)
        self.loaded_blocks = 0
        self._down: dict[Tier, deque[tuple[float, Sequence[BlockSave]]]] = {one.tier: deque() for one in tiers}
        self._down_until_s = dict.fromkeys(self._block_s, 0.0)
        self._up_until_s = dict.fromkeys(self._block_s, 0.0)

    def advance(self, now: float) -> None:
        """End the copies down that are complete by now, and begin others. Call it after each step."""
        for down in self._down.values():
            while down and down[0][0] <= now:
                ended_s, saves = down.popleft()
                for save in saves:
                    self.stack.saved(save, arrived=True)
                    if save.level.tier is Tier.SHARED and self._storage is not None:
                        self._storage.add(save.block, ended_s)
        self._list(now)
        by_tier: dict[Tier, list[BlockSave]] = {}
        for save in self.stack.plan_saves():
            by_tier.setdefault(save.level.tier, []).append(save)
        for tier, saves in by_tier.items():
            ends_s = max(self._down_until_s[tier], now) + len(saves) * self._block_s[tier]
            self._down_until_s[tier] = ends_s
            self._down[tier].append((ends_s, saves))

    def _list(self, now: float) -> None:
        """Find what other workers have stored, as late as a listing does."""
        if self._storage is None:
            return
        index, taken = self.stack.levels[-1].index, 0
        for block in self._storage.since(self._seen, now - FolderObjects.list_every_s):
            taken += 1
            if index.admit(block):
                index.arrived(block)
        self._seen = self._storage.seen(self._seen, taken)

    def ends_s(self, load: TierLoad, now: float) -> float:
        """Return when a load that begins now is complete. Like the live one, it waits for its slowest tier alone."""
        tier = load.planned.tier
        self._up_until_s[tier] = max(self._up_until_s[tier], now) + sum(self._took_s(load).values())
        return self._up_until_s[tier]

    def load_ended(self, load: TierLoad) -> None:
        blocks = len(load.into)
        self.loaded_blocks += blocks
        self.stack.load_ended(load.planned, blocks, self._took_s(load))

    def _took_s(self, load: TierLoad) -> dict[Tier, float]:
        parts = load.planned.parts(len(load.into))
        return {level.tier: blocks * self._block_s[level.tier] for level, blocks in parts}


def _no_bytes(_: bytes) -> None:
    """Free nothing: simulated blocks have no bytes."""
