"""Make synthetic load: when requests come, how long they are, what they share.

    rate = diurnal(mean_rps=10, swing=0.6, period_s=7200)
    requests = synthesize(rate, duration_s=7200, shape=Shape(isl_tokens=3000, osl_tokens=300), seed=3)

A rate is a function of time with the largest value that it takes; arrivals are a Poisson process of that rate. Equal
arguments give equal requests, one by one: they need not be held.
"""

import heapq
import math
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvmesh.simulator.requests import SimRequest, thread_names

_PREFIX_THREADS = 1 << 40  # texts of shared prefixes are named from here on


@dataclass(frozen=True, slots=True)
class Rate:
    """Give the requests per second at a time, never above `most_rps`."""

    at: Callable[[float], float]
    most_rps: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Describe requests. Lengths are log-normal around their means, with `spread` as their sigma; 0: all equal.

    `groups` > 0: each request begins with one of `groups` prefixes of `prefix_tokens`, which are part of its ISL.
    `turns` > 1: each arrival is a conversation of `turns` turns. The next turn comes when the answer has been read (its
    OSL at `read_tokens_per_s`) and `pause_s` on average have passed. Its prompt is the whole conversation and
    `isl_tokens` more. The rate counts all turns.
    """

    isl_tokens: float = 3000.0
    osl_tokens: float = 300.0
    spread: float = 0.0
    osl_spread: float | None = None  # sigma of the answers, if it is another one
    groups: int = 0
    prefix_tokens: int = 0
    turns: int = 1
    pause_s: float = 20.0
    read_tokens_per_s: float = 50.0
    most_tokens: int = 100_000  # of a prompt


def constant(rps: float) -> Rate:
    return Rate(lambda _: rps, rps)


def diurnal(mean_rps: float, swing: float = 0.6, period_s: float = 3600.0) -> Rate:
    """Return a sine that begins at its lowest: from mean * (1 - swing) to mean * (1 + swing)."""
    return Rate(
        lambda t: mean_rps * (1 - swing * math.cos(2 * math.pi * t / period_s)),
        mean_rps * (1 + swing),
    )


def bursty(
    base_rps: float,
    burst_rps: float,
    quiet_s: float = 300.0,
    burst_s: float = 60.0,
    seed: int = 0,
    until_s: float = 1e5,
) -> Rate:
    """Return `base_rps` with bursts of `burst_rps` after exponential pauses of `quiet_s`, each of `burst_s`."""
    rng = random.Random(f"bursts {seed}")
    begins, ends, now = array("d"), array("d"), 0.0
    while now < until_s:
        now += rng.expovariate(1 / quiet_s)
        begins.append(now)
        now += rng.expovariate(1 / burst_s)
        ends.append(now)

    def at(t: float) -> float:
        return burst_rps if bisect_right(begins, t) > bisect_right(ends, t) else base_rps

    return Rate(at, max(base_rps, burst_rps))


def step(low_rps: float, high_rps: float, up_s: float, down_s: float) -> Rate:
    """Return a low rate that is high from `up_s` until `down_s`."""
    return Rate(lambda t: high_rps if up_s <= t < down_s else low_rps, max(low_rps, high_rps))


def sawtooth(low_rps: float, high_rps: float, period_s: float = 120.0) -> Rate:
    """Return a rate that rises for a period, then falls at once: the worst case for a planner of that interval."""
    return Rate(lambda t: low_rps + (high_rps - low_rps) * (t % period_s) / period_s, max(low_rps, high_rps))


def switching(mean_rps: float, shape: float, hold_s: float, seed: int, until_s: float) -> Rate:
    """Return a level that is drawn again after exponential times of mean `hold_s`.

    Levels are gamma distributed around `mean_rps`: their coefficient of variation is 1 / sqrt(shape).
    """
    rng = random.Random(f"levels {seed}")
    begins, levels, now = array("d"), array("d"), 0.0
    while now < until_s:
        begins.append(now)
        levels.append(rng.gammavariate(shape, mean_rps / shape))
        now += rng.expovariate(1 / hold_s)
    return Rate(lambda t: levels[max(0, bisect_right(begins, t) - 1)], max(levels))


def week(mean_rps: float, day_s: float, seed: int, spread: float = 0.1) -> Rate:
    """Return seven days, the last two at 0.6; the third is missed (0.25), the fifth has a launch (1.6 from noon).

    Within a day the rate is a sine from 0.4 to 1.6 of the day's mean. `spread` is the variation of its minutes.
    """
    days = (1.0, 1.0, 0.25, 1.0, 1.0, 0.6, 0.6)
    noise = switching(1.0, 1 / spread**2, day_s / 60, seed, 7 * day_s)

    def at(t: float) -> float:
        day, part = divmod(t / day_s, 1.0)
        number = min(int(day), 6)
        level = days[number] * (1.6 if number == 4 and part >= 0.5 else 1.0)
        return mean_rps * level * (1 - 0.6 * math.cos(2 * math.pi * part)) * noise.at(t)

    return Rate(at, mean_rps * 1.6 * 1.6 * noise.most_rps)


def arrivals(rate: Rate, duration_s: float, seed: int) -> Iterator[float]:
    """Return the arrivals of a Poisson process, by thinning."""
    rng = random.Random(f"arrivals {seed}")
    now = 0.0
    while rate.most_rps > 0:
        now += rng.expovariate(rate.most_rps)
        if now >= duration_s:
            return
        if rng.random() * rate.most_rps < rate.at(now):
            yield now


def synthesize(
    rate: Rate,
    duration_s: float,
    shape: Shape = Shape(),
    *,
    seed: int = 1,
    block_size: int = 512,
) -> Iterator[SimRequest]:
    """Return requests that arrive before `duration_s`; later turns of conversations may come after it."""
    rng = random.Random(f"requests {seed}")
    share = Rate(lambda t: rate.at(t) / shape.turns, rate.most_rps / shape.turns)
    pending: list[tuple[float, int, SimRequest, int]] = []  # (arrival, thread, turn, turns still to come)
    for thread, now in enumerate(arrivals(share, duration_s, seed)):
        while pending and pending[0][0] <= now:
            yield from _take_turn(pending, shape, rng, block_size)
        heapq.heappush(pending, (now, thread, _first_turn(now, thread, shape, rng, block_size), shape.turns - 1))
    while pending:
        yield from _take_turn(pending, shape, rng, block_size)


def _take_turn(
    pending: list[tuple[float, int, SimRequest, int]], shape: Shape, rng: random.Random, block_size: int
) -> Iterator[SimRequest]:
    _, thread, turn, left = heapq.heappop(pending)
    yield turn
    said = turn.isl_tokens + turn.osl_tokens
    isl_tokens = said + _length(shape.isl_tokens, shape.spread, rng)
    if not left or isl_tokens > shape.most_tokens:
        return
    at_s = turn.arrival_s + turn.osl_tokens / shape.read_tokens_per_s + rng.expovariate(1 / shape.pause_s)
    prefix = turn.names[: shape.prefix_tokens // block_size * 8] if shape.groups else b""
    names = prefix + thread_names(thread, len(prefix) // 8, isl_tokens // block_size)
    osl_tokens = _answer_length(shape, rng)
    later = SimRequest(at_s, isl_tokens, osl_tokens, names, thread)
    heapq.heappush(pending, (at_s, thread, later, left - 1))


def _first_turn(now: float, thread: int, shape: Shape, rng: random.Random, block_size: int) -> SimRequest:
    prefix_blocks = shape.prefix_tokens // block_size if shape.groups else 0
    isl_tokens = max(_length(shape.isl_tokens, shape.spread, rng), prefix_blocks * block_size + 1)
    isl_tokens = min(isl_tokens, shape.most_tokens)
    prefix = b""
    if prefix_blocks:
        prefix = thread_names(_PREFIX_THREADS + rng.randrange(shape.groups), 0, prefix_blocks)
    names = prefix + thread_names(thread, prefix_blocks, isl_tokens // block_size)
    return SimRequest(now, isl_tokens, _answer_length(shape, rng), names, thread)


def _answer_length(shape: Shape, rng: random.Random) -> int:
    return _length(shape.osl_tokens, shape.spread if shape.osl_spread is None else shape.osl_spread, rng)


def _length(mean: float, spread: float, rng: random.Random) -> int:
    if spread <= 0:
        return max(1, round(mean))
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))
