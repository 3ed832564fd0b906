"""Say what lies around a decision: its price, and what would have changed it. Pure.

The planner itself is asked. A copy of it decides again with the traffic of the last interval made more or less, and
another copy goes on with the traffic as it is. So the answers hold for any policy, and agree with what it does.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.planner.costs import Horizon
from kvmesh.planner.model import Action, Observation, PeakForecast, PlannerConfig, RoleFleet, ScalingDecision, Traffic

MOST_OBSERVATIONS = 64  # of an interval that are decided again; an interval with more has no outlook
MORE = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # multiples of the observed rate that are tried
LESS = (0.9, 0.75, 0.5, 0.25, 0.0)
HALVINGS = 4  # of the gap between two of them
MOST_INTERVALS = 80  # that are looked ahead
LOOK_EVERY_S = 30.0  # a look takes as long as some hundred decisions; each change of the order gets one at once


class DecidingCore(Protocol):
    """Decides; kvmesh.planner.core.PlannerCore does. A deep copy of it decides the same."""

    def decide(self, seen: Observation) -> ScalingDecision: ...


C = TypeVar("C", bound=DecidingCore)


class OtherOrder(Struct, frozen=True, kw_only=True):
    """The workers that would have been, or will be, ordered instead."""

    prefill: int
    decode: int
    rps: float  # the traffic that brings it
    in_s: float = 0.0  # 0: now, had the traffic of the last interval been that


class Outlook(Struct, frozen=True, kw_only=True):
    """The price of a decision, and the traffic or time that changes it. None: nothing that was tried does."""

    observed_rps: float
    interval_s: float  # of which `observed_rps` is the mean
    miss_cost: float
    break_even_s: float  # a worker costs so many seconds of its time to miss
    more: OtherOrder | None = None  # the lowest rate found that orders more
    fewer: OtherOrder | None = None  # the highest rate found that orders fewer
    leaving: OtherOrder | None = None  # when the first worker goes if the traffic stays as it is
    leaving_gpu_s: float = 0.0  # GPU seconds of the workers that go then, until then


class OutlookKeeper:
    """Remembers what the planner saw since its last plan, and looks around each plan."""

    def __init__(self, config: PlannerConfig, gpus: tuple[int, int]) -> None:
        """Look around plans made with these settings. `gpus` are those of one prefill and of one decode worker."""
        self._config = config
        self._gpus = gpus
        self._before: DecidingCore | None = None  # as it was before the observations in `_since`
        self._since: list[Observation] = []
        self._looked_s = -math.inf

    def decide(self, core: DecidingCore, seen: Observation) -> tuple[ScalingDecision, Outlook | None]:
        """Have the core decide. Return an outlook with decisions of the predictive loop."""
        if not self._config.predictive:
            return core.decide(seen), None
        if self._before is None:
            self._before = copy.deepcopy(core)
        self._since.append(seen)
        decision = core.decide(seen)
        outlook = None
        is_due = decision.action is Action.SCALE or seen.at_s - self._looked_s >= LOOK_EVERY_S
        if decision.loop == "predictive" and is_due:
            self._looked_s = seen.at_s
            outlook = self._look(self._before, core, decision)
        if decision.loop == "predictive" or len(self._since) >= MOST_OBSERVATIONS:
            self._before, self._since = None, []
        return decision, outlook

    def _look(self, before: DecidingCore, after: DecidingCore, decision: ScalingDecision) -> Outlook | None:
        requests, seconds = _sums(self._since)
        if seconds <= 0:
            return None
        config = self._config
        outlook = Outlook(
            observed_rps=requests / seconds,
            interval_s=seconds,
            miss_cost=config.miss_cost,
            break_even_s=Horizon(config.start_s, config.miss_cost).break_even_s,
            more=other_order(before, self._since, decision, MORE, _is_more),
            fewer=other_order(before, self._since, decision, LESS, _is_less),
        )
        return self._with_leaving(outlook, after, decision)

    def _with_leaving(self, outlook: Outlook, after: DecidingCore, decision: ScalingDecision) -> Outlook:
        config = self._config
        if decision.prefill <= config.min_prefill and decision.decode <= config.min_decode:
            return outlook
        leaving = first_to_leave(after, decision, outlook.observed_rps, config.predictive_interval_s)
        if leaving is None:
            return outlook
        gone = max(0, decision.prefill - leaving.prefill), max(0, decision.decode - leaving.decode)
        gpus = sum(count * of_one for count, of_one in zip(gone, self._gpus, strict=True))
        return replace(outlook, leaving=leaving, leaving_gpu_s=gpus * leaving.in_s)


Compare = Callable[[ScalingDecision, ScalingDecision], bool]


def other_order(
    before: DecidingCore,
    since: Sequence[Observation],
    decision: ScalingDecision,
    factors: Sequence[float],
    is_other: Compare,
) -> OtherOrder | None:
    """Return the order nearest to the decision that another rate in the last interval would have brought.

    `factors` go away from 1. Queues and workers are taken as they were.
    """
    requests, seconds = _sums(since)
    if not requests:
        return None

    def ordered_at(factor: float) -> ScalingDecision:
        core = copy.deepcopy(before)
        return [core.decide(_scaled(seen, factor)) for seen in since][-1]

    tried = ((near, far, ordered_at(far)) for near, far in pairwise((1.0, *factors)))
    found = next((each for each in tried if is_other(each[2], decision)), None)
    if found is None:
        return None
    factor, other = _nearest(*found, ordered_at, lambda found: is_other(found, decision))
    return OtherOrder(prefill=other.prefill, decode=other.decode, rps=factor * requests / seconds)


def _nearest(
    near: float,
    far: float,
    other: ScalingDecision,
    ordered_at: Callable[[float], ScalingDecision],
    is_other: Callable[[ScalingDecision], bool],
) -> tuple[float, ScalingDecision]:
    """Halve the gap between a factor that changes nothing and one that brings the `other` order."""
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        found = ordered_at(middle)
        if is_other(found):
            far, other = middle, found
        else:
            near = middle
    return far, other


def first_to_leave(after: C, decision: ScalingDecision, rps: float, interval_s: float) -> OtherOrder | None:
    """Return when the next worker goes if `rps` requests/s continue to come and all orders are carried out."""
    core = copy.deepcopy(after)
    for seen in _going_on(decision, rps, interval_s):
        found = core.decide(seen)
        if _is_less(found, decision):
            in_s = seen.at_s - decision.at_s
            return OtherOrder(prefill=found.prefill, decode=found.decode, rps=rps, in_s=in_s)
    return None


def _going_on(decision: ScalingDecision, rps: float, interval_s: float) -> Iterator[Observation]:
    """Yield observations of intervals that all bring the same traffic to the fleet that is ordered."""
    for number in range(1, MOST_INTERVALS + 1):
        end_s = decision.at_s + number * interval_s
        yield Observation(
            at_s=end_s,
            prefill=RoleFleet(ready=decision.prefill),
            decode=RoleFleet(ready=decision.decode),
            traffic=Traffic(start_s=end_s - interval_s, end_s=end_s, requests=rps * interval_s),
        )


def _is_more(other: ScalingDecision, decision: ScalingDecision) -> bool:
    return other.prefill + other.decode > decision.prefill + decision.decode


def _is_less(other: ScalingDecision, decision: ScalingDecision) -> bool:
    return other.prefill + other.decode < decision.prefill + decision.decode


def _scaled(seen: Observation, factor: float) -> Observation:
    traffic = seen.traffic
    if traffic is None or traffic.requests is None:
        return seen
    answered = None if traffic.answered is None else factor * traffic.answered
    return replace(seen, traffic=replace(traffic, requests=factor * traffic.requests, answered=answered))


def _sums(since: Sequence[Observation]) -> tuple[float, float]:
    """Return the requests that are known to have come, and the seconds of which that is known."""
    pieces = [seen.traffic for seen in since if seen.traffic is not None and seen.traffic.requests is not None]
    return sum(piece.requests or 0.0 for piece in pieces), sum(piece.end_s - piece.start_s for piece in pieces)


def sentences(decision: ScalingDecision, outlook: Outlook) -> list[str]:
    """Return the outlook for people, a line for each part."""
    price = (
        f"price: a missed request costs the GPU time of {outlook.miss_cost:g}; to miss a worker costs as much as to "
        f"keep it for {outlook.break_even_s:.0f} s"
    )
    return [*_of_peak(decision.peak), price, *_of_others(decision, outlook), *_of_leaving(decision, outlook)]


def _of_peak(peak: PeakForecast | None) -> Iterator[str]:
    if peak is not None:
        yield (
            f"forecast: at most {peak.likely_rps:.2f} requests/s in the next {peak.horizon_s:.0f} s ({peak.method}), "
            f"{peak.low_rps:.2f} to {peak.high_rps:.2f} in 8 of 10 cases; ready for {peak.ready_rps:.2f}"
        )


def _of_others(decision: ScalingDecision, outlook: Outlook) -> Iterator[str]:
    came = f"{outlook.observed_rps:.2f} requests/s came in {outlook.interval_s:.0f} s"
    if outlook.more is not None:
        yield f"more: {came}; from {outlook.more.rps:.2f} on, {_change(decision, outlook.more)} would be ordered"
    if outlook.fewer is not None:
        yield f"fewer: {came}; up to {outlook.fewer.rps:.2f}, {_change(decision, outlook.fewer)} would be ordered"


def _of_leaving(decision: ScalingDecision, outlook: Outlook) -> Iterator[str]:
    if (leaving := outlook.leaving) is not None:
        yield (
            f"held: {_change(decision, leaving)} in {leaving.in_s:.0f} s if {leaving.rps:.2f} requests/s continue to "
            f"come; until then that costs {outlook.leaving_gpu_s / 3600:.2f} GPU-hours"
        )


def _change(now: ScalingDecision, other: OtherOrder) -> str:
    """Write `2 more decode workers`, or `1 fewer prefill worker and 1 more decode worker`."""
    parts = []
    for role, count in (("prefill", other.prefill - now.prefill), ("decode", other.decode - now.decode)):
        if count:
            workers = f"{role} worker{'s' if abs(count) > 1 else ''}"
            parts.append(f"{abs(count)} {'more' if count > 0 else 'fewer'} {workers}")
    return " and ".join(parts)
