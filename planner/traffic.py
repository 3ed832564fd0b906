"""From what frontends have counted to the traffic of an interval. Pure.

What is missing, late or no number is None, never 0: a planner that takes an outage for silence sends workers home.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from planner.model import Traffic
from planner.scrape import samples
from protocol.errors import WireError

_P = "kvmesh_frontend_"
_ROUTER_WAITING = "kvmesh_router_waiting"
# Of requests that never were work for a worker.
NO_DEMAND = frozenset(
    {
        "invalid_request",
        "context_length",
        "unauthorized",
        "model_not_found",
        "not_found",
        "method_not_allowed",
        "request_timeout",
        "body_too_large",
        "head_too_large",
    }
)
NO_GENERATION = frozenset({"embeddings"})  # endpoints
MAX_REMEMBERED = 64  # frontends that have gone and may come back


@dataclass(frozen=True, slots=True)
class Totals:
    """What one frontend has counted since it started, or the difference of two such counts."""

    ended: float = 0.0  # requests, but those of NO_DEMAND
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

    def plus(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def minus(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Page:
    """One frontend's /metrics page, as far as it is of interest here."""

    totals: Totals
    started_s: float  # wall clock; of several processes the last one's
    processes: int = 1  # that share the port and count together
    waiting: float = 0.0  # requests in its router's queue; of a router by itself nothing is known here


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


def read_page(page: str, processes: int = 1) -> Page:
    """Raises WireError for what is not a frontend's page, or holds what is no number."""
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
    started_s = next((s.value for s in samples(page, "process_start_time") if s.name.endswith("seconds")), 0.0)
    if not seen:
        raise WireError("this is not the /metrics page of a frontend")
    waiting = sum(sample.value for sample in samples(page, _ROUTER_WAITING))
    if not all(map(math.isfinite, [*sums.values(), started_s, waiting])):
        raise WireError("the frontend's metrics hold what is no number")
    return Page(Totals(**sums), started_s, processes, max(0.0, waiting))


def traffic_of(delta: Totals, start_s: float, end_s: float) -> Traffic:
    """`delta`: counted in between. Means are over what ended, requests are those that arrived."""

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
    )


class TrafficMeter:
    """Adds up what several frontends count between the ends of intervals.

    A frontend that starts anew counts from 0 again; one that goes has counted until it was read last; one that was
    there before us counts from when it is first read.
    """

    def __init__(self, began_wall_s: float) -> None:
        self._began_wall_s = began_wall_s
        self._last: dict[str, Page] = {}
        self._counted = NOTHING
        self._start_s: float | None = None  # of the interval; None: nothing was read yet
        self._missing: frozenset[str] = frozenset()  # they did not answer last time
        self._anybody = False  # was asked last time
        self._lost = False  # something was counted that we shall never know
        self.problem = ""  # why the last interval could not be closed

    def on_scrape(self, at_s: float, pages: Mapping[str, Page | None]) -> None:
        """`pages`: by URL, of all frontends there are; None: it does not answer, or not with what can be read."""
        self._anybody = bool(pages)
        self._missing = frozenset(url for url, page in pages.items() if page is None)
        for url, page in pages.items():
            if page is not None:
                self._count(url, page)
                self._last.pop(url, None)  # the most recent go last
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
        elif page.processes > 1 or before.processes > 1:  # one of them died: what the others count is in both
            self._lost = True
        else:
            self._counted = self._counted.plus(page.totals)

    def close(self, at_s: float) -> Traffic | None:
        """The piece that ends now, or None, and `problem` says why: then the next one begins where this one did."""
        if not self._anybody:  # all have gone at once, or discovery has: that is not silence
            self.problem = "there is no frontend"
            return None
        if self._start_s is None:
            self.problem = "no frontend has told what it counts"
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
        return None if lost else traffic_of(counted, start_s, at_s)

    def give_up(self, at_s: float, longest_s: float) -> None:
        """What was begun more than `longest_s` ago would say nothing about now: begin anew."""
        if self._start_s is not None and at_s - self._start_s > longest_s:
            self._start_s = None
            self._last.clear()


def queries(matcher: str, window_s: float) -> dict[str, str]:
    """PromQL by field of Totals: counted by all frontends in the last `window_s`. `matcher` picks their series."""

    def increase(name: str, more: str = "") -> str:
        labels = ",".join(filter(None, [matcher, more, 'endpoint!="embeddings"']))
        return f"sum(increase({_P}{name}{{{labels}}}[{round(window_s)}s]))"

    no_demand = f'outcome!~"{"|".join(sorted(NO_DEMAND))}"'
    asked = {"ended": increase("requests_total", no_demand), "cached_tokens": increase("cached_tokens_total")}
    for name, field in _SUMS.items():
        asked |= {f"{field}_{part}": increase(f"{name}_{part}") for part in ("sum", "count")}
    return asked | {"inflight": f"sum(delta({_P}inflight{{{matcher}}}[{round(window_s)}s]))"}


def age_query(matcher: str) -> str:
    """Seconds since the newest sample of any frontend."""
    return f"time() - max(timestamp({_P}inflight{{{matcher}}}))"


def traffic_told(answers: Mapping[str, float | None], start_s: float, end_s: float) -> Traffic | None:
    """`answers`: to `queries`, None for an empty one. A count that was never begun is 0, if others of it were told.

    None if the number of requests is not known.
    """
    known = {name: value for name, value in answers.items() if value is not None}
    if "inflight" not in known or not all(map(math.isfinite, known.values())):
        return None
    return traffic_of(replace(NOTHING, **known), start_s, end_s)
