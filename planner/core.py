"""What to order next. Pure: observations go in, decisions come out; time is what an observation says.

    core = PlannerCore(config, prefill_profile, decode_profile)
    decision = core.decide(observation)  # at least every `reactive_interval_s`; traffic in pieces of any length

Two loops. The predictive one runs whenever traffic of `predictive_interval_s` has come together: forecast, correct,
size, clamp. The reactive one runs in between, adds what queues and the last seconds ask for, and never goes below what
the predictive one planned. A decision is always a whole answer: the counts that should be ordered from now on.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.aggregated import aggregated_need, both_halves
from planner.budget import Counts, ScalingLimits, clamp, limits_of
from planner.correction import Corrections, corrected, corrected_aggregated
from planner.forecast import Forecast, Forecaster, Remembered
from planner.model import Action, Flip, Observation, PlannerConfig, Reason, ScalingDecision, Traffic
from planner.reactive import (
    NO_PRESSURE,
    Pressure,
    Recent,
    Rules,
    aggregated_pressure,
    decode_pressure,
    prefill_pressure,
)
from planner.sizing import Demand, Need, Slo, decode_need, prefill_need
from protocol.errors import ConfigError
from protocol.profile import Profile

WARM_UP = 3  # intervals known before anything is taken away, after the start and after an outage
HYSTERESIS = 0.04  # more load than forecast that the rest must carry before workers are taken away
DOWN_MEMORY = 2  # intervals in which fewer workers must have been enough
REST = 12  # intervals after a role got more in which one worker less is taken for noise
SMALL = 0.1  # share of a role's workers that is no more than one worker is
MEMORY = 3.0  # intervals after which a request's lengths count 1/e
RECENT_S = 20.0  # arrivals that the reactive loop looks at
CALM_S = 60.0  # how long the rest must have been able to carry the load before the reactive loop takes one away
COVERED = 0.5  # share of an interval that must be known
LATE_INTERVALS = 2.0  # without news for so many: an outage
FEW_REQUESTS = 5.0  # in an interval; none after more than these is doubted once

Loop = Literal["predictive", "reactive", "none"]


@dataclass(slots=True)
class _Window:
    """Traffic that adds up to one predictive interval."""

    start_s: float
    seconds: float = 0.0
    requests: float = 0.0
    ttft_sum_s: float = 0.0
    ttft_requests: float = 0.0
    itl_sum_s: float = 0.0
    itl_requests: float = 0.0

    def add(self, piece: Traffic, requests: float) -> None:
        self.seconds += piece.end_s - piece.start_s
        self.requests += requests
        if (ttft_s := known(piece.ttft_s)) is not None:
            self.ttft_sum_s += ttft_s * requests
            self.ttft_requests += requests
        if (itl_s := known(piece.itl_s)) is not None:
            self.itl_sum_s += itl_s * requests
            self.itl_requests += requests

    @property
    def observed(self) -> tuple[float | None, float | None]:
        ttft_s = self.ttft_sum_s / self.ttft_requests if self.ttft_requests else None
        itl_s = self.itl_sum_s / self.itl_requests if self.itl_requests else None
        return ttft_s, itl_s


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of the predictive loop: `floor` is what the reactive loop keeps to."""

    floor: Counts
    needed: Counts
    rps: float


