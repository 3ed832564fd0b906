"""The reference's published formulas, which the benchmark compares ours with. Pure.

They leave no room for a queue: they plan for servers that are 100 % busy, with requests of equal length that come one
after the other.
"""

import math

from kvmesh.planner.budget import Counts, ScalingLimits, published_budget
from kvmesh.planner.sizing import Demand, Slo, decode_capacity, prefill_time_s
from kvmesh.protocol.profile import Profile


def reference_sizing(prefill: Profile, decode: Profile, demand: Demand, slo: Slo, limits: ScalingLimits) -> Counts:
    """Size both roles by the requests/s of one worker, with prefix hits and the budget."""
    ttft_s = prefill_time_s(prefill, demand.uncached_tokens)
    prefills = math.ceil(demand.rps * ttft_s)
    if ttft_s > slo.ttft_s:
        prefills = max(prefills, math.ceil(ttft_s / slo.ttft_s))
    decodes = math.ceil(demand.rps / decode_capacity(decode, demand, slo.itl_s).rps)
    return published_budget(Counts(max(limits.min_prefill, prefills), max(limits.min_decode, decodes)), limits)
