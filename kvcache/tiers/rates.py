"""Learn how long loads and computation take, and choose between them. Pure: times come in as parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

FADE = 0.9  # what an observation leaves of the weight of the one before
TRY_EVERY = 32  # of so many refused loads one is made all the same, so that the estimate can recover
TRIED_BLOCKS = 4  # at most, by such a load
LEAST_SPREAD = 0.02  # variance of the sizes, relative to the mean of their squares


@dataclass(slots=True)
class LiveLine:
    """Fit seconds = latency + size * slope to what was observed, the latest counting most. Neither is negative."""

    count: int = 0
    _weight: float = 0.0
    _size: float = 0.0
    _took: float = 0.0
    _square: float = 0.0
    _product: float = 0.0

    def note(self, size: float, took_s: float) -> None:
        """Take that something of this size took so long."""
        self.count += 1
        self._weight = self._weight * FADE + 1
        self._size = self._size * FADE + size
        self._took = self._took * FADE + took_s
        self._square = self._square * FADE + size * size
        self._product = self._product * FADE + size * took_s

    def doubt(self) -> None:
        """Let what was seen so far count half: something took much longer than that said."""
        for name in ("_weight", "_size", "_took", "_square", "_product"):
            setattr(self, name, getattr(self, name) / 2)

    @property
    def mean(self) -> float:
        """Return the mean seconds for each unit of size, with the latency."""
        return self._took / self._size if self._size else 0.0

    @property
    def slope(self) -> float:
        """Return the seconds for each unit of size."""
        if not self._size:
            return 0.0
        spread = self._weight * self._square - self._size * self._size
        mean = self.mean
        if spread <= LEAST_SPREAD * self._weight * self._square:  # much of one size: noise would decide the slope
            return mean
        slope = (self._weight * self._product - self._size * self._took) / spread
        return min(max(slope, 0.0), mean)

    @property
    def latency_s(self) -> float:
        return max(0.0, (self._took - self.slope * self._size) / self._weight) if self._weight else 0.0

    def seconds(self, size: float) -> float:
        """Return how long something of this size takes; 0 while nothing was observed."""
        return self.latency_s + self.slope * size


@dataclass(slots=True)
class TierRates:
    """Track how fast blocks come from one tier, and how much is on its way from there."""

    block_bytes: int
    line: LiveLine = field(default_factory=LiveLine)  # over bytes
    backlog_bytes: int = 0
    refused: int = 0  # loads since the last one that was made

    @property
    def block_s(self) -> float:
        return self.line.slope * self.block_bytes

    def note_late(self, planned: int, arrived: int, took_s: float) -> None:
        """Take that a load of `planned` blocks was stopped, because the first `arrived` had taken so long.

        It counts as if it had gone on at its pace. If only what has come counted, a slow part beside fast loads that
        were larger would look like a latency, and the next load would be tried again.
        """
        self.line.doubt()
        pace = planned / arrived if arrived else 1.0
        self.line.note(planned * self.block_bytes, pace * took_s)

    def load_s(self, blocks: int) -> float:
        """Return in how many seconds so many blocks are here, if they are asked for now."""
        return self.line.seconds(self.backlog_bytes + blocks * self.block_bytes)


@dataclass(slots=True)
class ComputeRate:
    """Track how long one token of a prompt takes, in steps that compute mostly prompts."""

    line: LiveLine = field(default_factory=LiveLine)  # over tokens

    def note_step(self, prompt_tokens: int, decoding: int, took_s: float) -> None:
        if prompt_tokens > 4 * decoding:
            self.line.note(prompt_tokens, took_s)

    @property
    def token_s(self) -> float:
        """Return the seconds for one token; 0 while it is not known.

        A few steps of much the same size may seem to cost the same whatever they compute; then their mean counts.
        """
        return self.line.slope or self.line.mean


def blocks_to_load(
    borders: Sequence[tuple[TierRates, int]], compute: ComputeRate, block_size: int, backlog_tokens: int
) -> int:
    """Return how many blocks to load, up to one of the borders between tiers; the rest is computed.

    borders: for each tier, in the order in which the prompt goes through them, its rates and how many blocks of the
    prompt lie there. What is computed before this prompt goes on while blocks are loaded. The border counts at which
    all blocks are here first. What was never measured is tried.
    """
    total = sum([blocks for _, blocks in borders])
    if not compute.line.count:
        return total
    block_s, before_s = compute.token_s * block_size, compute.token_s * backlog_tokens
    chosen, best_s = 0, before_s + total * block_s
    found, load_s = 0, 0.0
    for rates, blocks in borders:
        found += blocks
        load_s += rates.load_s(blocks)
        ready_s = max(load_s, before_s) + (total - found) * block_s
        if ready_s <= best_s or not rates.line.count:
            chosen, best_s = found, min(best_s, ready_s)
    return chosen


def tried_anyway(rates: TierRates, blocks: int) -> int:
    """Return how many blocks of a refused load are loaded all the same: mostly none."""
    rates.refused += 1
    if rates.refused < TRY_EVERY:
        return 0
    rates.refused = 0
    return min(blocks, TRIED_BLOCKS)
