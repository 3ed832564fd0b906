"""Published rules of autoscalers that look at queues and running requests, as policies of `kvmesh lab bench planner`.

- hpa: the formula of Kubernetes' HorizontalPodAutoscaler on the requests in a worker: ceil(workers * value / target),
  nothing within 10 % of the target, every 15 s, at most twice as many workers or 4 more, and down only to the highest
  count that was wanted within 300 s.
- keda: its Prometheus scaler as vLLM's production stack sets it: one worker for 5 waiting requests, or for as many
  running ones as the target says; its polling of 30 s feeds the same autoscaler.
- llm-d: the workload variant autoscaler's saturation rule (deploy/configmap-saturation-scaling.yaml of v0.7): a worker
  is saturated at 80 % of its KV or 5 waiting requests. One worker is added if the others have less than 10 % of KV or 3
  places left on average, one is taken away if the rest would have more; nothing while workers start.

The target of running requests is our sizing's: `target_utilization` of the batch that keeps the ITL, and one prompt.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from kvmesh.lab.bench.planner_policies import Decide, Setting, counts_decision
from kvmesh.planner.budget import Counts, within_budget
from kvmesh.planner.model import Observation, RoleFleet, ScalingDecision, WorkerLoad
from kvmesh.planner.sizing import Demand, decode_capacity

SYNC_S = 15.0  # of the HPA
POLL_S = 30.0  # of KEDA
TOLERANCE = 0.1
STABLE_S = 300.0
MOST_ADDED = 4
QUEUE_EACH = 5  # waiting requests for which there is a worker
KV_FULL, QUEUE_FULL = 0.8, 5
KV_SPARE, QUEUE_SPARE = 0.1, 3
CYCLE_S = 60.0  # of the variant autoscaler

Wanted = Callable[[RoleFleet, Sequence[WorkerLoad], float], float]


class StabilizedRule:
    """Ask a rule for each role, and move as the HorizontalPodAutoscaler's defaults let it."""

    def __init__(self, setting: Setting, demand: Demand, wanted: Wanted, every_s: float) -> None:
        """`wanted(fleet, loads, target)` returns the workers that the rule asks for; `demand` has the mean lengths."""
        self._setting = setting
        self._wanted = wanted
        self._every_s = every_s
        batch = decode_capacity(setting.decode, demand, setting.slo.itl_s).batch
        share = setting.config.target_utilization
        self._targets = (share, share * batch)
        self._next_s = 0.0
        self._target: Counts | None = None
        self._recent: tuple[deque[tuple[float, int]], ...] = (deque(), deque())

    def decide(self, seen: Observation) -> ScalingDecision:
        if self._target is None:
            self._target = Counts(seen.prefill.ordered, seen.decode.ordered)
        if seen.at_s >= self._next_s - 1e-6:
            self._next_s = seen.at_s + self._every_s
            prefill = self._moved(0, seen.at_s, seen.prefill, seen.prefill_loads)
            decode = self._moved(1, seen.at_s, seen.decode, seen.decode_loads)
            self._target = within_budget(Counts(prefill, decode), self._setting.limits)
        return counts_decision(seen, self._target)

    def _moved(self, role: int, at_s: float, fleet: RoleFleet, loads: Sequence[WorkerLoad]) -> int:
        current = max(1, fleet.ordered)
        wanted = math.ceil(self._wanted(fleet, loads, self._targets[role]) - 1e-9) if loads else current
        wanted = min(wanted, max(2 * current, current + MOST_ADDED))
        recent = self._recent[role]
        recent.append((at_s, wanted))
        while recent[0][0] < at_s - STABLE_S:
            recent.popleft()
        return max(1, wanted if wanted > current else min(current, max(count for _, count in recent)))


def by_concurrency(fleet: RoleFleet, loads: Sequence[WorkerLoad], target: float) -> float:
    """Return the HorizontalPodAutoscaler's count for the requests in a worker."""
    ratio = sum(load.running + load.waiting for load in loads) / len(loads) / target
    return fleet.ordered if abs(ratio - 1) <= TOLERANCE else fleet.ready * ratio


def by_queue(_: RoleFleet, loads: Sequence[WorkerLoad], target: float) -> float:
    """Return KEDA's count: the larger of what waiting and what running requests ask for."""
    waiting = sum(load.waiting for load in loads) / QUEUE_EACH
    return max(waiting, sum(load.running for load in loads) / target)


class SaturationRule:
    """Move by one worker, as the workload variant autoscaler of llm-d does."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._next_s = 0.0
        self._target: Counts | None = None

    def decide(self, seen: Observation) -> ScalingDecision:
        if self._target is None:
            self._target = Counts(seen.prefill.ordered, seen.decode.ordered)
        if seen.at_s >= self._next_s - 1e-6:
            self._next_s = seen.at_s + CYCLE_S
            prefill = self._target.prefill + saturation_move(seen.prefill, seen.prefill_loads)
            decode = self._target.decode + saturation_move(seen.decode, seen.decode_loads)
            self._target = within_budget(Counts(prefill, decode), self._setting.limits)
        return counts_decision(seen, self._target)


def saturation_move(fleet: RoleFleet, loads: Sequence[WorkerLoad]) -> int:
    """Return by how many workers a role changes: -1, 0 or 1."""
    if not loads or fleet.starting:
        return 0
    usage = [load.kv_tokens / max(1, load.total_kv_tokens) for load in loads]
    queue = [float(load.waiting) for load in loads]
    free = [n for n in range(len(loads)) if usage[n] < KV_FULL and queue[n] < QUEUE_FULL]
    if not free:
        return 1
    kv = sum(usage[n] for n in free) / len(free)
    waiting = sum(queue[n] for n in free) / len(free)
    if KV_FULL - kv < KV_SPARE or QUEUE_FULL - waiting < QUEUE_SPARE:
        return 1
    if len(free) < 2:
        return 0
    more = len(free) / (len(free) - 1)
    return -1 if KV_FULL - kv * more >= KV_SPARE and QUEUE_FULL - waiting * more >= QUEUE_SPARE else 0


def hpa(setting: Setting, demand: Demand) -> Decide:
    return StabilizedRule(setting, demand, by_concurrency, SYNC_S).decide


def keda(setting: Setting, demand: Demand) -> Decide:
    return StabilizedRule(setting, demand, by_queue, POLL_S).decide


def variant_autoscaler(setting: Setting) -> Decide:
    return SaturationRule(setting).decide
