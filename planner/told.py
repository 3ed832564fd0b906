"""Remember the last steps of a planner, for those who look: the live page and `kvmesh top` ask for them."""

import math

import msgspec

from kvmesh.planner.connectors.connector import Applied
from kvmesh.planner.model import Observation, RoleFleet, ScalingDecision
from kvmesh.protocol.messages import MAX_PLANNER_STEPS, PlannerStep, PlannerSteps, RoleCount

MAX_REASONS = 16
MAX_REASON_CHARS = 400


class ToldSteps:
    """The last steps. One thread adds, others read."""

    def __init__(self) -> None:
        self.pages = {"/steps": self.page}
        self._steps: tuple[PlannerStep, ...] = ()  # replaced as a whole, so that a reader sees all or nothing

    def add(self, step: PlannerStep) -> None:
        self._steps = (*self._steps[-MAX_PLANNER_STEPS + 1 :], step)

    def page(self) -> bytes:
        """Return the answer to GET /steps."""
        return msgspec.json.encode(PlannerSteps(steps=self._steps))


def step_of(
    ts_s: float,
    mode: str,
    seen: Observation | None,
    decision: ScalingDecision,
    applied: Applied | None,
    error: str,
) -> PlannerStep:
    """Return a step as others are told of it. Pure."""
    traffic = None if seen is None else seen.traffic
    requests_per_s = None
    if traffic is not None and traffic.requests is not None and traffic.end_s > traffic.start_s:
        requests_per_s = traffic.requests / (traffic.end_s - traffic.start_s)
    texts = [f"{reason.code}: {reason.text}" for reason in decision.reasons]
    texts += [] if applied is None else list(applied.notes)
    return PlannerStep(
        ts_s=ts_s,
        mode=mode,
        loop=decision.loop,
        prefill=count_of(None if seen is None else seen.prefill, decision.prefill),
        decode=count_of(None if seen is None else seen.decode, decision.decode),
        requests_per_s=finite(requests_per_s),
        forecast_per_s=finite(decision.forecast_rps),
        ttft_s=finite(None if traffic is None else traffic.ttft_s),
        itl_s=finite(None if traffic is None else traffic.itl_s),
        reasons=tuple(text[:MAX_REASON_CHARS] for text in texts[:MAX_REASONS]),
        applied=applied is not None,
        error=error[:MAX_REASON_CHARS],
    )


def count_of(fleet: RoleFleet | None, ordered: int) -> RoleCount:
    if fleet is None:
        return RoleCount(ordered=ordered)
    return RoleCount(ready=fleet.ready, starting=fleet.starting, draining=fleet.draining, ordered=ordered)


def finite(value: float | None) -> float | None:
    """Return the value; None if JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None
