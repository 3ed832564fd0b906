"""Simulate host memory below a worker's device: the live stack, with copies that take simulated time."""

from collections import deque
from collections.abc import Sequence

from kvcache.pool import BlockPool
from kvcache.tiers.index import TierIndex
from kvcache.tiers.rates import TierRates
from kvcache.tiers.stack import BlockSave, TierLevel, TierStack
from kvcache.tiers.whole import WholeCache
from protocol.tiers import Tier
from simulator.sequence import HALVES
from workers.executor import Row
from workers.scheduler import TierLoad

MAX_IN_FLIGHT = 64  # blocks that are copied down at a time


class SimTiers:
    """The host memory of one worker. Copies down and copies up each come one after the other."""

    def __init__(self, pool: BlockPool, host_blocks: int, block_s: float, block_bytes: int) -> None:
        """Copy each block in `block_s`."""
        self._block_s = block_s
        level = TierLevel(TierIndex(Tier.HOST, host_blocks, HALVES, _no_bytes), TierRates(block_bytes))
        self.stack = TierStack(pool, [level], b"simulated", max_in_flight=MAX_IN_FLIGHT)
        self.cache = WholeCache(pool, self.stack)
        self.loaded_blocks = 0
        self._down: deque[tuple[float, Sequence[BlockSave]]] = deque()
        self._down_until_s = self._up_until_s = 0.0

    def advance(self, now: float) -> None:
        """End the copies down that are complete by now, and begin others. Call it after each step."""
        while self._down and self._down[0][0] <= now:
            for save in self._down.popleft()[1]:
                self.stack.saved(save, arrived=True)
        if saves := self.stack.plan_saves():
            self._down_until_s = max(self._down_until_s, now) + len(saves) * self._block_s
            self._down.append((self._down_until_s, saves))

    def note_step(self, rows: Sequence[Row], took_s: float) -> None:
        prompts = [len(row.token_ids) for row in rows if len(row.token_ids) > 1]
        self.stack.compute.note_step(sum(prompts), len(rows) - len(prompts), took_s)

    def ends_s(self, load: TierLoad, now: float) -> float:
        """Return when a load that begins now is complete."""
        self._up_until_s = max(self._up_until_s, now) + len(load.into) * self._block_s
        return self._up_until_s

    def load_ended(self, load: TierLoad) -> None:
        blocks = len(load.into)
        self.loaded_blocks += blocks
        self.stack.load_ended(load.planned, blocks, blocks * self._block_s)


def _no_bytes(_: bytes) -> None:
    """Free nothing: simulated blocks have no bytes."""
