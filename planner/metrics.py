"""All metrics of the planner. Label values come from closed sets. A figure that is not known is NaN, never 0."""

import math

from prometheus_client import Counter, Gauge

from planner.model import Observation, RoleFleet, ScalingDecision, Traffic

_P = "kvmesh_planner_"
NAN = math.nan

REPLICAS = Gauge(_P + "replicas", "Workers that exist.", ["role", "state"])  # ready, starting, draining
TARGET = Gauge(_P + "target_replicas", "Workers in the last decision.", ["role"])
NEEDED = Gauge(_P + "needed_replicas", "Workers that the forecast asks for, before limits.", ["role"])
RPS = Gauge(_P + "observed_requests_per_second", "Requests that arrived, in the last interval.")
ISL = Gauge(_P + "observed_isl_tokens", "Mean tokens of a prompt, in the last interval.")
OSL = Gauge(_P + "observed_osl_tokens", "Mean tokens of an answer, in the last interval.")
HITS = Gauge(_P + "observed_hit_share", "Share of prompt tokens found in a cache, in the last interval.")
TTFT = Gauge(_P + "observed_ttft_seconds", "Mean TTFT of the last interval.")
ITL = Gauge(_P + "observed_itl_seconds", "Mean ITL of the last interval.")
PREDICTED_RPS = Gauge(_P + "predicted_requests_per_second", "Forecast requests per second.")
CORRECTION = Gauge(_P + "correction", "Observed over expected times.", ["of"])  # ttft, itl
GPU_HOURS = Counter(_P + "gpu_hours_total", "GPU-hours of all workers since the planner started to act.")
DECISIONS = Counter(_P + "decisions_total", "Decisions, once for each of their reasons.", ["loop", "action", "code"])
APPLIED = Counter(_P + "applied_total", "Decisions handed to the connector.", ["outcome"])  # ok, partial, error
FLIPS = Counter(_P + "flips_total", "Workers that were asked to change their role.", ["to_role"])
LATE = Counter(_P + "unknown_traffic_total", "Steps without traffic figures.")
ACTING = Gauge(_P + "is_acting", "1: this planner holds the lease.")


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
    for code in {reason.code for reason in decision.reasons}:
        DECISIONS.labels(decision.loop, decision.action.value, code).inc()
