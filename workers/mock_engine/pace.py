"""How long the mock's steps take: as modelled on a real engine, faster, or at a fixed pace."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from workers.executor import Row


def prefill_ms(new_tokens: int) -> float:
    """Time to compute `new_tokens` of prompts in one step."""
    return 4.209989e-07 * new_tokens**2 + 1.518344e-02 * new_tokens + 16.50142 if new_tokens else 0.0


def decode_ms(kv_usage: float) -> float:
    """Time of one token for each sequence, with a share `kv_usage` (0..1) of the KV cache in use."""
    return max(1.0, -25.74 * kv_usage**2 + 54.01 * kv_usage + 5.74)


class MockPace:
    """Each step ends when it is due, counted from when the one before was: what comes between them adds nothing."""

    def __init__(
        self,
        speedup: float,
        itl_ms: float,
        wait_until: Callable[[float], Awaitable[None]],
        *,
        num_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`speedup`: how much faster than modelled; 0: no delay. `itl_ms`: of a step that decodes; 0: as modelled.

        `num_blocks`: of the whole KV cache. `wait_until` takes a time of `clock`.
        """
        self.num_blocks = num_blocks
        self._speedup = speedup
        self._itl_ms = itl_ms
        self._wait_until = wait_until
        self._clock = clock
        self._due_s = 0.0

    async def keep(self, rows: Sequence[Row]) -> None:
        """Wait until a step of `rows` may end. Others are let run at least once."""
        if (duration_s := self.step_s(rows)) <= 0:
            await asyncio.sleep(0)
            return
        now_s = self._clock()
        if now_s - self._due_s > duration_s:  # there was nothing to do meanwhile
            self._due_s = now_s
        self._due_s += duration_s
        if self._due_s <= now_s:
            await asyncio.sleep(0)
        else:
            await self._wait_until(self._due_s)

    def step_s(self, rows: Sequence[Row]) -> float:
        """How long a step takes."""
        if not (self._speedup or self._itl_ms):
            return 0.0
        new_tokens = decoding = held_blocks = 0
        for row in rows:
            held_blocks += len(row.block_table)
            if len(row.token_ids) > 1:
                new_tokens += len(row.token_ids)
            else:
                decoding += 1
        took_ms = prefill_ms(new_tokens) / self._speedup if self._speedup else 0.0
        if decoding and self._itl_ms:
            took_ms += self._itl_ms
        elif decoding:
            took_ms += decode_ms(held_blocks / max(1, self.num_blocks)) / self._speedup
        return took_ms / 1000