class PlannerCore:
    def __init__(self, config: PlannerConfig, prefill: Profile, decode: Profile) -> None:
        """Of an aggregated fleet the two profiles are of the same worker; its counts are those of decode.

        Raises ConfigError if a profile lacks its role's table, or the minima do not fit the budget.
        """
        for profile, table, role in ((prefill, prefill.prefill, "prefill"), (decode, decode.decode, "decode")):
            if table is None:
                raise ConfigError(
                    f"the profile of {profile.model} ({profile.mapping}) has no {role} table",
                    hint=f"measure it with `kvmesh profile` for the {role} role",
                )
        self._config = config
        self._is_aggregated = config.mode == "aggregated"
        if self._is_aggregated:
            prefill = decode = both_halves(prefill, decode)
        self._profiles = (prefill, decode)
        self._limits = limits_of(config, prefill.gpus, decode.gpus)
        self._slo = Slo(config.ttft_slo_s, config.itl_slo_s)
        season = round(config.season_s / config.predictive_interval_s)
        self._rps = Forecaster(config.forecast, config.headroom, season)
        memory_s = MEMORY * config.predictive_interval_s
        self._isl, self._osl, self._hit = Remembered(memory_s), Remembered(memory_s), Remembered(memory_s)
        self._corrections = Corrections()
        self._target: Counts | None = None
        self._plan = _Plan(self._limits.fewest, Counts(0, 0), 0.0)
        self._enough: deque[Counts] = deque(maxlen=DOWN_MEMORY)
        self._intervals = 0
        self._grew = {"prefill": -REST, "decode": -REST}  # the interval in which a role got more
        self._window: _Window | None = None
        self._pieces: deque[tuple[float, float, float]] = deque()  # start, end, requests
        self._first_s: float | None = None
        self._heard_s: float | None = None  # until when traffic is known
        self._warm = 0
        self._away = False
        self._doubted = False
        self._last_requests = 0.0
        self._next_fast_s = -math.inf
        self._calm_since: dict[str, float] = {}

    def decide(self, seen: Observation) -> ScalingDecision:
        if self._target is None:  # a new planner takes the fleet as it is
            self._target = Counts(seen.prefill.ordered, seen.decode.ordered)
            self._first_s = seen.at_s
        doubts = self._hear(seen)
        if self._away:
            return self._hold(seen, doubts)
        window = self._closed_window()
        if window is not None and self._config.predictive:
            closing = self._learn(window, seen)
            if closing:
                return self._hold(seen, doubts + closing)
            self._next_fast_s = seen.at_s + self._config.reactive_interval_s
            return self._predictive(seen, doubts)
        if window is not None:
            doubts += self._learn(window, seen)
        if self._config.reactive and seen.at_s >= self._next_fast_s - 1e-6:
            self._next_fast_s = seen.at_s + self._config.reactive_interval_s
            return self._reactive(seen, doubts)
        return self._hold(seen, doubts)

    def state(self) -> dict[str, Any]:
        """What it goes by, for people: plain data."""
        target = self._target or Counts(0, 0)
        return {
            "target": {"prefill": target.prefill, "decode": target.decode},
            "floor": {"prefill": self._plan.floor.prefill, "decode": self._plan.floor.decode},
            "isl_tokens": self._isl.value,
            "osl_tokens": self._osl.value,
            "hit_share": self._hit.value,
            "ttft_correction": self._corrections.ttft,
            "itl_correction": self._corrections.itl,
            "correction_note": self._corrections.note,
            "samples": self._rps.samples,
            "forecast_errors": self._rps.errors(),
            "traffic_until_s": self._heard_s,
            "metrics_away": self._away,
        }

    # --- what is known ---------------------------------------------------------------------------------

    def _hear(self, seen: Observation) -> tuple[Reason, ...]:
        """Take in a piece of traffic. Reasons to doubt it, or that there is none."""
        doubts: tuple[Reason, ...] = ()
        piece = seen.traffic
        if piece is not None:
            requests = known(piece.requests)
            seconds = piece.end_s - piece.start_s
            if requests is None or not (math.isfinite(seconds) and seconds > 0):
                doubts = (_reason("metrics-missing", "the number of requests is not known, nothing is concluded"),)
            elif seen.at_s - piece.end_s > LATE_INTERVALS * self._config.predictive_interval_s:
                doubts = (_reason("metrics-late", f"traffic until {seen.at_s - piece.end_s:.0f} s ago is too old"),)
            elif self._away:  # it may count what came during the outage
                self._resume(piece, seen)
                doubts = (_reason("metrics-back", "the first figures after an outage are left out"),)
            else:
                self._take(piece, requests)
        return doubts + self._outage(seen)

    def _take(self, piece: Traffic, requests: float) -> None:
        self._heard_s = piece.end_s
        seconds = piece.end_s - piece.start_s
        self._isl.add(positive(piece.isl_tokens), requests, seconds)
        self._osl.add(positive(piece.osl_tokens), requests, seconds)
        self._hit.add(known(piece.hit_share), requests, seconds)
        self._pieces.append((piece.start_s, piece.end_s, requests))
        while len(self._pieces) > 1 and self._pieces[1][0] < piece.end_s - max(CALM_S, RECENT_S):
            self._pieces.popleft()
        if self._window is None:
            self._window = _Window(piece.start_s)
        self._window.add(piece, requests)

    def _outage(self, seen: Observation) -> tuple[Reason, ...]:
        since = self._heard_s if self._heard_s is not None else self._first_s
        silent_s = seen.at_s - (since if since is not None else seen.at_s)
        if not self._away and silent_s <= LATE_INTERVALS * self._config.predictive_interval_s:
            return ()
        self._away = True
        self._window = None
        self._pieces.clear()
        self._calm_since.clear()
        text = f"no usable traffic figures for {silent_s:.0f} s: what is ordered stays"
        return (_reason("metrics-away", text),)

    def _resume(self, piece: Traffic, seen: Observation) -> None:
        since = self._heard_s if self._heard_s is not None else piece.start_s
        gaps = round((piece.end_s - since) / self._config.predictive_interval_s)
        for _ in range(min(gaps, 1000)):
            self._rps.add(None)
        self._away = False
        self._heard_s = piece.end_s
        self._warm = 0
        self._enough.clear()

    def _closed_window(self) -> _Window | None:
        window, interval_s = self._window, self._config.predictive_interval_s
        if window is None or self._heard_s is None:
            return None
        start_s, end_s, _ = self._pieces[-1]
        if self._heard_s - window.start_s < interval_s - (end_s - start_s) / 2:  # the next piece would go beyond it
            return None
        self._window = None
        return window

    def _learn(self, window: _Window, seen: Observation) -> tuple[Reason, ...]:
        """One interval of traffic. Reasons not to plan by it."""
        if window.seconds < COVERED * self._config.predictive_interval_s:
            self._rps.add(None)
            return (_reason("metrics-gaps", f"{window.seconds:.0f} s of the interval are known"),)
        if (doubt := self._zero_doubted(window, seen)) is not None:
            self._rps.add(None)
            return (doubt,)
        self._last_requests = window.requests
        self._rps.add(window.requests / window.seconds)
        self._warm += 1
        demand = self._demand(window.requests / window.seconds)
        if demand is not None:
            self._corrections = self._corrected(window, demand, seen)
        return ()

    def _corrected(self, window: _Window, demand: Demand, seen: Observation) -> Corrections:
        before, requests = self._corrections, window.requests
        if self._is_aggregated:
            _, itl_s = window.observed
            return corrected_aggregated(before, self._profiles[1], demand, requests, seen.decode.ready, itl_s)
        workers = (seen.prefill.ready, seen.decode.ready)
        return corrected(before, self._profiles, demand, requests, workers, window.observed)

    def _zero_doubted(self, window: _Window, seen: Observation) -> Reason | None:
        """Nothing at all after a lot is believed when it is said twice, unless the workers say otherwise."""
        if window.requests > 0 or self._last_requests < FEW_REQUESTS:
            self._doubted = False
            return None
        waiting = sum(load.waiting + load.queued_tokens for load in seen.prefill_loads + seen.decode_loads)
        if self._doubted and not waiting:
            self._doubted = False
            return None
        self._doubted = True
        text = f"no request in an interval, {self._last_requests:.0f} in the one before"
        if waiting:
            text += ", but workers have requests waiting"
        return _reason("metrics-zero", text)

    def _demand(self, rps: float) -> Demand | None:
        if self._isl.value is None or self._osl.value is None:
            return None
        return Demand(rps, self._isl.value, self._osl.value, self._hit.value or 0.0)

    def _recent(self, seconds: float) -> Recent | None:
        if not self._pieces:
            return None
        end_s = self._pieces[-1][1]
        pieces = [piece for piece in self._pieces if piece[1] > end_s - seconds]
        known_s = sum(end - start for start, end, _ in pieces)
        demand = self._demand(sum(requests for _, _, requests in pieces) / known_s)
        return Recent(demand, known_s) if demand is not None else None

    # --- the two loops ---------------------------------------------------------------------------------

    def _predictive(self, seen: Observation, doubts: tuple[Reason, ...]) -> ScalingDecision:
        config = self._config
        if not self._rps.samples or self._demand(0.0) is None:
            return self._hold(seen, doubts + (_reason("no-traffic-yet", "no request has been seen yet"),))
        self._intervals += 1
        steps = max(1, math.ceil((config.start_s + config.predictive_interval_s) / config.predictive_interval_s))
        forecast = self._rps.forecast(steps)
        reasons = [*doubts, _of_forecast(forecast, config)]
        needs = self._needs(forecast.highest)
        reasons += [_of_need(role, need, self._demand(forecast.highest)) for role, need in needs.items()]
        if self._corrections.note:
            reasons.append(_reason("correction", self._corrections.note))
        needed = _counts(needs)
        careful = _counts(self._needs(forecast.highest * (1 + HYSTERESIS)))
        self._enough.append(careful)
        assert self._target is not None
        floor = Counts(
            self._settled("prefill", needed.prefill, self._target.prefill, [one.prefill for one in self._enough]),
            self._settled("decode", needed.decode, self._target.decode, [one.decode for one in self._enough]),
        )
        if self._warm < WARM_UP:
            floor = _most(floor, self._target)
            reasons.append(_reason("warm-up", f"{self._warm} of {WARM_UP} intervals are known: nothing is taken away"))
        self._plan = _Plan(floor, needed, forecast.path[-1])
        wanted, pressed = floor, Counts(0, 0)
        if config.reactive:
            prefill, decode = self._pressures(seen, RECENT_S)
            pressed = Counts(prefill.workers, decode.workers)
            wanted = _most(floor, pressed)
            reasons += [*prefill.reasons, *decode.reasons]
        # what the margin of time holds back may be of use in the other role
        wanted = self._lent(wanted, _most(careful, pressed))
        return self._order(seen, wanted, "predictive", reasons)

    def _settled(self, role: str, needed: int, current: int, enough: Sequence[int]) -> int:
        """Up at once; down only as far as was enough, with a margin, in each of the last intervals.

        A small step down soon after a step up is left out: around the border of two counts noise decides.
        """
        if needed >= current or len(enough) < DOWN_MEMORY:
            return max(needed, current)
        least = min(current, max(enough))
        is_small = current - least <= max(1, SMALL * current)
        return current if is_small and self._intervals - self._grew[role] < REST else least

    def _reactive(self, seen: Observation, doubts: tuple[Reason, ...]) -> ScalingDecision:
        assert self._target is not None
        prefill, decode = self._pressures(seen, RECENT_S)
        pressed = Counts(prefill.workers, decode.workers)
        reasons = [*prefill.reasons, *decode.reasons]
        floor = self._plan.floor
        if not self._config.predictive:
            floor = self._limits.fewest
        elif not self._rps.samples:
            floor = self._target
        wanted = _most(_most(self._target, pressed), floor)
        calm, calmed = self._calm(seen, floor)
        if wanted == self._target:
            wanted, reasons = calm, reasons + calmed
        else:  # the plan's sum is kept, if not its split
            wanted = self._lent(wanted, _most(pressed, Counts(prefill.least, decode.least)))
            self._plan = replace(self._plan, floor=_least(floor, wanted))
        return self._order(seen, wanted, "reactive", [*doubts, *reasons])

    def _pressures(self, seen: Observation, seconds: float) -> tuple[Pressure, Pressure]:
        recent = self._recent(seconds)
        if self._is_aggregated:
            return NO_PRESSURE, aggregated_pressure(self._rules(1), seen.decode, seen.decode_loads, recent)
        prefill = prefill_pressure(self._rules(0), seen.prefill, seen.prefill_loads, recent)
        decode = decode_pressure(self._rules(1), seen.decode, seen.decode_loads, recent)
        return prefill, decode

    def _lent(self, wanted: Counts, least: Counts) -> Counts:
        """If one role grows, the other gives what it has beyond `least`, to be turned instead of started.

        What it has beyond it is known when a few intervals are: the first seconds say nothing of answers yet.
        """
        assert self._target is not None
        if not self._can_flip or self._warm < WARM_UP:
            return wanted
        grows = Counts(wanted.prefill - self._target.prefill, wanted.decode - self._target.decode)
        if grows.decode > 0 and wanted.prefill > least.prefill:
            return replace(wanted, prefill=max(least.prefill, wanted.prefill - grows.decode))
        if grows.prefill > 0 and wanted.decode > least.decode:
            return replace(wanted, decode=max(least.decode, wanted.decode - grows.prefill))
        return wanted

    @property
    def _can_flip(self) -> bool:
        """There are two roles, their workers are of a kind, and a start would take longer."""
        config, limits = self._config, self._limits
        if self._is_aggregated:
            return False
        return config.flips and config.flip_s < config.start_s and limits.prefill_gpus == limits.decode_gpus

    def _calm(self, seen: Observation, floor: Counts) -> tuple[Counts, list[Reason]]:
        """One worker of a role less, if the rest could have carried the load for a while."""
        assert self._target is not None
        prefill, decode = self._pressures(seen, CALM_S)
        counts, reasons = self._target, []
        if self._long_calm("prefill", prefill.least < counts.prefill, seen.at_s) and counts.prefill > floor.prefill:
            counts = replace(counts, prefill=counts.prefill - 1)
            reasons.append(_reason("prefill-calm", f"{counts.prefill} carry the load of the last {CALM_S:.0f} s"))
            del self._calm_since["prefill"]
        if self._long_calm("decode", decode.least < counts.decode, seen.at_s) and counts.decode > floor.decode:
            counts = replace(counts, decode=counts.decode - 1)
            role = "aggregated" if self._is_aggregated else "decode"
            reasons.append(_reason(f"{role}-calm", f"{counts.decode} carry the load of the last {CALM_S:.0f} s"))
            del self._calm_since["decode"]
        return counts, reasons

    def _long_calm(self, role: str, calm: bool, at_s: float) -> bool:
        if not calm:
            self._calm_since.pop(role, None)
            return False
        return at_s - self._calm_since.setdefault(role, at_s) >= CALM_S

    def _rules(self, role: int) -> Rules:
        correction = self._corrections.itl if role else self._corrections.ttft
        return Rules(self._profiles[role], self._slo, self._config.target_utilization, correction)

    def _needs(self, rps: float) -> dict[str, Need]:
        """By role."""
        demand = self._demand(rps)
        assert demand is not None
        share = self._config.target_utilization
        if self._is_aggregated:
            return {"aggregated": aggregated_need(self._profiles[1], demand, self._slo, share, self._corrections.itl)}
        return {
            "prefill": prefill_need(self._profiles[0], demand, self._slo, share, self._corrections.ttft),
            "decode": decode_need(self._profiles[1], demand, self._slo, share, self._corrections.itl),
        }

    # --- decisions -------------------------------------------------------------------------------------

    def _order(self, seen: Observation, wanted: Counts, loop: Loop, reasons: Sequence[Reason]) -> ScalingDecision:
        current = self._target
        assert current is not None
        kept = Counts(
            max(wanted.prefill, current.prefill) if seen.prefill.starting else wanted.prefill,
            max(wanted.decode, current.decode) if seen.decode.starting else wanted.decode,
        )
        if kept != wanted:
            reasons = [*reasons, _reason("starting", "nothing is taken from a role that has workers starting")]
        leaving = Counts(
            seen.prefill.draining + max(0, seen.prefill.ordered - current.prefill),
            seen.decode.draining + max(0, seen.decode.ordered - current.decode),
        )
        counts, clamps = clamp(kept, current, leaving, self._limits_now(seen))
        for role in ("prefill", "decode"):
            if getattr(counts, role) > getattr(current, role):
                self._grew[role] = self._intervals
        flip = self._flip(seen, current, counts)
        told = [*reasons, *clamps]
        if flip is not None:
            times = f"in {self._config.flip_s:.0f} s, a start takes {self._config.start_s:.0f} s"
            told.append(_reason("flip", f"{flip.count} become {flip.to_role} {times}"))
        self._target = counts
        return self._decision(seen, loop, Action.HOLD if counts == current else Action.SCALE, told, flip)

    def _limits_now(self, seen: Observation) -> ScalingLimits:
        """Who is starting is never taken away, unless the budget leaves no choice."""
        limits = self._limits
        kept = Counts(max(limits.min_prefill, seen.prefill.starting), max(limits.min_decode, seen.decode.starting))
        if limits.gpus(kept) > limits.max_gpus:
            return limits
        return replace(limits, min_prefill=kept.prefill, min_decode=kept.decode)

    def _flip(self, seen: Observation, current: Counts, counts: Counts) -> Flip | None:
        """Workers that leave one role while the other grows."""
        if not self._can_flip:
            return None
        prefill, decode = counts.prefill - current.prefill, counts.decode - current.decode
        to_decode = min(-prefill, decode, seen.prefill.ready)
        to_prefill = min(prefill, -decode, seen.decode.ready)
        if to_decode > 0:
            return Flip(to_role="decode", count=to_decode)
        if to_prefill > 0:
            return Flip(to_role="prefill", count=to_prefill)
        return None

    def _hold(self, seen: Observation, reasons: Sequence[Reason]) -> ScalingDecision:
        current = self._target
        assert current is not None
        counts, clamps = clamp(current, current, Counts(0, 0), self._limits_now(seen))
        self._target = counts
        action = Action.HOLD if counts == current else Action.SCALE
        return self._decision(seen, "none", action, [*reasons, *clamps], None)

    def _decision(
        self, seen: Observation, loop: Loop, action: Action, reasons: Sequence[Reason], flip: Flip | None
    ) -> ScalingDecision:
        assert self._target is not None
        planned = self._plan.rps > 0 or self._plan.needed != Counts(0, 0)
        return ScalingDecision(
            at_s=seen.at_s,
            loop=loop,
            action=action,
            prefill=self._target.prefill,
            decode=self._target.decode,
            flip=flip,
            reasons=tuple(reasons),
            forecast_rps=self._plan.rps if planned else None,
            needed_prefill=self._plan.needed.prefill if planned else None,
            needed_decode=self._plan.needed.decode if planned else None,
            ttft_correction=self._corrections.ttft,
            itl_correction=self._corrections.itl,
        )


