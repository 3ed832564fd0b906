"""Compute how many workers keep an SLO where each worker does both halves of a request. Pure.

Prompts and answers share a worker's time. A step takes the time of its prompt tokens, and the time of one token for
every running request. The SLO of the ITL bounds how much of the time may go to prompts.
"""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from kvmesh.planner.sizing import (
    MAX_WORKERS,
    MISSED_SHARE,
    SPREAD,
    Demand,
    Need,
    Slo,
    decode_capacity,
    late_share,
    prefill_time_s,
)
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile

HALVINGS = 24  # of the search for a share of the time
LEAST_SHARE = 1e-6  # of a worker's time that goes to prompts
CHANCE = 1.0  # standard deviations of the number of prompts that come during one answer


@dataclass(frozen=True, slots=True)
class Capacity:
    """The load of one worker that is used as much as it may be. If it cannot keep the ITL, `fits` is false, batch 1."""

    rps: float
    prompt_share: float  # of its time, that goes to prompts
    batch: int
    step_s: float  # of a whole batch, without prompts
    fits: bool

    @property
    def itl_s(self) -> float:
        return self.step_s / (1 - self.prompt_share)


def both_halves(prefill: Profile, decode: Profile) -> Profile:
    """Return one profile of a worker whose two tables come from two files.

    Raise ConfigError if the files describe two kinds of workers.
    """
    if (prefill.gpus, prefill.dp_size) != (decode.gpus, decode.dp_size):
        raise ConfigError(
            f"the profiles are of two kinds of workers: {prefill.mapping} on {prefill.gpus} GPUs, {decode.mapping} on "
            f"{decode.gpus}",
            hint="an aggregated fleet has one: give one file that has both tables with --prefill-profile",
        )
    return replace(decode, prefill=prefill.prefill)


def aggregated_capacity(
    profile: Profile, demand: Demand, itl_slo_s: float, utilization: float, correction: float = 1.0
) -> Capacity:
    """Return the most requests/s of this kind that one worker takes. `correction`: measured over profiled step time.

    If a share w of the worker's time goes to prompts, a token takes step / (1 - w) on average. During one answer, more
    prompts than average may come: w' = w + sqrt(w * time of a prompt / time of an answer). The bounds are

        requests/s <= w / time of a prompt,  w <= utilization
        requests/s <= utilization * b * (1 - w) / (osl * step(b)),  step(b) / (1 - w') <= ITL

    The first bound grows with w, the second falls. The result is where they meet.
    """
    prompt_s = prefill_time_s(profile, demand.uncached_tokens) / profile.dp_size
    answer_s = max(1.0, demand.osl_tokens) * itl_slo_s

    def with_prompts(share: float) -> Capacity:
        at_worst = share + CHANCE * math.sqrt(share * prompt_s / answer_s)
        decode = decode_capacity(profile, demand, itl_slo_s * (1 - at_worst), correction)
        by_decode = utilization * decode.batch * (1 - share) / (max(1.0, demand.osl_tokens) * decode.itl_s)
        by_prompts = share / prompt_s if prompt_s > 0 else math.inf
        return Capacity(min(by_decode, by_prompts), share, decode.batch, decode.itl_s, decode.fits)

    low, high = LEAST_SHARE, utilization * (1 - 1e-9)
    fits = with_prompts(low).fits
    for _ in range(HALVINGS if prompt_s > 0 else 0):
        middle = (low + high) / 2
        found = with_prompts(middle)
        is_bound_by_prompts = found.fits is fits and found.rps >= middle / prompt_s
        low, high = (middle, high) if is_bound_by_prompts else (low, middle)
    return with_prompts(low)


def aggregated_need(profile: Profile, demand: Demand, slo: Slo, utilization: float, correction: float = 1.0) -> Need:
    """Return the workers that carry the load, have room for its running requests, and start prompts in time."""
    one = aggregated_capacity(profile, demand, slo.itl_s, utilization, correction)
    return pool_of(one, profile, demand, slo, utilization)


def pool_of(one: Capacity, profile: Profile, demand: Demand, slo: Slo, utilization: float) -> Need:
    """Return the workers that the demand needs, if the capacity of `one` worker is known."""
    if demand.rps <= 0:
        return Need(workers=0, utilization=0.0)
    under_way = demand.rps * demand.osl_tokens * one.itl_s
    room = under_way + SPREAD * math.sqrt(under_way)
    workers = min(MAX_WORKERS, max(1, math.ceil(demand.rps / one.rps - 1e-9), math.ceil(room / one.batch - 1e-9)))
    service_s, soonest_s = prompt_times_s(profile, demand, one)
    patience_s = slo.ttft_s - soonest_s
    fits = one.fits and patience_s >= 0
    ranks = profile.dp_size
    while (
        patience_s >= 0
        and workers < MAX_WORKERS
        and late_share(workers * ranks, demand.rps, service_s, patience_s) > MISSED_SHARE
    ):
        workers += 1
    return Need(workers, utilization=utilization * demand.rps / one.rps / workers, fits=fits)


def prompt_times_s(profile: Profile, demand: Demand, one: Capacity) -> tuple[float, float]:
    """Return how long a prompt occupies a worker, and how soon its first token comes if no prompt is before it.

    Running requests get a token in every step, so a prompt also takes its share of their time. The first token comes
    after whole steps, and one step was already running when the prompt came.
    """
    prompt_s = prefill_time_s(profile, demand.uncached_tokens)
    steps = demand.uncached_tokens / profile.max_step_tokens
    return prompt_s + steps * one.step_s, prompt_s + (math.ceil(steps) + 1) * one.step_s
