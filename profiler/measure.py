"""Measure a worker: prompts one at a time, then batches of sequences that decode together.

A `MeasuredWorker` talks to the worker. This module knows neither HTTP nor engines, and its only clock is that of the
worker.
"""

import asyncio
import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from msgspec import Struct

from kvmesh.profiler.grid import DecodeCell, DecodePoint, Point, PrefillPoint, WorkerLimits, decode_cells, prefill_axis
from kvmesh.protocol.errors import EngineError, MeshError

T = TypeVar("T")

SHORT_TOKENS = 16  # of the prompt that warms up a worker
NOISY = 0.25  # a point with a larger spread is measured twice as often
MAX_TRIES = 4  # for a batch whose sequences did not decode together for long enough


class Timeline(Struct, frozen=True, kw_only=True):
    """The times of an answer: `tokens[i]` tokens had come by `at_s[i]`. The server counts `prompt_tokens`."""

    sent_s: float
    at_s: Sequence[float]
    tokens: Sequence[float]
    prompt_tokens: int


class MeasuredWorker(Protocol):
    """A worker that can be measured. Its times are of any one clock."""

    async def limits(self) -> WorkerLimits: ...

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> Timeline:
        """Have the worker answer exactly `max_tokens` greedy tokens. Raise MeshError if it fails."""

    async def close(self) -> None: ...


class MeasurePlan(Struct, frozen=True, kw_only=True):
    """The points to measure, and the care with which they are measured."""

    prefill_points: int = 12  # 0: none
    context_points: int = 6  # 0: no decoding
    batch_points: int = 6
    repeats: int = 3
    steps: int = 32  # decode steps that are measured
    warm_steps: int = 8  # decode steps of all sequences before them
    wave: int = 1  # prompts at once: data-parallel ranks, each of which computes one
    seed: int = 0
    lowest_token: int = 100  # prompts are token ids from here on
    token_range: int = 900  # prompts use this number of token ids


class Work(Struct, frozen=True, kw_only=True):
    """All points of a plan, in the order in which they are measured."""

    prefill: Sequence[int]
    decode: Sequence[DecodeCell]

    @property
    def tokens(self) -> int:
        """Return the tokens to compute, to estimate the remaining time."""
        return sum(map(prefill_weight, self.prefill)) + sum(map(decode_weight, self.decode))


def work_of(plan: MeasurePlan, limits: WorkerLimits) -> Work:
    prefill = prefill_axis(limits, plan.prefill_points) if plan.prefill_points else []
    answer = plan.warm_steps + 2 * plan.steps
    decode = decode_cells(limits, plan.context_points, plan.batch_points, answer) if plan.context_points else []
    return Work(prefill=prefill, decode=decode)


def work_left(work: Work, points: Sequence[Point]) -> Work:
    prefilled = {point.isl_tokens for point in points if isinstance(point, PrefillPoint)}
    decoded = {DecodeCell(point.context_tokens, point.batch) for point in points if isinstance(point, DecodePoint)}
    return Work(
        prefill=[isl for isl in work.prefill if isl not in prefilled],
        decode=[cell for cell in work.decode if cell not in decoded],
    )


def prefill_weight(isl_tokens: int) -> int:
    return isl_tokens + 64  # the fixed cost of a prompt


def decode_weight(cell: DecodeCell) -> int:
    return prefill_weight(cell.context_tokens) * cell.batch


async def measure(
    target: MeasuredWorker,
    plan: MeasurePlan,
    work: Work,
    limits: WorkerLimits,
    salt: str,
    on_point: Callable[[Point, int], None],
) -> None:
    """Measure all points, and call `on_point` with each point and its weight.

    `salt` differs between runs: otherwise a worker could find the prompts of another run in its cache.
    """
    prompts = Prompts(plan, salt)
    if work.prefill or work.decode:
        await target.answer(prompts.unique(SHORT_TOKENS), 2)  # work that happens only once is not measured
    for isl in work.prefill:
        on_point(await measure_prefill(target, plan, isl, prompts), prefill_weight(isl))
    for cell in work.decode:
        on_point(await measure_decode(target, plan, cell, limits, prompts), decode_weight(cell))


class Prompts:
    """Makes prompts of random token ids. No two prompts of a run begin alike, so that no cache helps."""

    def __init__(self, plan: MeasurePlan, salt: str) -> None:
        self._plan = plan
        self._random = random.Random(f"{plan.seed}/{salt}")

    def unique(self, num_tokens: int) -> list[int]:
        low, high = self._plan.lowest_token, self._plan.lowest_token + self._plan.token_range - 1
        return [self._random.randint(low, high) for _ in range(num_tokens)]


