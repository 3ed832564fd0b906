"""Estimate how much slower or faster workers are than their profile: observed over expected, bounded. Pure."""

import math
from dataclasses import dataclass

from kvmesh.planner.sizing import Demand, mean_wait_s, prefill_time_s
from kvmesh.protocol.profile import Profile

LOWEST, HIGHEST = 0.7, 2.0
WEIGHT = 0.2  # of a new ratio
MIN_REQUESTS = 20  # in an interval: fewer are no evidence
FULL = 0.95  # share of the KV, or of the sequences, beyond which requests wait for a place
BUSIEST = 0.75  # utilization beyond which the TTFT is mostly waiting
MOST_PROMPTS = 0.9  # the largest share of an aggregated worker's time that is ascribed to prompts


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
    """Return new factors. `profiles` and `workers` are those of prefill and decode.

    `observed` is the mean TTFT and the mean ITL, None where they are not known.
    """
    if requests < MIN_REQUESTS:
        return _too_few(before, requests)
    ttft_s, itl_s = observed
    service_s = prefill_time_s(profiles[0], demand.uncached_tokens)
    ttft, notes = before.ttft, []
    used = demand.rps * service_s * before.ttft / max(1, workers[0])
    if used > BUSIEST:
        notes.append(f"prefill is used to {used:.0%}: its TTFT is mostly waiting")
    elif ttft_s is not None and math.isfinite(ttft_s) and ttft_s > 0 and service_s > 0:
        expected_s = service_s + mean_wait_s(max(1, workers[0]), demand.rps, service_s)
        ttft = _toward(before.ttft, ttft_s / expected_s)
    itl, note = _itl_corrected(before.itl, profiles[1], demand, workers[1], itl_s, 0.0)
    return Corrections(ttft, itl, "; ".join([*notes, *note]))


def corrected_aggregated(
    before: Corrections, profile: Profile, demand: Demand, requests: float, workers: int, itl_s: float | None
) -> Corrections:
    """Return new factors for workers that do both halves: only the ITL is corrected.

    The TTFT of such workers is mostly waiting. Their ITL also shows slow prompts.
    """
    if requests < MIN_REQUESTS:
        return _too_few(before, requests)
    prompt_s = prefill_time_s(profile, demand.uncached_tokens) / profile.dp_size
    prompt_share = min(MOST_PROMPTS, demand.rps * prompt_s / max(1, workers))
    itl, note = _itl_corrected(before.itl, profile, demand, workers, itl_s, prompt_share)
    return Corrections(before.ttft, itl, "; ".join(note))


def _too_few(before: Corrections, requests: float) -> Corrections:
    return Corrections(before.ttft, before.itl, f"{requests:.0f} requests are too few to correct by")


def _itl_corrected(
    before: float, profile: Profile, demand: Demand, workers: int, itl_s: float | None, prompt_share: float
) -> tuple[float, list[str]]:
    """Return the factor of the ITL, and why it stays as it is, if it does.

    `prompt_share` is the share of the time in which prompts are computed and no token comes.
    """
    if itl_s is None or not math.isfinite(itl_s) or itl_s <= 0:
        return before, []
    held_tokens = _held_tokens(demand, workers, itl_s)
    if held_tokens >= FULL * _most_tokens(profile, demand):
        return before, ["decode is full: its ITL is mostly waiting"]
    expected_s = profile.decode_s(held_tokens, demand.context_tokens) / (1 - prompt_share)
    return (_toward(before, itl_s / expected_s) if expected_s > 0 else before), []


def _held_tokens(demand: Demand, workers: int, itl_s: float) -> float:
    """Return the tokens held on each worker, by Little's law from the observed ITL.

    The profile's own ITL would count a slow step twice: it makes the batch larger, and that makes the step slower.
    """
    return demand.rps * demand.osl_tokens * itl_s / max(1, workers) * demand.context_tokens


def _most_tokens(profile: Profile, demand: Demand) -> float:
    return min(profile.total_kv_tokens, profile.max_num_seqs * demand.context_tokens)


def _toward(before: float, ratio: float) -> float:
    ratio = min(max(ratio, LOWEST), HIGHEST)
    return min(max(before + WEIGHT * (ratio - before), LOWEST), HIGHEST)
