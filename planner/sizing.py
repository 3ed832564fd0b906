"""How many prefill and decode workers keep an SLO, from what a profile says of one. Pure.

A prefill worker is a server that takes one prompt after the other; prompts that find all of them busy wait (M/G/c). A
decode worker holds a batch; the batches together hold as many requests as there are under way, which varies as a
Poisson number does. Both are planned so that a share of requests close to one stays within the SLO, and so that no
worker is used beyond `target_utilization` of what it can do: a queue at 100 % has no end.
"""

import math
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.profile import Profile

MAX_WORKERS = 4096  # of a role; what would take more is told as that many
MISSED_SHARE = 0.01  # of requests that may find too long a queue, by the formula
SPREAD = 2.33  # standard deviations of the requests under way that decode workers have room for: 99 %
WORK_VARIATION = 1.0  # squared coefficient of variation of a prompt's work: as if exponential


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests as they come: means, `hit_share` of their prompts' tokens lies in a cache."""

    rps: float
    isl_tokens: float
    osl_tokens: float
    hit_share: float = 0.0

    @property
    def uncached_tokens(self) -> float:
        return max(1.0, self.isl_tokens * (1 - min(1.0, max(0.0, self.hit_share))))

    @property
    def context_tokens(self) -> float:
        """Of a request in the middle of its answer."""
        return max(1.0, self.isl_tokens + self.osl_tokens / 2)


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Of one worker that just keeps the ITL. `fits`: it does so at all; if not, batch is 1."""

    batch: int
    itl_s: float
    rps: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Need:
    """`fits`: the SLO can be kept with more workers; if not, they are as many as the load takes without it."""

    workers: int
    utilization: float  # of each, with so many
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
    """One prompt alone, cut into steps of at most `max_step_tokens`."""
    whole, rest = divmod(tokens, profile.max_step_tokens)
    return whole * profile.prefill_s(profile.max_step_tokens) + profile.prefill_s(rest)


def waiting_share(servers: int, work: float) -> float:
    """Erlang C: the share of arrivals that find all `servers` busy; `work` [erlangs]. 1 if it is too much for them."""
    if work >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = work * blocked / (count + work * blocked)
    return blocked / (1 - work / servers * (1 - blocked))


def late_share(servers: int, rps: float, service_s: float, patience_s: float) -> float:
    """The share of arrivals that wait longer than `patience_s`.

    Erlang C for how many wait; the wait of those falls off exponentially with the mean of Allen and Cunneen.
    """
    work = rps * service_s
    if work >= servers:
        return 1.0
    if patience_s < 0:
        return 1.0
    mean_s = service_s / (servers - work) * (1 + WORK_VARIATION) / 2
    return waiting_share(servers, work) * math.exp(-patience_s / max(mean_s, 1e-12))


def mean_wait_s(servers: int, rps: float, service_s: float) -> float:
    """Infinite if the servers cannot keep up."""
    work = rps * service_s
    if work >= servers:
        return math.inf
    return waiting_share(servers, work) * service_s / (servers - work) * (1 + WORK_VARIATION) / 2


def prefill_need(profile: Profile, demand: Demand, slo: Slo, utilization: float, correction: float = 1.0) -> Need:
    """Workers so that all but a few prompts start early enough. `correction`: how much slower than the profile."""
    service_s = prefill_time_s(profile, demand.uncached_tokens) * correction
    work = demand.rps * service_s
    if work <= 0:
        return Need(workers=0, utilization=0.0)
    ranks = profile.dp_size  # of a worker: each takes a prompt of its own
    fewest = min(MAX_WORKERS, math.ceil(work / (utilization * ranks) - 1e-9))
    patience_s = slo.ttft_s - service_s
    if patience_s < 0:
        return Need(workers=fewest, utilization=work / (fewest * ranks), fits=False)
    workers = fewest
    while workers < MAX_WORKERS and late_share(workers * ranks, demand.rps, service_s, patience_s) > MISSED_SHARE:
        workers += 1
    return Need(workers=workers, utilization=work / (workers * ranks))


def decode_capacity(profile: Profile, demand: Demand, itl_slo_s: float, correction: float = 1.0) -> DecodeCapacity:
    """The largest batch whose step is fast enough at the context of a request half done, within KV and sequences."""
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
    """Workers whose batches have room for the requests under way, and for as many more as chance brings."""
    if demand.rps <= 0 or demand.osl_tokens <= 0:
        return Need(workers=0, utilization=0.0)
    capacity = decode_capacity(profile, demand, slo.itl_s, correction)
    under_way = demand.rps * demand.osl_tokens * capacity.itl_s
    room = max(under_way / utilization, under_way + SPREAD * math.sqrt(under_way))
    workers = min(MAX_WORKERS, max(1, math.ceil(room / capacity.batch - 1e-9)))
    return Need(workers=workers, utilization=under_way / (workers * capacity.batch), fits=capacity.fits)