def known(value: float | None) -> float | None:
    """None for what is no number, infinite or negative."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def positive(value: float | None) -> float | None:
    return value if known(value) else None


def _counts(needs: Mapping[str, Need]) -> Counts:
    if "aggregated" in needs:
        return Counts(0, needs["aggregated"].workers)
    return Counts(needs["prefill"].workers, needs["decode"].workers)


def _most(one: Counts, other: Counts) -> Counts:
    return Counts(max(one.prefill, other.prefill), max(one.decode, other.decode))


def _least(one: Counts, other: Counts) -> Counts:
    return Counts(min(one.prefill, other.prefill), min(one.decode, other.decode))


def _reason(code: str, text: str) -> Reason:
    return Reason(code=code, text=text)


def _of_forecast(forecast: Forecast, config: PlannerConfig) -> Reason:
    text = (
        f"{forecast.path[0]:.2f} requests/s next, {forecast.path[-1]:.2f} in {len(forecast.path)} intervals "
        f"({forecast.method}); ready for {forecast.highest:.2f} ({config.headroom:.0%} of cases)"
    )
    return _reason("forecast", f"{text}; {forecast.note}" if forecast.note else text)


def _of_need(role: str, need: Need, demand: Demand | None) -> Reason:
    assert demand is not None
    text = f"{need.workers} {role} workers, each used to {need.utilization:.0%}, for {demand.rps:.2f} requests/s of "
    text += f"{demand.isl_tokens:.0f} tokens in ({demand.hit_share:.0%} cached), {demand.osl_tokens:.0f} out"
    if not need.fits:
        return _reason(f"{role}-slo-unreachable", f"the SLO cannot be kept by one worker; {text}")
    return _reason(f"{role}-need", text)
