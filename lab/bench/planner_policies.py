"""Policies that decide how many workers run, to compare with the planner in the simulator. Each is a `decide`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvmesh.lab.bench.planner_arima import ArimaForecaster
from kvmesh.planner.budget import Counts, ScalingLimits, limits_of, published_budget, within_budget
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.history import known
from kvmesh.planner.model import Action, Observation, PlannerConfig, ScalingDecision, Traffic, WorkerLoad
from kvmesh.planner.reference import reference_sizing
from kvmesh.planner.sizing import Demand, Slo, decode_capacity, decode_need, prefill_need, prefill_time_s
from kvmesh.protocol.profile import Profile
from kvmesh.simulator import SimRequest

SLOT_S = 60.0  # the clairvoyant looks at the future in such pieces
SEQUENCES_ITL_SHARE = 0.95  # with all of the ITL half of a full worker's answers would be too slow
SENSITIVITY = 0.8  # the reference's, to take one away

Decide = Callable[[Observation], ScalingDecision]


@dataclass(frozen=True, slots=True)
class Setting:
    """Hold the facts about the workers that every policy gets."""

    config: PlannerConfig
    prefill: Profile
    decode: Profile

    @property
    def slo(self) -> Slo:
        return Slo(self.config.ttft_slo_s, self.config.itl_slo_s)

    @property
    def limits(self) -> ScalingLimits:
        return limits_of(self.config, self.prefill.gpus, self.decode.gpus)

    def sized(self, demand: Demand) -> Counts:
        """Return the counts that the planner's sizing gives, within the budget."""
        share = self.config.target_utilization
        prefill = prefill_need(self.prefill, demand, self.slo, share).workers
        decode = decode_need(self.decode, demand, self.slo, share).workers
        return within_budget(Counts(prefill, decode), self.limits)

    def most_sequences(self, demand: Demand) -> int:
        """Return how many sequences a worker is set to run at once, as `kvmesh profile plan` does."""
        return decode_capacity(self.decode, demand, SEQUENCES_ITL_SHARE * self.config.itl_slo_s).batch


def planned(setting: Setting) -> Decide:
    """Predictive, reactive, flips."""
    return PlannerCore(setting.config, setting.prefill, setting.decode).decide


def fixed(counts: Counts) -> Decide:
    return lambda seen: counts_decision(seen, counts)


@dataclass(frozen=True, slots=True)
class DemandSlot:
    """Hold the demand of one piece of the future."""

    start_s: float
    demand: Demand


def slots_of(requests: Iterable[SimRequest], hit_share: float, slot_s: float = SLOT_S) -> list[DemandSlot]:
    """Return the slots in order, without a gap. A slot without requests has the lengths of the slot before."""
    slots: list[DemandSlot] = []
    count = isl_tokens = osl_tokens = 0.0

    def close() -> None:
        before = slots[-1].demand if slots else Demand(0.0, 1.0, 1.0)
        isl, osl = (isl_tokens / count, osl_tokens / count) if count else (before.isl_tokens, before.osl_tokens)
        slots.append(DemandSlot(len(slots) * slot_s, Demand(count / slot_s, isl, osl, hit_share)))

    for request in requests:
        while request.arrival_s >= (len(slots) + 1) * slot_s:
            close()
            count = isl_tokens = osl_tokens = 0.0
        count += 1
        isl_tokens += request.isl_tokens
        osl_tokens += request.osl_tokens
    close()
    return slots


def clairvoyant(setting: Setting, slots: Sequence[DemandSlot]) -> Decide:
    """Return a policy that knows the future: workers are ready when a slot needs them and gone when it ends."""
    needs = [setting.sized(slot.demand) for slot in slots]

    def decide(seen: Observation) -> ScalingDecision:
        now = min(len(needs) - 1, int(seen.at_s / SLOT_S))
        soon = min(
            len(needs) - 1, int((seen.at_s + setting.config.start_s + setting.config.reactive_interval_s) / SLOT_S)
        )
        ahead = needs[now : soon + 1]
        counts = Counts(max(need.prefill for need in ahead), max(need.decode for need in ahead))
        return counts_decision(seen, counts)

    return decide


class _Lengths:
    """Means over the requests of one interval."""

    def __init__(self) -> None:
        self._sums = {"isl_tokens": 0.0, "osl_tokens": 0.0, "hit_share": 0.0}
        self._requests = dict(self._sums)

    def add(self, requests: float, traffic: Traffic) -> None:
        for name in self._sums:
            if (mean := known(getattr(traffic, name))) is not None:
                self._sums[name] += mean * requests
                self._requests[name] += requests

    def demand(self, rps: float) -> Demand | None:
        """Return the demand at a rate, None if a length is not known."""
        if not self._requests["isl_tokens"] or not self._requests["osl_tokens"]:
            return None
        means = {name: total / max(self._requests[name], 1.0) for name, total in self._sums.items()}
        return Demand(rps, means["isl_tokens"], means["osl_tokens"], means["hit_share"])


