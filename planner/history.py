"""Remember the traffic that was observed: rates, lengths, gaps and outages. Pure; time is what an observation says.

Traffic comes in pieces of any length. Pieces that add up to one predictive interval make a window, and each window is
one sample of the forecaster. A figure that is missing is never taken for zero.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvmesh.planner.costs import quantile_of
from kvmesh.planner.forecast import Forecaster, Remembered
from kvmesh.planner.model import Observation, PlannerConfig, Reason, Traffic, reason
from kvmesh.planner.sizing import Demand

LENGTHS_MEMORY = 3.0  # intervals after which the lengths of a request count 1/e
COVERED = 0.5  # share of an interval that must be known
LATE_INTERVALS = 2.0  # without news for this many intervals: an outage
FEW_REQUESTS = 5.0  # in an interval; an empty interval after one with more than these is doubted once
LEAST_LATEST_S = 10.0
CONFIDENCE = 2.0  # standard deviations of a count of arrivals before it is evidence


@dataclass(slots=True)
class TrafficWindow:
    """Traffic that adds up to one predictive interval."""

    start_s: float
    seconds: float = 0.0
    requests: float = 0.0
    answered: float = 0.0  # as many as requests where it is not known
    ttft_sum_s: float = 0.0
    ttft_requests: float = 0.0
    itl_sum_s: float = 0.0
    itl_requests: float = 0.0

    def add(self, piece: Traffic, requests: float) -> None:
        self.seconds += piece.end_s - piece.start_s
        self.requests += requests
        answered = known(piece.answered)
        self.answered += requests if answered is None else answered
        if (ttft_s := known(piece.ttft_s)) is not None:
            self.ttft_sum_s += ttft_s * requests
            self.ttft_requests += requests
        if (itl_s := known(piece.itl_s)) is not None:
            self.itl_sum_s += itl_s * requests
            self.itl_requests += requests

    @property
    def observed(self) -> tuple[float | None, float | None]:
        """Return the mean TTFT and the mean ITL; None where they are not known."""
        ttft_s = self.ttft_sum_s / self.ttft_requests if self.ttft_requests else None
        itl_s = self.itl_sum_s / self.itl_requests if self.itl_requests else None
        return ttft_s, itl_s


@dataclass(frozen=True, slots=True)
class RecentTraffic:
    """The traffic of the last seconds."""

    demand: Demand
    seconds: float
    latest_rps: float = 0.0  # of the second half of that time

    def level(self) -> Demand:
        """Return the demand to order for: after a jump, the whole time also has what came before it."""
        return replace(self.demand, rps=max(self.demand.rps, self.latest_rps))

    def at_least(self) -> Demand:
        """Return the lowest rate that the count of arrivals allows."""
        return self._moved(-1)

    def at_most(self) -> Demand:
        """Return the highest rate that the count of arrivals allows."""
        return self._moved(+1)

    def _moved(self, sign: int) -> Demand:
        rps = self.demand.rps
        spread = CONFIDENCE * math.sqrt(max(rps, 1 / max(self.seconds, 1.0)) / max(self.seconds, 1.0))
        moved = max(0.0, rps + sign * spread)
        return Demand(moved, self.demand.isl_tokens, self.demand.osl_tokens, self.demand.hit_share)


class TrafficHistory:
    """Keeps everything that the planner knows of the traffic."""

    def __init__(self, config: PlannerConfig, memory_s: float) -> None:
        """Remember pieces of traffic for `memory_s`; `recent` can look back that far."""
        self._interval_s = config.predictive_interval_s
        self._memory_s = memory_s
        self.rates = Forecaster(
            config.forecast, quantile_of(config.miss_cost), round(config.season_s / self._interval_s)
        )
        lengths_s = LENGTHS_MEMORY * self._interval_s
        self._isl, self._osl, self._hit = Remembered(lengths_s), Remembered(lengths_s), Remembered(lengths_s)
        self.is_away = False  # there are no figures at present
        self.known_intervals = 0  # since the start, or since the last outage
        self._window: TrafficWindow | None = None
        self._pieces: deque[tuple[float, float, float]] = deque()  # start, end, requests
        self._first_s: float | None = None
        self._heard_s: float | None = None  # until when traffic is known
        self._is_doubted = False
        self._last_requests = 0.0

    def hear(self, seen: Observation) -> tuple[Reason, ...]:
        """Take in a piece of traffic. Return why it is doubted, or that there is none."""
        if self._first_s is None:
            self._first_s = seen.at_s
        return self._hear_piece(seen.traffic, seen.at_s) + self._outage(seen.at_s)

    def _hear_piece(self, piece: Traffic | None, at_s: float) -> tuple[Reason, ...]:
        if piece is None:
            return ()
        requests = known(piece.requests)
        seconds = piece.end_s - piece.start_s
        if requests is None or not (math.isfinite(seconds) and seconds > 0):
            return (reason("metrics-missing", "the number of requests is not known, nothing is concluded"),)
        if at_s - piece.end_s > LATE_INTERVALS * self._interval_s:
            return (reason("metrics-late", f"traffic until {at_s - piece.end_s:.0f} s ago is too old"),)
        if self.is_away:  # the piece may count what came during the outage
            self._resume(piece)
            return (reason("metrics-back", "the first figures after an outage are left out"),)
        self._take(piece, requests)
        return ()

    def _take(self, piece: Traffic, requests: float) -> None:
        self._heard_s = piece.end_s
        seconds = piece.end_s - piece.start_s
        self._isl.add(positive(piece.isl_tokens), requests, seconds)
        answered = known(piece.answered)  # while prompts queue, few long answers end, and many requests arrive
        self._osl.add(positive(piece.osl_tokens), requests if answered is None else answered, seconds)
        self._hit.add(known(piece.hit_share), requests, seconds)
        self._pieces.append((piece.start_s, piece.end_s, requests))
        while len(self._pieces) > 1 and self._pieces[1][0] < piece.end_s - self._memory_s:
            self._pieces.popleft()
        if self._window is None:
            self._window = TrafficWindow(piece.start_s)
        self._window.add(piece, requests)

    def _outage(self, at_s: float) -> tuple[Reason, ...]:
        since = self._heard_s if self._heard_s is not None else self._first_s
        silent_s = at_s - (since if since is not None else at_s)
        if not self.is_away and silent_s <= LATE_INTERVALS * self._interval_s:
            return ()
        self.is_away = True
        self._window = None
        self._pieces.clear()
        return (reason("metrics-away", f"no usable traffic figures for {silent_s:.0f} s: what is ordered stays"),)

    def _resume(self, piece: Traffic) -> None:
        since = self._heard_s if self._heard_s is not None else piece.start_s
        gaps = round((piece.end_s - since) / self._interval_s)
        for _ in range(min(gaps, 1000)):
            self.rates.add(None)
        self.is_away = False
        self._heard_s = piece.end_s
        self.known_intervals = 0

    def close_window(self) -> TrafficWindow | None:
        """Return the window if it is complete, and begin the next one."""
        window = self._window
        if window is None or self._heard_s is None:
            return None
        start_s, end_s, _ = self._pieces[-1]
        if self._heard_s - window.start_s < self._interval_s - (end_s - start_s) / 2:  # the next piece still fits
            return None
        self._window = None
        return window

    def learn(self, window: TrafficWindow, seen: Observation) -> Reason | None:
        """Make a sample of the window. Return a reason not to plan by it."""
        doubt = self._doubt(window, seen)
        if doubt is not None:
            self.rates.add(None)
            return doubt
        self._last_requests = window.requests
        self.rates.add(window.requests / window.seconds)
        self.known_intervals += 1
        return None

    def _doubt(self, window: TrafficWindow, seen: Observation) -> Reason | None:
        if window.seconds < COVERED * self._interval_s:
            return reason("metrics-gaps", f"{window.seconds:.0f} s of the interval are known")
        return self._zero_doubted(window, seen)

    def _zero_doubted(self, window: TrafficWindow, seen: Observation) -> Reason | None:
        """Doubt an empty interval after a busy one, until it is reported twice and no worker has requests waiting."""
        if window.requests > 0 or self._last_requests < FEW_REQUESTS:
            self._is_doubted = False
            return None
        waiting = sum(load.waiting + load.queued_tokens for load in seen.prefill_loads + seen.decode_loads)
        if self._is_doubted and not waiting:
            self._is_doubted = False
            return None
        self._is_doubted = True
        text = f"no request in an interval, {self._last_requests:.0f} in the one before"
        if waiting:
            text += ", but workers have requests waiting"
        return reason("metrics-zero", text)

    def demand(self, rps: float) -> Demand | None:
        """Return `rps` requests/s of the remembered lengths; None if no lengths are known."""
        if self._isl.value is None or self._osl.value is None:
            return None
        return Demand(rps, self._isl.value, self._osl.value, self._hit.value or 0.0)

    def recent(self, seconds: float) -> RecentTraffic | None:
        """Return the traffic of the last `seconds`, as far as it is known."""
        rps, known_s = self._rate(seconds)
        latest_rps, _ = self._rate(max(LEAST_LATEST_S, seconds / 2))
        demand = self.demand(rps) if known_s else None
        return RecentTraffic(demand, known_s, latest_rps) if demand is not None else None

    def _rate(self, seconds: float) -> tuple[float, float]:
        """Return the requests/s of the last `seconds`, and how many of these are known."""
        end_s = self._pieces[-1][1] if self._pieces else 0.0
        pieces = [piece for piece in self._pieces if piece[1] > end_s - seconds]
        known_s = sum(end - start for start, end, _ in pieces)
        return (sum(requests for _, _, requests in pieces) / known_s if known_s else 0.0), known_s

    def state(self) -> Mapping[str, Any]:
        """Return plain data for people."""
        return {
            "isl_tokens": self._isl.value,
            "osl_tokens": self._osl.value,
            "hit_share": self._hit.value,
            "samples": self.rates.samples,
            "forecast_skills": self.rates.skills(),
            "traffic_until_s": self._heard_s,
            "metrics_away": self.is_away,
        }


def known(value: float | None) -> float | None:
    """Return None for a value that is not a number, infinite or negative."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def positive(value: float | None) -> float | None:
    return value if known(value) else None
