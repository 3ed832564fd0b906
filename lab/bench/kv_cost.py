"""Measure what host memory for KV costs those who do not use it: prompts that never come again, and streams beside.

One engine is asked with its tier and without, in turn: two engines of one kind differ by up to 4 % on the same machine,
by where their memory happens to lie. Each round asks once with the tier and twice without, in changing order. How the
two without differ is the noise of the measurement.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from kvmesh.lab.bench.kv_engines import BenchedEngine, FreshPrompts

PROMPTS = 4  # at once, or beside a stream; the device holds two and a half
ANSWER_TOKENS = 8
STREAM_TOKENS = 32
TURNS = (("on", "off", "again"), ("off", "again", "on"), ("again", "on", "off"))


class Cost(NamedTuple):
    """Times with the tier / without: medians of rounds, and how far the middle half of the rounds spreads."""

    ratio: float
    control: float  # without / without
    spread: float  # between quartiles


async def one_shot_cost(side: BenchedEngine, prompts: FreshPrompts, isl_tokens: int, rounds: int) -> Cost:
    """Compare how long prompts at once take that never come again."""

    async def ask() -> float:
        asked = [prompts.fresh(isl_tokens) for _ in range(PROMPTS)]
        began = time.perf_counter()
        await asyncio.gather(*[side.ask(prompt, ANSWER_TOKENS) for prompt in asked])
        return time.perf_counter() - began

    return await compare(side, ask, rounds)


async def itl_cost(side: BenchedEngine, prompts: FreshPrompts, isl_tokens: int, rounds: int) -> Cost:
    """Compare the ITL of a stream beside prompts that never come again."""

    async def ask() -> float:
        streaming = asyncio.create_task(side.ask(prompts.fresh(64), STREAM_TOKENS))
        for _ in range(PROMPTS):
            await side.ask(prompts.fresh(isl_tokens), 1)
        came = (await streaming).came_s
        return (came[-1] - came[0]) / (STREAM_TOKENS - 1)

    return await compare(side, ask, rounds)


class Switchable(Protocol):
    """An engine whose tiers can be put aside."""

    def without_tiers(self) -> AbstractContextManager[None]: ...
    async def rest(self) -> None: ...


async def compare(side: Switchable, ask: Callable[[], Awaitable[float]], rounds: int) -> Cost:
    """Ask so many rounds, and one before that is not counted."""
    ratios, controls = list[float](), list[float]()
    for number in range(rounds + 1):
        took_s: dict[str, float] = {}
        for turn in TURNS[number % len(TURNS)]:
            with nullcontext() if turn == "on" else side.without_tiers():
                took_s[turn] = await ask()
            await side.rest()
        ratios.append(2 * took_s["on"] / (took_s["off"] + took_s["again"]))
        controls.append(took_s["again"] / took_s["off"])
    ratios, controls = ratios[1:], controls[1:]
    return Cost(statistics.median(ratios), statistics.median(controls), _spread(ratios))


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4)
    return quartiles[2] - quartiles[0]
