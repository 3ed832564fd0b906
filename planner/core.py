"""Decide what to order next. Pure: observations go in, decisions come out, and an observation says what time it is.

    core = PlannerCore(config, prefill_profile, decode_profile)
    decision = core.decide(observation)  # at least every `reactive_interval_s`; traffic in pieces of any length

There are two loops. The predictive loop runs at the end of every `predictive_interval_s` of traffic: forecast, correct,
size, clamp. The reactive loop runs in between. It adds what queues and the last seconds ask for, and never goes below
the predictive loop's plan. A decision is always complete: the counts that should be ordered from now on.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import structs

from kvmesh.planner.budget import Counts, ScalingLimits, clamp, least_of, limits_of, most_of
from kvmesh.planner.capacity import FleetCapacity
from kvmesh.planner.costs import Horizon, quantile_of
from kvmesh.planner.forecast import Forecast
from kvmesh.planner.history import TrafficHistory, TrafficWindow
from kvmesh.planner.model import Action, Flip, Observation, PeakForecast, PlannerConfig, Reason, ScalingDecision, reason
from kvmesh.planner.peak import EXCEEDED_S, ExpectedPeak
from kvmesh.planner.reactive import Pressure
from kvmesh.planner.sizing import Demand, Need
from kvmesh.protocol.profile import Profile

WARM_UP = 3  # intervals known before anything is taken away, after the start and after an outage
HYSTERESIS = 0.04  # more load than forecast that the rest must carry before workers are taken away
DOWN_MEMORY = 2  # intervals in which fewer workers must have been enough
CARRIED = 3  # intervals in which the fleet has carried the load before its times correct a profile: queues are gone
FORGOTTEN = 0.9995  # of the highest demand, in each interval
RECENT_S = 20.0  # without forecasts: the arrivals that the reactive loop looks at
CALM_S = 60.0  # without forecasts: how long the rest must have been able to carry the load before one is taken away
MOST_NEEDS = 4096  # needs remembered

Loop = Literal["predictive", "reactive", "none"]


@dataclass(frozen=True, slots=True)
class ForecastPlan:
    """The last plan of the predictive loop. The reactive loop never goes below `floor`."""

    floor: Counts
    needed: Counts
    rps: float
    peak: PeakForecast | None = None


class PlannerCore:
    """Decides, at each observation, how many workers of each role should be ordered."""

    def __init__(self, config: PlannerConfig, prefill: Profile, decode: Profile) -> None:
        """Raise ConfigError if a profile lacks its role's table, or the minima do not fit the budget.

        The two profiles of an aggregated fleet describe the same worker; its counts are those of decode.
        """
        self._config = config
        self._capacity = FleetCapacity(config, prefill, decode)
        self._limits = limits_of(config, *self._capacity.gpus)
        self._peak = ExpectedPeak(config)
        horizon = Horizon(config.start_s, config.miss_cost, peak_is_known=self._peak.is_known)
        self._horizon = horizon if config.predictive else None
        self._recent_s = horizon.evidence_s if config.predictive else RECENT_S
        self._traffic = TrafficHistory(
            config, memory_s=max(CALM_S, config.predictive_interval_s, self._recent_s, EXCEEDED_S)
        )
        self._highest_rps = 0.0
        self._target: Counts | None = None
        self._plan = ForecastPlan(self._limits.fewest, Counts(0, 0), 0.0)
        self._needs_seen: deque[tuple[float, Counts]] = deque(maxlen=MOST_NEEDS)
        self._carried = CARRIED  # intervals in a row in which the fleet carried the load
        self._next_fast_s = -math.inf
        self._calm_since: dict[str, float] = {}

    def decide(self, seen: Observation) -> ScalingDecision:
        if self._target is None:  # a new planner takes the fleet as it is
            self._target = Counts(seen.prefill.ordered, seen.decode.ordered)
            if self._horizon is not None:
                self._peak.begin(self._target, seen.at_s + self._horizon.unneeded_s)
        doubts = self._traffic.hear(seen)
        if self._traffic.is_away:
            self._needs_seen.clear()
            self._calm_since.clear()
            return self._hold(seen, doubts)
        window = self._traffic.close_window()
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
        """Return what the decisions are based on, as plain data for people."""
        target = self._target or Counts(0, 0)
        corrections = self._capacity.corrections
        return {
            "target": {"prefill": target.prefill, "decode": target.decode},
            "floor": {"prefill": self._plan.floor.prefill, "decode": self._plan.floor.decode},
            "ttft_correction": corrections.ttft,
            "itl_correction": corrections.itl,
            "correction_note": corrections.note,
            **self._traffic.state(),
        }

    def _learn(self, window: TrafficWindow, seen: Observation) -> tuple[Reason, ...]:
        """Take in one interval of traffic. Return reasons not to plan by it."""
        doubt = self._traffic.learn(window, seen)
        if doubt is not None:
            return (doubt,)
        demand = self._traffic.demand(window.requests / window.seconds)
        if demand is not None:
            self._carried = self._carried + 1 if self._carries(demand, seen) else 0
            if self._carried >= CARRIED:
                served = replace(demand, rps=min(window.answered, window.requests) / window.seconds)
                self._capacity.correct(window, served, seen)
        return ()

    def _carries(self, demand: Demand, seen: Observation) -> bool:
        """Return whether the fleet carries the load, and no queue is left: other times say nothing of its workers."""
        settled = structs.replace(
            seen,
            prefill=structs.replace(seen.prefill, starting=0),
            decode=structs.replace(seen.decode, starting=0),
        )
        prefill, decode = self._capacity.pressures(settled, self._traffic.recent(RECENT_S), None)
        needs = _counts(self._capacity.uncorrected(demand))
        is_large = seen.prefill.ready >= needs.prefill and seen.decode.ready >= needs.decode
        return is_large and prefill.workers <= seen.prefill.ready and decode.workers <= seen.decode.ready

    # --- the two loops ---------------------------------------------------------------------------------

    def _predictive(self, seen: Observation, doubts: tuple[Reason, ...]) -> ScalingDecision:
        config = self._config
        recent = self._traffic.recent(max(config.predictive_interval_s, self._recent_s))
        if not self._traffic.rates.samples or recent is None:
            return self._hold(seen, doubts + (reason("no-traffic-yet", "no request has been seen yet"),))
        self._highest_rps = max(FORGOTTEN * self._highest_rps, recent.demand.rps)
        steps = max(1, math.ceil((config.start_s + config.predictive_interval_s) / config.predictive_interval_s))
        forecast = self._traffic.rates.forecast(steps)
        expected_rps = min(forecast.highest, self._highest_rps) if forecast.is_plain else forecast.highest
        reasons = [*doubts, _of_forecast(forecast, expected_rps, config), *self._hear_of_peak()]
        needs = self._needs(expected_rps)
        reasons += [_of_need(role, need, self._traffic.demand(expected_rps)) for role, need in needs.items()]
        if self._capacity.corrections.note:
            reasons.append(reason("correction", self._capacity.corrections.note))
        needed = self._peak.limited(_counts(needs))
        careful = self._peak.limited(_counts(self._needs((1 + HYSTERESIS) * recent.demand.rps)))
        self._needs_seen.append((seen.at_s, careful))
        kept_s = self._horizon.break_even_s if self._horizon is not None and not forecast.falls else 0.0
        kept = self._kept(seen.at_s, kept_s)
        held = least_of(self._peak.held(seen.at_s), self._target or Counts(0, 0))
        floor = most_of(most_of(needed, kept), held)
        if held != least_of(held, most_of(needed, kept)):
            text = (
                f"{held.prefill} prefill and {held.decode} decode stay at first: they are there for the expected peak"
            )
            reasons.append(reason("expected-peak", text))
        if kept_s and kept != least_of(kept, needed):
            reasons.append(self._of_break_even(seen.at_s, kept_s, kept, needed))
        if self._traffic.known_intervals < WARM_UP:
            assert self._target is not None
            floor = most_of(floor, self._target)
            reasons.append(
                reason(
                    "warm-up",
                    f"{self._traffic.known_intervals} of {WARM_UP} intervals are known: nothing is taken away",
                )
            )
        peak = _peak_of(forecast, expected_rps, steps * config.predictive_interval_s)
        self._plan = ForecastPlan(floor, needed, forecast.path[-1], peak)
        wanted, pressed = floor, Counts(0, 0)
        if config.reactive:
            prefill, decode = self._pressures(seen, self._recent_s)
            pressed, evidence = self._pressed(seen, prefill, decode)
            wanted = most_of(floor, pressed)
            reasons += evidence
        # Workers that are held back by the wait before a step down may be useful in the other role.
        wanted = self._lent(wanted, most_of(careful, pressed))
        return self._order(seen, wanted, "predictive", reasons)

    def _kept(self, at_s: float, kept_s: float) -> Counts:
        """Return the workers that were needed in the last `kept_s`, and at least in the last intervals."""
        longest_s = max(kept_s, (DOWN_MEMORY - 0.5) * self._config.predictive_interval_s)
        assert self._target is not None
        most = Counts(0, 0)
        for then_s, counts in self._needs_seen:
            if at_s - then_s <= longest_s:
                most = most_of(most, counts)
        return least_of(most, self._target)

    def _of_break_even(self, at_s: float, kept_s: float, kept: Counts, needed: Counts) -> Reason:
        """Say which workers stay although the forecast does not take them, and what would change that."""
        last_s = max(
            then_s
            for then_s, counts in self._needs_seen
            if counts.prefill > needed.prefill or counts.decode > needed.decode
        )
        text = (
            f"{kept.prefill} prefill and {kept.decode} decode stay for {max(0.0, last_s + kept_s - at_s):.0f} s more, "
            f"unless they are needed or a trend falls: the last need for more than {needed.prefill} and "
            f"{needed.decode} was {at_s - last_s:.0f} s ago, to miss a worker costs {kept_s:.0f} s of one"
        )
        return reason("break-even", text)

    def _reactive(self, seen: Observation, doubts: tuple[Reason, ...]) -> ScalingDecision:
        assert self._target is not None
        prefill, decode = self._pressures(seen, self._recent_s)
        pressed, evidence = self._pressed(seen, prefill, decode)
        reasons = list(evidence)
        floor = self._plan.floor
        if not self._config.predictive:
            floor = self._limits.fewest
        elif not self._traffic.rates.samples:
            floor = self._target
        wanted = most_of(most_of(self._target, pressed), floor)
        if wanted != self._target:  # the sum of the plan is kept; its split may change
            wanted = self._lent(wanted, most_of(pressed, Counts(prefill.least, decode.least)))
            self._plan = replace(self._plan, floor=least_of(floor, wanted))
        elif not self._config.predictive:
            wanted, calmed = self._calm(seen, floor)
            reasons += calmed
        return self._order(seen, wanted, "reactive", [*doubts, *reasons])

    def _pressures(self, seen: Observation, seconds: float) -> tuple[Pressure, Pressure]:
        return self._capacity.pressures(seen, self._traffic.recent(seconds), self._horizon)

    def _pressed(self, seen: Observation, prefill: Pressure, decode: Pressure) -> tuple[Counts, tuple[Reason, ...]]:
        """Return the workers that the present asks for and why, and remember those that arrivals alone ask for."""
        if prefill.steady or decode.steady:
            self._needs_seen.append((seen.at_s, self._peak.limited(Counts(prefill.steady, decode.steady))))
        pressed = Counts(prefill.workers, decode.workers)
        raised = self._peak.press(pressed, Counts(seen.prefill.ready, seen.decode.ready), seen.at_s)
        return self._peak.limited(pressed), (*prefill.reasons, *decode.reasons, *raised)

    def _hear_of_peak(self) -> tuple[Reason, ...]:
        """Compare the load of the last minutes, read cautiously, with the highest expected one."""
        lasting = self._traffic.recent(EXCEEDED_S)
        if not self._peak.is_known or lasting is None:
            return ()
        return self._peak.hear(_counts(self._capacity.needs(lasting.at_least())), lasting.seconds)

    def _lent(self, wanted: Counts, least: Counts) -> Counts:
        """Let one role give its workers beyond `least` to the role that grows: a flip instead of a start.

        This needs a few known intervals: the first seconds do not show yet how long answers are.
        """
        assert self._target is not None
        if not self._can_flip or self._traffic.known_intervals < WARM_UP:
            return wanted
        grows = Counts(wanted.prefill - self._target.prefill, wanted.decode - self._target.decode)
        if grows.decode > 0 and wanted.prefill > least.prefill:
            return replace(wanted, prefill=max(least.prefill, wanted.prefill - grows.decode))
        if grows.prefill > 0 and wanted.decode > least.decode:
            return replace(wanted, decode=max(least.decode, wanted.decode - grows.prefill))
        return wanted

    @property
    def _can_flip(self) -> bool:
        """Return whether there are two roles with equal workers, and a flip is faster than a start."""
        config, limits = self._config, self._limits
        if self._capacity.is_aggregated:
            return False
        return config.flips and config.flip_s < config.start_s and limits.prefill_gpus == limits.decode_gpus

    def _calm(self, seen: Observation, floor: Counts) -> tuple[Counts, list[Reason]]:
        """Take away one worker of a role if the rest could have carried the load for a while."""
        assert self._target is not None
        prefill, decode = self._pressures(seen, CALM_S)
        counts, reasons = self._target, []
        if self._long_calm("prefill", prefill.least < counts.prefill, seen.at_s) and counts.prefill > floor.prefill:
            counts = replace(counts, prefill=counts.prefill - 1)
            reasons.append(reason("prefill-calm", f"{counts.prefill} carry the load of the last {CALM_S:.0f} s"))
            del self._calm_since["prefill"]
        if self._long_calm("decode", decode.least < counts.decode, seen.at_s) and counts.decode > floor.decode:
            counts = replace(counts, decode=counts.decode - 1)
            role = "aggregated" if self._capacity.is_aggregated else "decode"
            reasons.append(reason(f"{role}-calm", f"{counts.decode} carry the load of the last {CALM_S:.0f} s"))
            del self._calm_since["decode"]
        return counts, reasons

    def _long_calm(self, role: str, calm: bool, at_s: float) -> bool:
        if not calm:
            self._calm_since.pop(role, None)
            return False
        return at_s - self._calm_since.setdefault(role, at_s) >= CALM_S

    def _needs(self, rps: float) -> Mapping[str, Need]:
        demand = self._traffic.demand(rps)
        assert demand is not None
        return self._capacity.needs(demand)

    # --- decisions -------------------------------------------------------------------------------------

    def _order(self, seen: Observation, wanted: Counts, loop: Loop, reasons: Sequence[Reason]) -> ScalingDecision:
        current = self._target
        assert current is not None
        kept = Counts(
            max(wanted.prefill, current.prefill) if seen.prefill.starting else wanted.prefill,
            max(wanted.decode, current.decode) if seen.decode.starting else wanted.decode,
        )
        if kept != wanted:
            reasons = [*reasons, reason("starting", "nothing is taken from a role that has workers starting")]
        leaving = Counts(
            seen.prefill.draining + max(0, seen.prefill.ordered - current.prefill),
            seen.decode.draining + max(0, seen.decode.ordered - current.decode),
        )
        counts, clamps = clamp(kept, current, leaving, self._limits_now(seen))
        flip = self._flip(seen, current, counts)
        told = [*reasons, *clamps]
        if flip is not None:
            times = f"in {self._config.flip_s:.0f} s, a start takes {self._config.start_s:.0f} s"
            told.append(reason("flip", f"{flip.count} become {flip.to_role} {times}"))
        self._target = counts
        return self._decision(seen, loop, Action.HOLD if counts == current else Action.SCALE, told, flip)

    def _limits_now(self, seen: Observation) -> ScalingLimits:
        """Raise the minima to the starting workers: they are not taken away unless the budget leaves no choice."""
        limits = self._limits
        kept = Counts(max(limits.min_prefill, seen.prefill.starting), max(limits.min_decode, seen.decode.starting))
        if limits.gpus(kept) > limits.max_gpus:
            return limits
        return replace(limits, min_prefill=kept.prefill, min_decode=kept.decode)

    def _flip(self, seen: Observation, current: Counts, counts: Counts) -> Flip | None:
        """Return the workers that leave one role while the other grows."""
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
            peak=self._plan.peak,
            needed_prefill=self._plan.needed.prefill if planned else None,
            needed_decode=self._plan.needed.decode if planned else None,
            ttft_correction=self._capacity.corrections.ttft,
            itl_correction=self._capacity.corrections.itl,
        )


def _counts(needs: Mapping[str, Need]) -> Counts:
    if "aggregated" in needs:
        return Counts(0, needs["aggregated"].workers)
    return Counts(needs["prefill"].workers, needs["decode"].workers)


def _peak_of(forecast: Forecast, ready_rps: float, horizon_s: float) -> PeakForecast:
    return PeakForecast(
        method=forecast.method,
        horizon_s=horizon_s,
        likely_rps=max(forecast.path),
        low_rps=forecast.low,
        high_rps=forecast.high,
        ready_rps=ready_rps,
    )


def _of_forecast(forecast: Forecast, expected_rps: float, config: PlannerConfig) -> Reason:
    quantile = quantile_of(config.miss_cost)
    text = (
        f"{forecast.path[0]:.2f} requests/s next, {forecast.path[-1]:.2f} in {len(forecast.path)} intervals "
        f"({forecast.method}); ready for {expected_rps:.2f} ({quantile:.0%} of cases)"
    )
    return reason("forecast", f"{text}; {forecast.note}" if forecast.note else text)


def _of_need(role: str, need: Need, demand: Demand | None) -> Reason:
    assert demand is not None
    text = f"{need.workers} {role} workers, each used to {need.utilization:.0%}, for {demand.rps:.2f} requests/s of "
    text += f"{demand.isl_tokens:.0f} tokens in ({demand.hit_share:.0%} cached), {demand.osl_tokens:.0f} out"
    if not need.fits:
        return reason(f"{role}-slo-unreachable", f"the SLO cannot be kept by one worker; {text}")
    return reason(f"{role}-need", text)
