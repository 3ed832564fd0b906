"""All metrics of the planner. Label values come from closed sets. A figure that is not known is NaN, never 0."""

import math
from collections.abc import Sequence

from kvmesh.mesh.measure import locked_counter, locked_gauge
from kvmesh.planner.model import Action, Observation, RoleFleet, ScalingDecision, Traffic
from kvmesh.planner.slo import SloState

_P = "kvmesh_planner_"
NAN = math.nan

REPLICAS = locked_gauge(_P + "replicas")  # ready, starting, draining
TARGET = locked_gauge(_P + "target_replicas")
NEEDED = locked_gauge(_P + "needed_replicas")
RPS = locked_gauge(_P + "observed_requests_per_second")
ISL = locked_gauge(_P + "observed_isl_tokens")
OSL = locked_gauge(_P + "observed_osl_tokens")
HITS = locked_gauge(_P + "observed_hit_share")
TTFT = locked_gauge(_P + "observed_ttft_seconds")
ITL = locked_gauge(_P + "observed_itl_seconds")
PREDICTED_RPS = locked_gauge(_P + "predicted_requests_per_second")
CORRECTION = locked_gauge(_P + "correction")  # ttft, itl
GPU_HOURS = locked_counter(_P + "gpu_hours_total")
DECISIONS = locked_counter(_P + "decisions_total")
APPLIED = locked_counter(_P + "applied_total")  # ok, partial, error
FLIPS = locked_counter(_P + "flips_total")
LATE = locked_counter(_P + "unknown_traffic_total")
ACTING = locked_gauge(_P + "is_acting")
SLO_SHARE = locked_gauge(_P + "slo_share")  # ttft, itl
SLO_KEPT = locked_gauge(_P + "slo_is_kept")
ON_HOLD = locked_gauge(_P + "on_hold")


def show_observation(observation: Observation) -> None:
    for role, fleet in (("prefill", observation.prefill), ("decode", observation.decode)):
        show_fleet(role, fleet)
    if observation.traffic is not None:
        show_traffic(observation.traffic)


def show_fleet(role: str, fleet: RoleFleet) -> None:
    for state, count in (("ready", fleet.ready), ("starting", fleet.starting), ("draining", fleet.draining)):
        REPLICAS.labels(role, state).set(count)


def show_traffic(traffic: Traffic) -> None:
    length_s = traffic.end_s - traffic.start_s
    known = traffic.requests is not None and length_s > 0
    RPS.set(traffic.requests / length_s if known and traffic.requests is not None else NAN)
    for gauge, value in (
        (ISL, traffic.isl_tokens),
        (OSL, traffic.osl_tokens),
        (HITS, traffic.hit_share),
        (TTFT, traffic.ttft_s),
        (ITL, traffic.itl_s),
    ):
        gauge.set(NAN if value is None else value)


def show_decision(decision: ScalingDecision) -> None:
    for role, target, needed in (
        ("prefill", decision.prefill, decision.needed_prefill),
        ("decode", decision.decode, decision.needed_decode),
    ):
        TARGET.labels(role).set(target)
        if needed is not None:
            NEEDED.labels(role).set(needed)
    if decision.forecast_rps is not None:
        PREDICTED_RPS.set(decision.forecast_rps)
    CORRECTION.labels("ttft").set(decision.ttft_correction)
    CORRECTION.labels("itl").set(decision.itl_correction)
    show_hold(decision)
    for code in {reason.code for reason in decision.reasons}:
        DECISIONS.labels(decision.loop, decision.action.value, code).inc()


def show_hold(decision: ScalingDecision) -> None:
    """Show for which reasons the last step planned nothing; most steps plan nothing because it is not time yet."""
    ON_HOLD.clear()
    if decision.action is Action.HOLD and decision.loop == "none":
        for code in {reason.code for reason in decision.reasons}:
            ON_HOLD.labels(code).set(1)


def show_slo(states: Sequence[SloState]) -> None:
    """Show the share of the window's requests that kept each SLO. NaN: too few requests."""
    for state in states:
        SLO_SHARE.labels(state.of).set(NAN if state.share is None else state.share)
        SLO_KEPT.labels(state.of).set(NAN if state.is_kept is None else float(state.is_kept))
