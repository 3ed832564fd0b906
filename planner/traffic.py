"""Compute the traffic of an interval from the counters of frontends. Pure.

A figure that is missing, late or not a number is None, never 0. A planner that took an outage for an idle mesh would
stop its workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace

from kvmesh.mesh.metric_list import DECLARED
from kvmesh.planner.model import SloCounts, Traffic
from kvmesh.planner.scrape import samples
from kvmesh.protocol.errors import WireError

_P = "kvmesh_frontend_"
_ROUTER_WAITING = "kvmesh_router_waiting"
# Outcomes of requests that never were work for a worker.
NO_DEMAND = frozenset(
    {
        "invalid_request",
        "context_length",
        "unauthorized",
        "model_not_found",
        "not_found",
        "method_not_allowed",
        "conflict",
        "request_timeout",
        "body_too_large",
        "head_too_large",
    }
)
NO_GENERATION = frozenset({"embeddings"})  # endpoints
MAX_REMEMBERED = 64  # frontends that have left and may come back


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters of one frontend since its start, or the difference of two readings."""

    ended: float = 0.0  # requests, without those of NO_DEMAND
    inflight: float = 0.0
    isl_sum: float = 0.0
    isl_count: float = 0.0
    osl_sum: float = 0.0
    osl_count: float = 0.0
    cached_tokens: float = 0.0
    ttft_sum: float = 0.0
    ttft_count: float = 0.0
    itl_sum: float = 0.0
    itl_count: float = 0.0
    ttft_within: float = 0.0  # requests whose time kept the limit
    itl_within: float = 0.0

    def plus(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def minus(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Page:
    """The figures of one frontend's /metrics page that are used here."""

    totals: Totals
    started_s: float  # wall clock; the last start if there are several processes
    processes: int = 1  # processes that share the port and count together
    waiting: float = 0.0  # requests in the queue of its router; 0 if the router is a process of its own


NOTHING = Totals()
_SUMS = {
    "input_sequence_tokens": "isl",
    "output_sequence_tokens": "osl",
    "ttft_seconds": "ttft",
    "itl_seconds": "itl",
}
_BY_SAMPLE = {f"{_P}{name}_{part}": f"{field}_{part}" for name, field in _SUMS.items() for part in ("sum", "count")} | {
    _P + "cached_tokens_total": "cached_tokens",
    _P + "inflight": "inflight",
}
_BUCKETS = {f"{_P}{of}_seconds_bucket": of for of in ("ttft", "itl")}


@dataclass(frozen=True, slots=True)
class SloLimits:
    """The times of the SLO."""

    ttft_s: float
    itl_s: float


def read_page(page: str, processes: int = 1, limits: SloLimits | None = None) -> Page:
    """Return the figures of a page. Raise WireError if it is not a frontend's, or holds a value that is not finite."""
    buckets: dict[str, dict[float, float]] = {"ttft": {}, "itl": {}}
    sums = {field.name: 0.0 for field in fields(Totals)}
    seen = False
    for sample in samples(page, _P):
        if sample.labels.get("endpoint") in NO_GENERATION:
            continue
        if sample.name == _P + "requests_total" and sample.labels.get("outcome") not in NO_DEMAND:
            sums["ended"] += sample.value
        elif (name := _BY_SAMPLE.get(sample.name)) is not None:
            sums[name] += sample.value
            seen = seen or name == "inflight"
        elif (of := _BUCKETS.get(sample.name)) is not None:
            bound = float(sample.labels.get("le", "nan"))
            buckets[of][bound] = buckets[of].get(bound, 0.0) + sample.value
    if limits is not None:
        sums |= {"ttft_within": within(buckets["ttft"], limits.ttft_s)}
        sums |= {"itl_within": within(buckets["itl"], limits.itl_s)}
    if not seen:
        raise WireError("this is not the /metrics page of a frontend")
    return _checked(page, Totals(**sums), processes)


def _checked(page: str, totals: Totals, processes: int) -> Page:
    """Return the page with its start and its router's queue. Raise WireError for a value that is not finite."""
    started_s = next((s.value for s in samples(page, "process_start_time") if s.name.endswith("seconds")), 0.0)
    waiting = sum(sample.value for sample in samples(page, _ROUTER_WAITING))
    if not all(map(math.isfinite, [*astuple(totals), started_s, waiting])):
        raise WireError("the frontend's metrics hold what is no number")
    return Page(totals, started_s, processes, max(0.0, waiting))


def within(buckets: Mapping[float, float], limit_s: float) -> float:
    """Return how many values of a histogram are at most the limit, linear between the bounds around it."""
    low, count = 0.0, 0.0
    for bound in sorted(bound for bound in buckets if not math.isnan(bound)):
        if bound > limit_s:
            if math.isinf(bound):
                return count
            return count + (buckets[bound] - count) * (limit_s - low) / (bound - low)
        low, count = bound, buckets[bound]
    return count


def traffic_of(delta: Totals, start_s: float, end_s: float, *, counts_slo: bool = False) -> Traffic:
    """Return the traffic of two readings' difference. Means are over requests that ended; `requests` arrived."""

    def mean(total: float, count: float) -> float | None:
        return total / count if count > 0 and math.isfinite(total) else None

    return Traffic(
        start_s=start_s,
        end_s=end_s,
        requests=max(0.0, delta.ended + delta.inflight),
        isl_tokens=mean(delta.isl_sum, delta.isl_count),
        osl_tokens=mean(delta.osl_sum, delta.osl_count),
        hit_share=None if delta.isl_sum <= 0 else min(1.0, max(0.0, delta.cached_tokens / delta.isl_sum)),
        ttft_s=mean(delta.ttft_sum, delta.ttft_count),
        itl_s=mean(delta.itl_sum, delta.itl_count),
        answered=max(0.0, delta.osl_count),
        slo_counts=_slo_counts(delta) if counts_slo else None,
    )


def _slo_counts(delta: Totals) -> SloCounts:
    ttft, itl = max(0.0, delta.ttft_count), max(0.0, delta.itl_count)
    return SloCounts(
        ttft=ttft,
        ttft_within=min(ttft, max(0.0, delta.ttft_within)),
        itl=itl,
        itl_within=min(itl, max(0.0, delta.itl_within)),
    )


class TrafficMeter:
    """Adds up the counters of several frontends between the ends of intervals.

    A frontend that restarts counts from 0 again. One that leaves counts until its last reading. One that started before
    us counts from its first reading.
    """

    def __init__(self, began_wall_s: float, *, counts_slo: bool = False) -> None:
        """Count since a time. With `counts_slo` the pages were read with the limits of an SLO."""
        self._counts_slo = counts_slo
        self._began_wall_s = began_wall_s
        self._last: dict[str, Page] = {}
        self._counted = NOTHING
        self._start_s: float | None = None  # of the interval; None: nothing was read yet
        self._missing: frozenset[str] = frozenset()  # frontends that did not answer last time
        self._anybody = False  # there were frontends to ask last time
        self._lost = False  # a part of the counts can never be known
        self.problem = ""  # why the last interval could not be closed

    def on_scrape(self, at_s: float, pages: Mapping[str, Page | None]) -> None:
        """Take in the pages of all present frontends, by URL. None: it does not answer, or its page cannot be read."""
        self._anybody = bool(pages)
        self._missing = frozenset(url for url, page in pages.items() if page is None)
        for url, page in pages.items():
            if page is not None:
                self._count(url, page)
                self._last.pop(url, None)  # the most recent reading moves to the end
                self._last[url] = page
        for url in list(self._last)[: max(0, len(self._last) - MAX_REMEMBERED)]:
            if url not in pages:
                del self._last[url]
        if self._start_s is None and any(page is not None for page in pages.values()):
            self._start_s = at_s
            self._counted, self._lost = NOTHING, False

    def _count(self, url: str, page: Page) -> None:
        before = self._last.get(url)
        if before is None:
            if page.started_s > self._began_wall_s:
                self._counted = self._counted.plus(page.totals)
            return
        is_reset = page.totals.ended < before.totals.ended or page.totals.isl_count < before.totals.isl_count
        if not is_reset and page.started_s <= before.started_s:
            self._counted = self._counted.plus(page.totals.minus(before.totals))
        elif page.processes > 1 or before.processes > 1:  # one of several died; both readings count the others
            self._lost = True
        else:
            self._counted = self._counted.plus(page.totals)

    def close(self, at_s: float) -> Traffic | None:
        """Return the piece that ends now. None: `problem` says why, and the next piece begins where this one did."""
        if not self._anybody:  # all frontends have left at once, or discovery has: that is no idle mesh
            self.problem = "there is no frontend"
            return None
        if self._start_s is None:
            self.problem = "no frontend's counters were read yet"
            return None
        if at_s <= self._start_s:  # counting has just begun
            self.problem = ""
            return None
        if self._missing:
            self.problem = f"no answer from {', '.join(sorted(self._missing))}"
            return None
        start_s, counted, lost = self._start_s, self._counted, self._lost
        self._start_s, self._counted, self._lost = at_s, NOTHING, False
        self.problem = "a frontend process has ended, and with it what it had counted" if lost else ""
        return None if lost else traffic_of(counted, start_s, at_s, counts_slo=self._counts_slo)

    def give_up(self, at_s: float, longest_s: float) -> None:
        """Begin a new piece if the present one began more than `longest_s` ago: it is too old to be useful."""
        if self._start_s is not None and at_s - self._start_s > longest_s:
            self._start_s = None
            self._last.clear()


def queries(matcher: str, window_s: float, limits: SloLimits | None = None) -> dict[str, str]:
    """Return PromQL for each field of Totals, over `window_s` of all frontends whose series `matcher` picks.

    Without limits, the requests that keep them are not asked for.
    """

    def increase(name: str, more: str = "") -> str:
        labels = ",".join(filter(None, [matcher, more, 'endpoint!="embeddings"']))
        return f"sum(increase({_P}{name}{{{labels}}}[{round(window_s)}s]))"

    no_demand = f'outcome!~"{"|".join(sorted(NO_DEMAND))}"'
    asked = {"ended": increase("requests_total", no_demand), "cached_tokens": increase("cached_tokens_total")}
    for name, field in _SUMS.items():
        asked |= {f"{field}_{part}": increase(f"{name}_{part}") for part in ("sum", "count")}
    if limits is not None:
        for of, limit_s in (("ttft", limits.ttft_s), ("itl", limits.itl_s)):
            parts = bucket_parts(DECLARED[f"{_P}{of}_seconds"].buckets, limit_s)
            asked[f"{of}_within"] = " + ".join(
                f"{part:g} * " + increase(f"{of}_seconds_bucket", f'le=~"{bound:g}|{float(bound)}"')
                for bound, part in parts
            )
    return asked | {"inflight": f"sum(delta({_P}inflight{{{matcher}}}[{round(window_s)}s]))"}


def bucket_parts(bounds: Sequence[float], limit_s: float) -> list[tuple[float, float]]:
    """Return which buckets, by their bounds, count in which part so that `within` the limit is their sum."""
    low = max((bound for bound in bounds if bound <= limit_s), default=0.0)
    high = min((bound for bound in bounds if bound > limit_s), default=None)
    if high is None:
        return [(low, 1.0)]
    part = (limit_s - low) / (high - low)
    return [(bound, share) for bound, share in ((low, 1 - part), (high, part)) if bound and share]


def age_query(matcher: str) -> str:
    """Return PromQL for the seconds since the newest sample of any frontend."""
    return f"time() - max(timestamp({_P}inflight{{{matcher}}}))"


def traffic_told(
    answers: Mapping[str, float | None], start_s: float, end_s: float, *, counts_slo: bool = False
) -> Traffic | None:
    """Return the traffic from the answers to `queries`, or None if the number of requests is not known.

    A counter without any sample is 0: its frontend has not counted yet.
    """
    known = {name: value for name, value in answers.items() if value is not None}
    if "inflight" not in known or not all(map(math.isfinite, known.values())):
        return None
    return traffic_of(replace(NOTHING, **known), start_s, end_s, counts_slo=counts_slo)