async def measure_prefill(target: MeasuredWorker, plan: MeasurePlan, isl_tokens: int, prompts: Prompts) -> PrefillPoint:
    """Measure waves of `plan.wave` prompts. A wave takes as long as its slowest prompt."""

    async def once() -> float:
        wave = [target.answer(prompts.unique(isl_tokens), 1) for _ in range(plan.wave)]
        timelines = await together(wave)
        check_lengths(timelines, isl_tokens)
        return max(timeline.at_s[0] - timeline.sent_s for timeline in timelines)

    times_s = await repeated(once, plan.repeats, float)
    return PrefillPoint(
        isl_tokens=isl_tokens, ttft_s=statistics.median(times_s), spread=spread_of(times_s), repeats=len(times_s)
    )


async def measure_decode(
    target: MeasuredWorker, plan: MeasurePlan, cell: DecodeCell, limits: WorkerLimits, prompts: Prompts
) -> DecodePoint:
    """Measure the step of `cell.batch` sequences, of `cell.context_tokens` each in the middle of the measurement.

    The same requests first compute the prompts, with an answer of one token. With a prefix cache, all sequences then
    begin to decode within a few steps of each other; without one, they wait for the last prompt.
    """
    length = max(1, cell.context_tokens - plan.warm_steps - plan.steps // 2)
    batch = [prompts.unique(length) for _ in range(cell.batch)]
    check_lengths(await together([target.answer(prompt, 1) for prompt in batch]), length)
    spare = plan.steps

    async def once() -> Window:
        nonlocal spare
        most = limits.context_tokens - length
        for _ in range(MAX_TRIES):
            answer = min(most, plan.warm_steps + plan.steps + spare)
            timelines = await together([target.answer(prompt, answer) for prompt in batch])
            if window := window_of(timelines, plan.warm_steps, plan.steps):
                return window
            if answer == most:
                break
            spare *= 2
        raise EngineError(
            f"{cell.batch} sequences of {cell.context_tokens} tokens did not decode {plan.steps} steps together",
            hint="lower --steps or --max-num-seqs, or give the worker a longer context",
        )

    windows = await repeated(once, plan.repeats, lambda window: window.itl_s)
    times_s = [window.itl_s for window in windows]
    return DecodePoint(
        context_tokens=cell.context_tokens,
        batch=cell.batch,
        kv_tokens=statistics.median(window.kv_tokens for window in windows),
        itl_s=statistics.median(times_s),
        spread=spread_of(times_s),
        repeats=len(windows),
    )


class Window(NamedTuple):
    """A period in which all sequences of a batch decoded."""

    itl_s: float  # median over the sequences
    kv_tokens: float  # held by all of them in its middle


def window_of(timelines: Sequence[Timeline], warm_steps: int, steps: int) -> Window | None:
    """Return the period of `steps` tokens that begins when every sequence has `warm_steps` tokens.

    Return None if a sequence ended before the end of that period.
    """
    opens_s = max(_time_of(timeline, warm_steps) for timeline in timelines)
    itls_s, kv_tokens = [], 0.0
    for timeline in timelines:
        first = bisect_left(timeline.at_s, opens_s)
        if first == len(timeline.at_s):
            return None
        last = bisect_left(timeline.tokens, timeline.tokens[first] + steps)
        if last == len(timeline.tokens):
            return None
        tokens = timeline.tokens[last] - timeline.tokens[first]
        itls_s.append((timeline.at_s[last] - timeline.at_s[first]) / tokens)
        # The step after n tokens holds the prompt and these n.
        kv_tokens += timeline.prompt_tokens + (timeline.tokens[first] + timeline.tokens[last] - 1) / 2
    return Window(statistics.median(itls_s), kv_tokens)


def _time_of(timeline: Timeline, tokens: int) -> float:
    reached = bisect_left(timeline.tokens, tokens)
    return timeline.at_s[reached] if reached < len(timeline.at_s) else math.inf


def check_lengths(timelines: Sequence[Timeline], prompt_tokens: int) -> None:
    """Raise EngineError if the worker counts another number of prompt tokens."""
    for timeline in timelines:
        if timeline.prompt_tokens != prompt_tokens:
            raise EngineError(
                f"the server counts {timeline.prompt_tokens} tokens in a prompt of {prompt_tokens}",
                hint="it must take token ids on /v1/completions and add none of its own",
            )


async def repeated(once: Callable[[], Awaitable[T]], repeats: int, seconds: Callable[[T], float]) -> list[T]:
    """Return `repeats` results, twice as many if they are far apart."""
    results = [await once() for _ in range(repeats)]
    if spread_of([seconds(result) for result in results]) > NOISY:
        results += [await once() for _ in range(repeats)]
    return results


def spread_of(times_s: Sequence[float]) -> float:
    middle = statistics.median(times_s)
    return (max(times_s) - min(times_s)) / middle if middle else 0.0


async def together(answers: Iterable[Coroutine[None, None, Timeline]]) -> list[Timeline]:
    """Return the answers in order. The first failure ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer, name="profile: one answer") for answer in answers]
    except* MeshError as failures:
        raise first_of(failures) from None
    return [task.result() for task in tasks]


def first_of(failures: BaseExceptionGroup[MeshError]) -> MeshError:
    failure = failures.exceptions[0]
    return first_of(failure) if isinstance(failure, BaseExceptionGroup) else failure
