"""The fast loop: react to queues, caches and recent arrivals that the forecast did not expect. Pure.

The loop adds workers on evidence that the SLO breaks, and takes one away when the rest can clearly carry the load.
Starting workers count as present: a queue that waits for a worker on its way is no reason to order another.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.planner.aggregated import aggregated_capacity, pool_of, prompt_times_s
from kvmesh.planner.costs import Horizon
from kvmesh.planner.history import RecentTraffic
from kvmesh.planner.model import Reason, RoleFleet, WorkerLoad
from kvmesh.planner.sizing import Demand, Need, Slo, decode_capacity, decode_need, prefill_need, prefill_time_s
from kvmesh.protocol.profile import Profile

CATCH_UP_S = 20.0  # a queue should be gone after this time
SENSITIVITY = 0.8  # share of the SLO that the rest may reach when one worker is taken away
KV_FULL = 0.9
KV_CALM = 0.7  # share of the rest's KV that may be in use after one is taken away
MIN_RECENT_S = 10.0  # arrivals of less time are no evidence


@dataclass(frozen=True, slots=True)
class Rules:
    profile: Profile
    slo: Slo
    utilization: float
    correction: float
    horizon: Horizon | None = None  # None: a queue is worked off in CATCH_UP_S, also by workers that come too late


@dataclass(frozen=True, slots=True)
class Pressure:
    """The evidence of one role. It asks for `workers`, 0: none; `least` of them could carry the present load.

    Recent arrivals alone, without what queues ask for, take `steady` workers; 0: no more than are ordered.
    """

    workers: int
    least: int
    reasons: tuple[Reason, ...] = ()
    steady: int = 0


NO_PRESSURE = Pressure(0, 0)


def prefill_pressure(
    rules: Rules, fleet: RoleFleet, loads: Sequence[WorkerLoad], recent: RecentTraffic | None
) -> Pressure:
    def need(demand: Demand) -> Need:
        return prefill_need(rules.profile, demand, rules.slo, rules.utilization, rules.correction)

    reasons: list[Reason] = []
    workers = steady = 0
    ready = max(1, fleet.ready)
    if recent is not None:
        workers = steady = _by_arrivals("prefill", rules, need, fleet, recent, reasons)
        token_s = _token_s(rules, recent.demand)
        service_s = _service_s(rules, recent.demand)
        work = recent.demand.rps * service_s
    else:
        token_s = prefill_time_s(rules.profile, rules.profile.max_step_tokens) / rules.profile.max_step_tokens
        service_s, work = 0.0, 0.0
    backlog_s = sum(load.queued_tokens for load in loads) * token_s
    ttft_s = backlog_s / ready + service_s
    if loads and ttft_s > rules.slo.ttft_s:
        wanted = _against_queue(rules, fleet, work, backlog_s)
        if wanted:
            text = (
                f"prefill queues make a TTFT of {ttft_s:.2f} s, the SLO is {rules.slo.ttft_s:.2f} s: {wanted} work off "
                f"{backlog_s:.1f} s of them"
            )
            reasons.append(Reason(code="prefill-queue", text=text))
            workers = max(workers, wanted)
    least = fleet.ordered
    if loads and recent is not None and not fleet.starting:
        rest = need(recent.at_most())
        patience_s = SENSITIVITY * rules.slo.ttft_s - service_s
        by_queue = math.ceil(backlog_s / patience_s) if patience_s > 0 else fleet.ordered
        least = min(fleet.ordered, max(rest.workers, by_queue))
    return Pressure(workers, least, tuple(reasons), steady)


def decode_pressure(
    rules: Rules, fleet: RoleFleet, loads: Sequence[WorkerLoad], recent: RecentTraffic | None
) -> Pressure:
    def need(demand: Demand) -> Need:
        return decode_need(rules.profile, demand, rules.slo, rules.utilization, rules.correction)

    reasons: list[Reason] = []
    workers = steady = 0
    if recent is not None:
        workers = steady = _by_arrivals("decode", rules, need, fleet, recent, reasons)
    under_way = sum(load.running + load.waiting for load in loads)
    used = sum(load.kv_tokens for load in loads)
    total = sum(load.total_kv_tokens for load in loads)
    usage = used / total if total else 0.0
    batch = _batch(rules, recent)
    crowded = under_way > batch * fleet.ready or (usage > KV_FULL and any(load.waiting for load in loads))
    if loads and crowded and (wanted := _against_crowd(rules, fleet, recent, loads, batch, usage)):
        text = (
            f"{under_way} requests under way on {fleet.ready} decode workers, each keeps the ITL up to {batch}; KV is "
            f"used to {usage:.0%}: {wanted} workers"
        )
        reasons.append(Reason(code="decode-crowded", text=text))
        workers = max(workers, wanted)
    least = fleet.ordered
    if loads and recent is not None and not fleet.starting:
        rest = need(recent.at_most())
        by_batch = math.ceil(under_way / (SENSITIVITY * batch))
        by_kv = math.ceil(usage * fleet.ready / KV_CALM)
        least = min(fleet.ordered, max(rest.workers, by_batch, by_kv))
    return Pressure(workers, least, tuple(reasons), steady)


def aggregated_pressure(
    rules: Rules, fleet: RoleFleet, loads: Sequence[WorkerLoad], recent: RecentTraffic | None
) -> Pressure:
    """Return the pressure on workers that do both halves. Without traffic figures there is none."""
    if recent is None:
        return Pressure(0, fleet.ordered)
    demand, ready = recent.demand, max(1, fleet.ready)
    one = aggregated_capacity(rules.profile, demand, rules.slo.itl_s, rules.utilization, rules.correction)

    def need(demand: Demand) -> Need:
        return pool_of(one, rules.profile, demand, rules.slo, rules.utilization)

    reasons: list[Reason] = []
    workers = steady = _by_arrivals("aggregated", rules, need, fleet, recent, reasons)
    if not loads or (fleet.starting and rules.horizon is None):
        return Pressure(workers, fleet.ordered, tuple(reasons), steady)
    service_s, soonest_s = prompt_times_s(rules.profile, demand, one)
    backlog_s = sum(load.queued_tokens for load in loads) * service_s / demand.uncached_tokens
    under_way = sum(load.running + load.waiting for load in loads)
    ttft_s = backlog_s / ready + soonest_s
    work = rules.utilization * demand.rps / one.rps
    if ttft_s > rules.slo.ttft_s and (wanted := _against_queue(rules, fleet, work, backlog_s)):
        text = (
            f"queues make a TTFT of {ttft_s:.2f} s, the SLO is {rules.slo.ttft_s:.2f} s: {wanted} work off "
            f"{backlog_s:.1f} s of them"
        )
        reasons.append(Reason(code="aggregated-queue", text=text))
        workers = max(workers, wanted)
    if under_way > one.batch * ready and (wanted := _against_crowd(rules, fleet, recent, loads, one.batch)):
        text = (
            f"{under_way} requests under way on {fleet.ready} workers, each keeps the ITL up to {one.batch}: {wanted}"
        )
        reasons.append(Reason(code="aggregated-crowded", text=text))
        workers = max(workers, wanted)
    rest = need(recent.at_most())
    patience_s = SENSITIVITY * rules.slo.ttft_s - soonest_s
    by_queue = math.ceil(backlog_s / patience_s) if patience_s > 0 else fleet.ordered
    by_batch = math.ceil(under_way / (SENSITIVITY * one.batch))
    return Pressure(workers, min(fleet.ordered, max(rest.workers, by_queue, by_batch)), tuple(reasons), steady)


def _by_arrivals(
    role: str,
    rules: Rules,
    need: Callable[[Demand], Need],
    fleet: RoleFleet,
    recent: RecentTraffic,
    reasons: list[Reason],
) -> int:
    """Return the workers for the recent arrivals, if the ordered ones are too few even for a cautious reading."""
    if recent.seconds < MIN_RECENT_S:
        return 0
    least = need(recent.at_least()).workers
    if least <= fleet.ordered:
        return 0
    level = recent.demand if rules.horizon is None else recent.level()
    wanted = need(level).workers
    text = (
        f"{level.rps:.2f} requests/s in the last {recent.seconds:.0f} s take {wanted} {role} workers, "
        f"{fleet.ordered} are ordered"
    )
    reasons.append(Reason(code=f"{role}-arrivals", text=text))
    return wanted


def _against_queue(rules: Rules, fleet: RoleFleet, work: float, backlog_s: float) -> int:
    """Return the workers that work off a queue; 0: the workers that are ordered do, or new ones would come too late."""
    if rules.horizon is not None:
        return rules.horizon.catch_up(work, backlog_s, fleet.ready, fleet.starting)
    if fleet.starting:
        return 0
    return max(math.ceil(work / rules.utilization + backlog_s / CATCH_UP_S), fleet.ready + 1)


def _against_crowd(
    rules: Rules,
    fleet: RoleFleet,
    recent: RecentTraffic | None,
    loads: Sequence[WorkerLoad],
    batch: int,
    usage: float = 0.0,
) -> int:
    """Return the workers for requests that are too many, or wait for KV; 0: as for a queue of prompts."""
    under_way = sum(load.running + load.waiting for load in loads)
    if rules.horizon is not None and recent is not None:
        capacity = decode_capacity(rules.profile, recent.demand, rules.slo.itl_s, rules.correction)
        too_many = max(under_way - batch * fleet.ready, sum(load.waiting for load in loads))
        half_done_s = too_many / capacity.rps / 2
        return rules.horizon.catch_up(recent.demand.rps / capacity.rps, half_done_s, fleet.ready, fleet.starting)
    if fleet.starting:
        return 0
    return max(math.ceil(under_way / (batch * rules.utilization)), math.ceil(usage * fleet.ready), fleet.ready + 1)


def _service_s(rules: Rules, demand: Demand) -> float:
    return prefill_time_s(rules.profile, demand.uncached_tokens) * rules.correction


def _token_s(rules: Rules, demand: Demand) -> float:
    return _service_s(rules, demand) / demand.uncached_tokens


def _batch(rules: Rules, recent: RecentTraffic | None) -> int:
    if recent is None:
        return rules.profile.max_num_seqs
    return decode_capacity(rules.profile, recent.demand, rules.slo.itl_s, rules.correction).batch
