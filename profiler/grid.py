"""Choose the points of a worker that are measured, and make tables of them. Pure."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from kvmesh.protocol.profile import DecodeTable, PrefillTable

SHORTEST_PROMPT_TOKENS = 16
SHORTEST_CONTEXT_TOKENS = 64
FULL = 0.9  # share of the KV cache at the fullest point: beyond it engines preempt


class WorkerLimits(Struct, frozen=True, kw_only=True):
    """The sizes that a worker can hold."""

    context_tokens: int  # prompt and answer together
    total_kv_tokens: int
    max_num_seqs: int


class PrefillPoint(Struct, frozen=True, kw_only=True, tag="prefill"):
    """A measured prompt length. `ttft_s` is the median of the repeats, `spread` is (max - min) / median."""

    isl_tokens: int
    ttft_s: float
    spread: float
    repeats: int


class DecodePoint(Struct, frozen=True, kw_only=True, tag="decode"):
    """A measured batch of sequences of about `context_tokens`. They hold `kv_tokens` in the middle of the time."""

    context_tokens: int
    batch: int
    kv_tokens: float
    itl_s: float
    spread: float
    repeats: int


Point = PrefillPoint | DecodePoint


class DecodeCell(Struct, frozen=True):
    context_tokens: int
    batch: int


def prefill_axis(limits: WorkerLimits, count: int) -> list[int]:
    """Return at most `count` prompt lengths, in even logarithmic steps; the longest leaves room for an answer."""
    longest = min(limits.context_tokens - 2, int(limits.total_kv_tokens * FULL))
    return _geometric(min(SHORTEST_PROMPT_TOKENS, longest), longest, count)


def decode_cells(limits: WorkerLimits, contexts: int, batches: int, answer_tokens: int) -> list[DecodeCell]:
    """Return at most `contexts` x `batches` cells, cheap ones first; a batch of one is always among them.

    A sequence may grow by `answer_tokens` beyond its context while it is measured.
    """
    longest = max(1, min(limits.context_tokens, int(limits.total_kv_tokens * FULL)) - answer_tokens)
    cells = []
    for context in _geometric(min(SHORTEST_CONTEXT_TOKENS, longest), longest, contexts):
        fit = int(limits.total_kv_tokens * FULL) // (context + answer_tokens)
        cells += [DecodeCell(context, batch) for batch in _geometric(1, max(1, min(limits.max_num_seqs, fit)), batches)]
    return sorted(cells, key=lambda cell: (cell.context_tokens * cell.batch, cell.batch))


def prefill_table(points: Iterable[PrefillPoint]) -> PrefillTable | None:
    by_isl = {point.isl_tokens: point.ttft_s for point in points}
    if not by_isl:
        return None
    isl_tokens = sorted(by_isl)
    return PrefillTable(isl_tokens=isl_tokens, ttft_s=[by_isl[isl] for isl in isl_tokens])


def decode_table(points: Iterable[DecodePoint]) -> DecodeTable | None:
    """Return a table with one axis of KV tokens for all contexts. Each context is a column with its own batches.

    Between two points of a column the table is linear. Beyond the points that a worker can reach, it continues with
    the slope of the nearest two points, and never rises towards fewer tokens.
    """
    columns: dict[int, dict[float, float]] = defaultdict(dict)
    for point in points:
        columns[point.context_tokens][point.kv_tokens] = point.itl_s
    if not columns:
        return None
    context_tokens = sorted(columns)
    kv_tokens = sorted({max(1, round(kv)) for column in columns.values() for kv in column})
    lines = [sorted(columns[context].items()) for context in context_tokens]
    itl_s = [[_on_line(line, kv) for line in lines] for kv in kv_tokens]
    return DecodeTable(kv_tokens=kv_tokens, context_tokens=context_tokens, itl_s=itl_s)


def widest_spread(points: Sequence[Point]) -> float:
    return max((point.spread for point in points), default=0.0)


def _on_line(line: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at `at` on a line of points (x, y) with increasing x."""
    if len(line) == 1:
        return line[0][1]
    right = min(max(bisect_left(line, (at,)), 1), len(line) - 1)
    (low, y_low), (high, y_high) = line[right - 1], line[right]
    slope = (y_high - y_low) / (high - low)
    if at < line[0][0]:
        return max(0.0, y_low - max(0.0, slope) * (low - at))
    if at > line[-1][0]:
        return y_high + max(0.0, slope) * (at - high)
    return y_low + slope * (at - low)


def _geometric(first: int, last: int, count: int) -> list[int]:
    """Return increasing numbers in even logarithmic steps, with `first` and `last` if `count` is two or more."""
    if count == 1 or first >= last:
        return [last]
    step = math.log(last / first) / (count - 1)
    return sorted({first, last, *_between(first, step, count)})


def _between(first: int, step: float, count: int) -> Iterator[int]:
    return (round(first * math.exp(step * i)) for i in range(1, count - 1))
