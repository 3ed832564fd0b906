"""Which points of a worker are measured, and the tables that they make. Pure."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from protocol.profile import DecodeTable, PrefillTable

SHORTEST_PROMPT_TOKENS = 16
SHORTEST_CONTEXT_TOKENS = 64
FULL = 0.9  # share of the KV cache that the fullest point takes: beyond it engines preempt


class WorkerLimits(Struct, frozen=True, kw_only=True):
    """What a worker can hold."""

    context_tokens: int  # prompt and answer together
    total_kv_tokens: int
    max_num_seqs: int


class PrefillPoint(Struct, frozen=True, kw_only=True, tag="prefill"):
    """`ttft_s`: median over the repeats. `spread`: (largest - smallest) / median of them."""

    isl_tokens: int
    ttft_s: float
    spread: float
    repeats: int


class DecodePoint(Struct, frozen=True, kw_only=True, tag="decode"):
    """`batch` sequences of about `context_tokens`; `kv_tokens`: held by all, in the middle of the measurement."""

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
    """At most `count` prompt lengths, even steps of their logarithm up to the longest that leaves a token to say."""
    longest = min(limits.context_tokens - 2, int(limits.total_kv_tokens * FULL))
    return _geometric(min(SHORTEST_PROMPT_TOKENS, longest), longest, count)


def decode_cells(limits: WorkerLimits, contexts: int, batches: int, answer_tokens: int) -> list[DecodeCell]:
    """At most `contexts` x `batches`, the cheap ones first; a sequence of alone is always among them.

    `answer_tokens`: that a sequence may grow beyond its context while it is measured.
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
    """Each context is a column with batches, and so KV tokens, of its own; the table has them all on one axis.

    Between two points of a column it is linear. What a worker cannot reach, less than one sequence or more than fit,
    goes on as between the nearest two points, and never rises towards fewer tokens: neighbouring columns need it.
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
    """Of points (x, y) with increasing x."""
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
    """Increasing, `first` and `last` among them where `count` is two or more; fewer where they would be the same."""
    if count == 1 or first >= last:
        return [last]
    step = math.log(last / first) / (count - 1)
    return sorted({first, last, *_between(first, step, count)})


def _between(first: int, step: float, count: int) -> Iterator[int]:
    return (round(first * math.exp(step * i)) for i in range(1, count - 1))
