"""Compute how many prefill and decode workers keep an SLO, from the profile of one worker. Pure.

A prefill worker is a server that takes one prompt after the other; prompts that find all workers busy wait (M/G/c). A
decode worker holds a batch. All batches together hold the running requests, whose number is Poisson distributed. Both
roles are planned so that nearly all requests stay within the SLO, and so that no worker is used beyond
`target_utilization` of its capacity: a queue at 100 % grows without end.
"""

import math
from dataclasses import dataclass

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile

MAX_WORKERS = 4096  # of a role; a larger need is reported as this number
MISSED_SHARE = 0.01  # of the requests may find too long a queue, by the formula
SPREAD = 2.33  # decode workers have room for this many standard deviations of running requests: 99 %
WORK_VARIATION = 1.0  # squared coefficient of variation of a prompt's work, as of an exponential distribution


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The mean load. `hit_share` of the prompts' tokens lies in a cache."""

    rps: float
    isl_tokens: float
    osl_tokens: float
    hit_share: float = 0.0

    @property
    def uncached_tokens(self) -> float:
        return max(1.0, self.isl_tokens * (1 - min(1.0, max(0.0, self.hit_share))))

    @property
    def context_tokens(self) -> float:
        """Return the context of a request in the middle of its answer."""
        return max(1.0, self.isl_tokens + self.osl_tokens / 2)


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """The load of one worker that just keeps the ITL. If it cannot keep the ITL, `fits` is false and batch is 1."""

    batch: int
    itl_s: float
    rps: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Need:
    """The workers that a load takes. If no number keeps the SLO, `fits` is false, and they only carry the load."""

    workers: int
    utilization: float  # of each worker
    fits: bool = True


def check_tables(prefill: Profile, decode: Profile) -> None:
    """Raise ConfigError if a profile lacks the table of its role."""
    for profile, table, role in ((prefill, prefill.prefill, "prefill"), (decode, decode.decode, "decode")):
        if table is None:
            raise ConfigError(
                f"the profile of {profile.model} ({profile.mapping}) has no {role} table",
                hint=f"measure the {role} workers with `kvmesh profile`, or set --{role}-profile to a file that has it",
            )


def prefill_time_s(profile: Profile, tokens: float) -> float:
    """Return the time of one prompt alone, cut into steps of at most `max_step_tokens`."""
    whole, rest = divmod(tokens, profile.max_step_tokens)
    return whole * profile.prefill_s(profile.max_step_tokens) + profile.prefill_s(rest)


def waiting_share(servers: int, work: float) -> float:
    """Return the share of arrivals that find all `servers` busy, by Erlang C; 1 if `work` [erlangs] is too much."""
    if work >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = work * blocked / (count + work * blocked)
    return blocked / (1 - work / servers * (1 - blocked))


def late_share(servers: int, rps: float, service_s: float, patience_s: float) -> float:
    """Return the share of arrivals that wait longer than `patience_s`.

    Erlang C gives how many wait; their waits are exponentially distributed, with the mean of Allen and Cunneen.
    """
    work = rps * service_s
    if work >= servers:
        return 1.0
    if patience_s < 0:
        return 1.0
    mean_s = service_s / (servers - work) * (1 + WORK_VARIATION) / 2
    return waiting_share(servers, work) * math.exp(-patience_s / max(mean_s, 1e-12))


def mean_wait_s(servers: int, rps: float, service_s: float) -> float:
    """Return the mean wait; infinite if the servers cannot keep up."""
    work = rps * service_s
    if work >= servers:
        return math.inf
    return waiting_share(servers, work) * service_s / (servers - work) * (1 + WORK_VARIATION) / 2


def prefill_need(profile: Profile, demand: Demand, slo: Slo, utilization: float, correction: float = 1.0) -> Need:
    """Return the workers with which nearly all prompts start in time. `correction`: measured over profiled time."""
    service_s = prefill_time_s(profile, demand.uncached_tokens) * correction
    work = demand.rps * service_s
    if work <= 0:
        return Need(workers=0, utilization=0.0)
    ranks = profile.dp_size  # each rank of a worker takes a prompt of its own
    fewest = min(MAX_WORKERS, math.ceil(work / (utilization * ranks) - 1e-9))
    patience_s = slo.ttft_s - service_s
    if patience_s < 0:
        return Need(workers=fewest, utilization=work / (fewest * ranks), fits=False)
    workers = fewest
    while workers < MAX_WORKERS and late_share(workers * ranks, demand.rps, service_s, patience_s) > MISSED_SHARE:
        workers += 1
    return Need(workers=workers, utilization=work / (workers * ranks))


def decode_capacity(profile: Profile, demand: Demand, itl_slo_s: float, correction: float = 1.0) -> DecodeCapacity:
    """Return the largest batch that fits, and whose step is fast enough in the middle of the answers."""
    context = demand.context_tokens
    most = max(1, min(int(profile.total_kv_tokens / context), profile.max_num_seqs))

    def itl_s(batch: int) -> float:
        return profile.decode_s(batch * context, context) * correction

    low, high = 0, most  # low fits, above high does not
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if itl_s(middle) <= itl_slo_s else (low, middle - 1)
    batch = max(1, low)
    step_s = max(itl_s(batch), 1e-9)
    return DecodeCapacity(batch, step_s, batch / (max(1.0, demand.osl_tokens) * step_s), fits=low > 0)


def decode_need(profile: Profile, demand: Demand, slo: Slo, utilization: float, correction: float = 1.0) -> Need:
    """Return the workers whose batches have room for the running requests, and for random peaks of their number."""
    if demand.rps <= 0 or demand.osl_tokens <= 0:
        return Need(workers=0, utilization=0.0)
    capacity = decode_capacity(profile, demand, slo.itl_s, correction)
    under_way = demand.rps * demand.osl_tokens * capacity.itl_s
    room = max(under_way / utilization, under_way + SPREAD * math.sqrt(under_way))
    workers = min(MAX_WORKERS, max(1, math.ceil(room / capacity.batch - 1e-9)))
    return Need(workers=workers, utilization=under_way / (workers * capacity.batch), fits=capacity.fits)
