"""Work out what an overload run has shown. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from kvmesh.lab.overload.client import LoadAnswer

SETTLE_S = 3.0  # from the start of a load: the workers fill up
IN_A_ROW = 20  # requests by which answers are compared with those before
SLACK_S = 0.1  # after its deadline that an answer may end, for the way to the client
REFUSED = (429, 503)
NORMAL_FACTOR, NORMAL_SLACK_S = 1.2, 0.05  # above the 95th percentile before: still as before


class PhaseReport(Struct, frozen=True, kw_only=True):
    """One load: `load` times what the mesh can do."""

    load: float
    sent: int
    goodput: float  # tokens of answers that ended in time, against those of the same time at capacity
    goodput_requests: float  # the same, counted in requests
    in_time: int
    late: int  # begun, and not ended in time
    refused: int
    failed: int  # neither
    left: int  # by their clients
    refused_p50_ms: float
    refused_p99_ms: float
    ttft_p50_s: float
    ttft_p99_s: float
    normal_again_s: float  # from the end of the load until requests are answered as before
    sender_late_p99_ms: float
    sender_cpu_share: float
    frontend_cpu_share: float  # of one core
    machine_cpu_share: float  # of all cores
    rss_growth_mib: float  # frontends and routers, from before the load to its end


class NormalAnswers(Struct, frozen=True):
    """Say how requests were answered before an overload."""

    ttft_s: float  # up to which an answer is as fast as before
    slow: int  # of IN_A_ROW requests in a row, at most, that were slower than that or not in time; at least 1


class MeasuredCapacity(Struct, frozen=True):
    requests_per_s: float
    tokens_per_s: float


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def is_in_time(answer: LoadAnswer) -> bool:
    return answer.is_whole and (not answer.deadline_s or answer.end_s <= answer.deadline_s + SLACK_S)


def capacity_of(answers: Sequence[LoadAnswer], begins_s: float, ends_s: float) -> MeasuredCapacity:
    """Return what whole answers got per second between two times. Their tokens are spread over their streams."""
    shares = [(_share_within(a, begins_s, ends_s), a.tokens) for a in answers if a.is_whole]
    seconds = ends_s - begins_s
    return MeasuredCapacity(sum(s for s, _ in shares) / seconds, sum(s * tokens for s, tokens in shares) / seconds)


def _share_within(answer: LoadAnswer, begins_s: float, ends_s: float) -> float:
    """Return the share of a stream's time that lies between two times."""
    first_s, end_s = answer.at_s + answer.first_s, answer.at_s + answer.end_s
    if end_s <= first_s:
        return float(begins_s <= end_s < ends_s)
    return max(0.0, min(end_s, ends_s) - max(first_s, begins_s)) / (end_s - first_s)


def normal_of(answers: Sequence[LoadAnswer]) -> NormalAnswers:
    """Return what is normal, by the answers before an overload."""
    ttft_s = quantile([a.first_s for a in answers if is_in_time(a)], 0.95) * NORMAL_FACTOR + NORMAL_SLACK_S
    slow = [not _is_as_fast(a, ttft_s) for a in _in_order(answers)]
    rows = range(max(1, len(slow) - IN_A_ROW + 1))
    return NormalAnswers(ttft_s, max([1, *[sum(slow[row : row + IN_A_ROW]) for row in rows]]))


def normal_again_s(answers: Sequence[LoadAnswer], ended_s: float, normal: NormalAnswers) -> float:
    """Return how long after the end of a load the requests came from which on answers were normal.

    The first of IN_A_ROW requests in a row is as fast as before, and no more of them are slower than of the worst
    such row before. If that never was so, the time of the last request counts.
    """
    after = _in_order([a for a in answers if a.at_s >= ended_s])
    slow = [not _is_as_fast(a, normal.ttft_s) for a in after]
    for row in range(len(after) - IN_A_ROW + 1):
        if not slow[row] and sum(slow[row : row + IN_A_ROW]) <= normal.slow:
            return after[row].at_s - ended_s if row else 0.0
    return after[-1].at_s - ended_s if after else 0.0


def _in_order(answers: Sequence[LoadAnswer]) -> list[LoadAnswer]:
    return sorted((a for a in answers if not a.left), key=lambda a: a.at_s)


def _is_as_fast(answer: LoadAnswer, ttft_s: float) -> bool:
    return is_in_time(answer) and answer.first_s <= ttft_s


def phase_numbers(
    answers: Sequence[LoadAnswer], load: float, ended_s: float, capacity: MeasuredCapacity, normal: NormalAnswers
) -> dict[str, float]:
    """Return the fields of a PhaseReport that the answers show."""
    during = [a for a in answers if a.at_s < ended_s]
    got = capacity_of([a for a in answers if is_in_time(a)], SETTLE_S, ended_s)
    refused = [a for a in during if a.status in REFUSED]
    in_time = [a for a in during if is_in_time(a)]
    left = sum(a.left for a in during)
    late = sum(1 for a in during if a.status not in REFUSED and not a.left and not is_in_time(a) and a.first_s)
    delays_ms = [1e3 * (a.end_s - a.late_s) for a in refused]
    return {
        "load": load,
        "sent": len(during),
        "goodput": round(got.tokens_per_s / capacity.tokens_per_s, 3),
        "goodput_requests": round(got.requests_per_s / capacity.requests_per_s, 3),
        "in_time": len(in_time),
        "late": late,
        "refused": len(refused),
        "failed": len(during) - len(in_time) - len(refused) - late - left,
        "left": left,
        "refused_p50_ms": round(quantile(delays_ms, 0.5), 1),
        "refused_p99_ms": round(quantile(delays_ms, 0.99), 1),
        "ttft_p50_s": round(quantile([a.first_s for a in in_time], 0.5), 3),
        "ttft_p99_s": round(quantile([a.first_s for a in in_time], 0.99), 3),
        "normal_again_s": round(normal_again_s(answers, ended_s, normal), 2),
        "sender_late_p99_ms": round(1e3 * quantile([a.late_s for a in during], 0.99), 1),
    }
