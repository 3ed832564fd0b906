"""How much slower, or faster, workers are than their profile says: observed against expected, bounded. Pure."""

import math
from dataclasses import dataclass

from planner.sizing import Demand, mean_wait_s, prefill_time_s
from protocol.profile import Profile

LOWEST, HIGHEST = 0.7, 2.0
WEIGHT = 0.2  # of a new ratio
MIN_REQUESTS = 20  # of an interval: fewer say nothing
FULL = 0.95  # share of the KV, or of the sequences, beyond which requests wait for a place
BUSIEST = 0.75  # utilization beyond which waiting, not the worker, makes the TTFT


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors of the profile's times; `note` says why the last interval changed nothing."""

    ttft: float = 1.0
    itl: float = 1.0
    note: str = ""


def corrected(
    before: Corrections,
    profiles: tuple[Profile, Profile],
    demand: Demand,
    requests: float,
    workers: tuple[int, int],
    observed: tuple[float | None, float | None],
) -> Corrections:
    """`profiles`, `workers`: of prefill and decode; `observed`: mean TTFT and ITL, None if they are not known."""
    if requests < MIN_REQUESTS:
        return Corrections(before.ttft, before.itl, f"{requests:.0f} requests are too few to correct by")
    ttft_s, itl_s = observed
    service_s = prefill_time_s(profiles[0], demand.uncached_tokens)
    ttft, notes = before.ttft, []
    used = demand.rps * service_s * before.ttft / max(1, workers[0])
    if used > BUSIEST:
        notes.append(f"prefill is used to {used:.0%}: its TTFT is mostly waiting")
    elif ttft_s is not None and math.isfinite(ttft_s) and ttft_s > 0 and service_s > 0:
        expected_s = service_s + mean_wait_s(max(1, workers[0]), demand.rps, service_s)
        ttft = _toward(before.ttft, ttft_s / expected_s)
    itl = before.itl
    if itl_s is not None and math.isfinite(itl_s) and itl_s > 0:
        held_tokens = _held_tokens(demand, workers[1], itl_s)
        if held_tokens >= FULL * _most_tokens(profiles[1], demand):
            notes.append("decode is full: its ITL is mostly waiting")
        elif (expected_s := profiles[1].decode_s(held_tokens, demand.context_tokens)) > 0:
            itl = _toward(before.itl, itl_s / expected_s)
    return Corrections(ttft, itl, "; ".join(notes))


def _held_tokens(demand: Demand, workers: int, itl_s: float) -> float:
    """On each worker, by Little's law from the ITL that was seen.

    With the batch that the profile's own ITL would make, a step a little slower would count twice: it makes the batch
    larger, and that the step slower again.
    """
    return demand.rps * demand.osl_tokens * itl_s / max(1, workers) * demand.context_tokens


def _most_tokens(profile: Profile, demand: Demand) -> float:
    return min(profile.total_kv_tokens, profile.max_num_seqs * demand.context_tokens)


def _toward(before: float, ratio: float) -> float:
    ratio = min(max(ratio, LOWEST), HIGHEST)
    return min(max(before + WEIGHT * (ratio - before), LOWEST), HIGHEST)