class ReferencePlanner:
    """The reference's newer planner: its throughput loop sets the floor, its load loop moves by one above it.

    Its interval is that of ours (its own default is three times as long), its forecast ARIMA's next value.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rps = ArimaForecaster()
        self._lengths = _Lengths()  # of the last interval, and of the first from its beginning
        self._counted = _Lengths()
        self._floor: Counts | None = None
        self._target: Counts | None = None
        self._next_slow_s = setting.config.predictive_interval_s
        self._requests = self._seconds = 0.0

    def decide(self, seen: Observation) -> ScalingDecision:
        if self._target is None:
            self._target = Counts(seen.prefill.ordered, seen.decode.ordered)
        self._hear(seen)
        if seen.at_s >= self._next_slow_s - 1e-6:
            self._next_slow_s += self._setting.config.predictive_interval_s
            self._plan()
        else:
            self._follow_load(seen)
        return counts_decision(seen, self._target)

    def _hear(self, seen: Observation) -> None:
        traffic = seen.traffic
        if traffic is None or traffic.requests is None:
            return
        self._requests += traffic.requests
        self._seconds += traffic.end_s - traffic.start_s
        self._counted.add(traffic.requests, traffic)

    def _demand(self, rps: float) -> Demand | None:
        return self._lengths.demand(rps) or self._counted.demand(rps)

    def _plan(self) -> None:
        if self._seconds:
            self._rps.add(self._requests / self._seconds)
        self._requests = self._seconds = 0.0
        if self._counted.demand(0.0) is not None:
            self._lengths, self._counted = self._counted, _Lengths()
        next_rps = self._rps.next()
        demand = None if next_rps is None else self._demand(next_rps)
        if demand is not None:
            setting = self._setting
            self._floor = reference_sizing(setting.prefill, setting.decode, demand, setting.slo, setting.limits)
            self._target = self._floor

    def _follow_load(self, seen: Observation) -> None:
        """Add a worker if all are too slow, remove one if the rest would not be; wait while a change is under way."""
        assert self._target is not None
        floor = self._floor or self._target
        demand = self._demand(0.0)
        if demand is None:
            return
        prefill, decode = self._target.prefill, self._target.decode
        if _is_settled(seen.prefill.ready, seen.prefill.starting + seen.prefill.draining, prefill):
            prefill += self._prefill_move(seen.prefill_loads, demand)
        if _is_settled(seen.decode.ready, seen.decode.starting + seen.decode.draining, decode):
            decode += self._decode_move(seen.decode_loads, demand)
        wanted = Counts(max(floor.prefill, prefill), max(floor.decode, decode))
        self._target = published_budget(wanted, self._setting.limits)

    def _prefill_move(self, loads: Sequence[WorkerLoad], demand: Demand) -> int:
        profile, slo_s = self._setting.prefill, self._setting.slo.ttft_s
        queued = [load.queued_tokens for load in loads]
        if queued and all(prefill_time_s(profile, tokens + demand.uncached_tokens) > slo_s for tokens in queued):
            return 1
        if len(queued) < 2:
            return 0
        more = len(queued) / (len(queued) - 1)
        calm = SENSITIVITY * slo_s
        return -int(all(prefill_time_s(profile, tokens * more + demand.uncached_tokens) < calm for tokens in queued))

    def _decode_move(self, loads: Sequence[WorkerLoad], demand: Demand) -> int:
        profile, slo_s, context = self._setting.decode, self._setting.slo.itl_s, demand.context_tokens
        held = [load.kv_tokens for load in loads]
        if held and all(profile.decode_s(tokens, context) > slo_s for tokens in held):
            return 1
        if len(held) < 2:
            return 0
        after = [tokens * len(held) / (len(held) - 1) for tokens in held]
        calm = SENSITIVITY * slo_s
        fits = all(tokens < profile.total_kv_tokens and profile.decode_s(tokens, context) < calm for tokens in after)
        return -int(fits)


def _is_settled(ready: int, moving: int, expected: int) -> bool:
    return not moving and ready == expected


def counts_decision(seen: Observation, counts: Counts) -> ScalingDecision:
    """Return the decision that orders these counts, for a policy that gives no reasons."""
    ordered = Counts(seen.prefill.ordered, seen.decode.ordered)
    return ScalingDecision(
        at_s=seen.at_s,
        loop="none",
        action=Action.HOLD if counts == ordered else Action.SCALE,
        prefill=counts.prefill,
        decode=counts.decode,
    )


def peak_of(slots: Sequence[DemandSlot], together: int = 5) -> Demand:
    """Return the highest demand of `together` slots in a row, with their mean lengths."""
    best = slots[0].demand
    for first in range(max(1, len(slots) - together + 1)):
        demand = mean_of(slots[first : first + together])
        if demand.rps * demand.isl_tokens > best.rps * best.isl_tokens or first == 0:
            best = demand
    return best


def mean_of(slots: Sequence[DemandSlot]) -> Demand:
    rps = sum(slot.demand.rps for slot in slots)
    if rps <= 0:
        return slots[0].demand
    isl = math.fsum(slot.demand.rps * slot.demand.isl_tokens for slot in slots) / rps
    osl = math.fsum(slot.demand.rps * slot.demand.osl_tokens for slot in slots) / rps
    return Demand(rps / len(slots), isl, osl, slots[0].demand.hit_share)
