"""The time that the mock's steps and pulls take: as a model of an engine says, or fixed."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvmesh.protocol.tiers import Tier
from kvmesh.protocol.timing import Timing
from kvmesh.workers.executor import Row


class MockPace:
    """Computes each step when it is due, counted from when the one before was due: small delays do not add up."""

    def __init__(
        self,
        timing: Timing | None,
        itl_ms: float,
        wait_until: Callable[[float], Awaitable[None]],
        *,
        block_size: int = 1,
        pull_s_per_token: float = 0.0,
        tier_s_per_token: Mapping[Tier, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A step takes the time of `timing`, no time if that is None.

        `itl_ms`: time of a step that decodes; 0: as `timing` says. `wait_until` takes a time of `clock`.
        """
        self.timing = timing
        self._itl_s = itl_ms / 1000
        self._wait_until = wait_until
        self._block_size = block_size
        self._pull_s_per_token = pull_s_per_token
        self._tier_s_per_token = tier_s_per_token or {}
        self._clock = clock
        self._due_s = -math.inf

    async def keep(self, rows: Sequence[Row]) -> None:
        """Wait until a step of `rows` may end. Others are let run at least once."""
        if (duration_s := self.step_s(rows)) <= 0:
            await asyncio.sleep(0)
            return
        now_s = self._clock()
        if now_s - self._due_s > duration_s:  # at rest, or too late to make up for
            self._due_s = now_s
        self._due_s += duration_s
        if self._due_s <= now_s:
            await asyncio.sleep(0)
        else:
            await self._wait_until(self._due_s)

    def rest(self) -> None:
        """There is no step to make now: the next one counts from when it begins."""
        self._due_s = -math.inf

    def step_s(self, rows: Sequence[Row]) -> float:
        """Return the seconds that a step takes."""
        timing, itl_s = self.timing, self._itl_s
        if timing is None and not itl_s:
            return 0.0
        new_tokens = decoding = held_blocks = 0
        for row in rows:
            held_blocks += len(row.block_table)
            if len(row.token_ids) > 1:
                new_tokens += len(row.token_ids)
            else:
                decoding += 1
        took_s = itl_s if decoding else 0.0
        if timing is not None:
            if new_tokens:
                took_s += timing.prefill_s(new_tokens)
            if decoding and not itl_s:
                took_s += timing.decode_s(decoding, held_blocks * self._block_size)
        return took_s

    def pull_s(self, num_tokens: int) -> float:
        """Return the least seconds that the KV of so many tokens takes to come."""
        return num_tokens * self._pull_s_per_token

    def tier_s(self, num_tokens: int, tier: Tier) -> float:
        """Return the least seconds that the KV of so many tokens takes to or from a tier below the device."""
        return num_tokens * self._tier_s_per_token.get(tier, 0.0)
