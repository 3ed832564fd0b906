"""The reference's published formulas, which the benchmark compares ours with. Pure.

There are two generations of them. Neither leaves room for a queue: they plan for servers that are 100 % busy, with
requests of equal length that come one after the other.
"""

import math

from kvmesh.planner.budget import Counts, ScalingLimits, published_budget
from kvmesh.planner.sizing import Demand, Slo, decode_capacity, prefill_time_s
from kvmesh.protocol.profile import Profile


def legacy_prefill(
    requests: float, isl_tokens: float, interval_s: float, tokens_per_s_gpu: float, gpus: int, correction: float = 1.0
) -> int:
    """Return the prefill workers for `requests` in one interval. A correction above 1 counts as 1."""
    return math.ceil(requests * isl_tokens / interval_s * min(1.0, correction) / tokens_per_s_gpu / gpus)


def legacy_decode(requests: float, osl_tokens: float, interval_s: float, tokens_per_s_gpu: float, gpus: int) -> int:
    return math.ceil(requests * osl_tokens / interval_s / tokens_per_s_gpu / gpus)


def decode_throughput(profile: Profile, context_tokens: float, itl_slo_s: float, correction: float = 1.0) -> float:
    """Return tokens/s of one GPU at the fullest KV whose ITL fits; at the emptiest if none fits."""
    wanted_s = itl_slo_s / correction if correction > 0 else itl_slo_s
    step = 100
    for percent in range(step, 0, -1):
        kv_tokens = profile.total_kv_tokens * percent / step
        itl_s = profile.decode_s(kv_tokens, context_tokens)
        if itl_s <= wanted_s:
            break
    return kv_tokens / context_tokens / max(itl_s, 1e-9) / max(1, profile.gpus)


def legacy_sizing(prefill: Profile, decode: Profile, demand: Demand, slo: Slo, interval_s: float) -> Counts:
    """Size both roles by the throughputs of the profiles, without prefix hits: the first generation."""
    requests = demand.rps * interval_s
    prefill_rate = demand.isl_tokens / max(prefill.prefill_s(demand.isl_tokens), 1e-9) / max(1, prefill.gpus)
    decode_rate = decode_throughput(decode, demand.context_tokens, slo.itl_s)
    return Counts(
        legacy_prefill(requests, demand.isl_tokens, interval_s, prefill_rate, max(1, prefill.gpus)),
        legacy_decode(requests, demand.osl_tokens, interval_s, decode_rate, max(1, decode.gpus)),
    )


def reference_sizing(prefill: Profile, decode: Profile, demand: Demand, slo: Slo, limits: ScalingLimits) -> Counts:
    """Size both roles by the requests/s of one worker, with prefix hits and the budget: the second generation."""
    ttft_s = prefill_time_s(prefill, demand.uncached_tokens)
    prefills = math.ceil(demand.rps * ttft_s)
    if ttft_s > slo.ttft_s:
        prefills = max(prefills, math.ceil(ttft_s / slo.ttft_s))
    decodes = math.ceil(demand.rps / decode_capacity(decode, demand, slo.itl_s).rps)
    return published_budget(Counts(max(limits.min_prefill, prefills), max(limits.min_decode, decodes)), limits)
