"""Choose mappings and counts of workers that keep an SLO on a budget of GPUs. Pure.

The formulas are those of planner/sizing.py, so the planner would order the workers that are recommended here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from kvmesh.planner.budget import counted_gpus
from kvmesh.planner.model import Reason
from kvmesh.planner.sizing import MISSED_SHARE, SPREAD, Demand, late_share, mean_wait_s, prefill_time_s
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile

MAX_BATCHES = 24  # of a decode mapping that are tried
MAX_BUDGET = 1024
NEARLY = 0.99  # share of the best rate above which fewer GPUs are better


class Goal(Struct, frozen=True, kw_only=True):
    ttft_slo_s: float
    itl_slo_s: float
    isl_tokens: int
    osl_tokens: int
    gpus: int
    hit_share: float = 0.0  # share of the prompts' tokens that lies in a cache
    utilization: float = 0.8  # the most of a worker's capacity
    rps: float = 0.0  # requests/s to carry; 0: as many as the GPUs can

    @property
    def demand(self) -> Demand:
        return Demand(self.rps or 1.0, self.isl_tokens, self.osl_tokens, self.hit_share)


class Option(Struct, frozen=True, kw_only=True):
    """A fleet, and its figures for the goal's requests. A worker without GPUs counts as one GPU."""

    prefill_mapping: str
    decode_mapping: str
    prefill_workers: int
    decode_workers: int
    gpus: int
    batch: int  # the largest of a decode worker
    rps: float
    ttft_s: float  # mean of wait and prompt, without the transfer of the KV
    itl_s: float
    tokens_s_gpu: float
    tokens_s_user: float
    meets_ttft: bool
    meets_itl: bool

    @property
    def meets(self) -> bool:
        return self.meets_ttft and self.meets_itl

    @property
    def title(self) -> str:
        prefill = f"{self.prefill_workers} x {self.prefill_mapping} prefill"
        return f"{prefill} + {self.decode_workers} x {self.decode_mapping} decode"


class Picks(Struct, frozen=True, kw_only=True):
    goal: Goal
    options: list[Option]  # the best of each pair of mappings and batch
    front: list[int]  # indices of the Pareto front of tokens/s/GPU and tokens/s/user, with the TTFT kept
    recommended: int | None  # an index; None: nothing keeps the SLO
    reasons: list[Reason]


def pick(prefill: Sequence[Profile], decode: Sequence[Profile], goal: Goal) -> Picks:
    """Return all options with the recommended one. Raise ConfigError for profiles that cannot serve together."""
    check_together([*prefill, *decode], goal)
    options = [option for p in prefill for d in decode for option in options_of(p, d, goal)]
    if goal.rps:
        options = [option for option in options if option.rps >= goal.rps] or options
    index = recommend(options, goal)
    return Picks(
        goal=goal,
        options=options,
        front=pareto_front(options),
        recommended=index,
        reasons=reasons_of(options, index, prefill, decode, goal),
    )


def check_together(profiles: Sequence[Profile], goal: Goal) -> None:
    models = sorted({profile.model for profile in profiles})
    if len(models) > 1:
        raise ConfigError(f"profiles of different models: {', '.join(models)}", hint="give those of one model")
    if goal.gpus > MAX_BUDGET:
        raise ConfigError(f"a budget of {goal.gpus} GPUs", hint=f"at most {MAX_BUDGET}")


def options_of(prefill: Profile, decode: Profile, goal: Goal) -> Iterator[Option]:
    """Yield, for each batch, the split that carries most on the budget, and the one that carries most per GPU."""
    most = (goal.gpus - counted_gpus(decode)) // counted_gpus(prefill)
    rates = [prefill_rps(prefill, workers, goal) for workers in range(1, most + 1)]
    for batch in batches_of(decode, goal.demand):
        splits = list(splits_of(prefill, decode, batch, rates, goal))
        if splits:
            best = [max(splits, key=lambda option: (option.rps, -option.gpus))]
            best.append(max(splits, key=lambda option: (option.tokens_s_gpu, option.rps)))
            best += sorted(enough(splits, goal), key=lambda option: option.gpus)[:1]
            yield from dict.fromkeys(best)  # the order is stable, because people pick by number


def enough(splits: Iterable[Option], goal: Goal) -> list[Option]:
    return [option for option in splits if goal.rps and option.rps >= goal.rps]


def splits_of(prefill: Profile, decode: Profile, batch: int, rates: Sequence[float], goal: Goal) -> Iterator[Option]:
    """Yield, for each number of prefill workers, the decode workers that keep up with them, and one less.

    `rates[i]` is the requests/s that i + 1 prefill workers carry.
    """
    for workers, rate in enumerate(rates, 1):
        most = (goal.gpus - workers * counted_gpus(prefill)) // counted_gpus(decode)
        count = fewest_decode(decode, batch, rate, most, goal)
        for decode_workers in {count, max(1, count - 1)}:
            carried = min(rate, decode_rps(decode, decode_workers, batch, goal))
            yield option_of(prefill, decode, (workers, decode_workers), batch, carried, goal)


def fewest_decode(decode: Profile, batch: int, rps: float, most: int, goal: Goal) -> int:
    """Return the fewest decode workers that carry `rps`; `most` if even those do not."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decode_rps(decode, middle, batch, goal) >= rps else (middle + 1, high)
    return low


def option_of(
    prefill: Profile, decode: Profile, counts: tuple[int, int], batch: int, carried: float, goal: Goal
) -> Option:
    prefill_workers, decode_workers = counts
    offered = min(carried, goal.rps) if goal.rps else carried
    itl_s = step_s(decode, batch, goal.demand)
    service_s = prefill_time_s(prefill, goal.demand.uncached_tokens)
    ttft_s = service_s + mean_wait_s(prefill_workers * prefill.dp_size, offered, service_s)
    gpus = prefill_workers * counted_gpus(prefill) + decode_workers * counted_gpus(decode)
    return Option(
        prefill_mapping=prefill.mapping,
        decode_mapping=decode.mapping,
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        gpus=gpus,
        batch=batch,
        rps=carried,
        ttft_s=ttft_s,
        itl_s=itl_s,
        tokens_s_gpu=offered * goal.osl_tokens / gpus,
        tokens_s_user=1 / max(itl_s, 1e-9),
        meets_ttft=service_s <= goal.ttft_slo_s and carried > 0,
        meets_itl=itl_s <= goal.itl_slo_s,
    )


def prefill_rps(profile: Profile, workers: int, goal: Goal) -> float:
    """Return the requests/s that the workers start in time for the TTFT.

    If no prompt can be in time, return the requests/s that keep the workers as busy as allowed.
    """
    servers = workers * profile.dp_size
    service_s = max(1e-9, prefill_time_s(profile, goal.demand.uncached_tokens))
    most = servers * goal.utilization / service_s
    patience_s = goal.ttft_slo_s - service_s
    if patience_s < 0 or late_share(servers, most, service_s, patience_s) <= MISSED_SHARE:
        return most
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        late = late_share(servers, middle, service_s, patience_s) > MISSED_SHARE
        low, high = (low, middle) if late else (middle, high)
    return low


def decode_rps(profile: Profile, workers: int, batch: int, goal: Goal) -> float:
    """Return the requests/s that the workers have room for with batches of `batch`.

    The running requests satisfy both under_way / utilization <= room and under_way + SPREAD sqrt(under_way) <= room.
    """
    room = workers * batch
    root = (math.sqrt(SPREAD**2 + 4 * room) - SPREAD) / 2
    under_way = min(room * goal.utilization, root**2)
    return under_way / (goal.osl_tokens * step_s(profile, batch, goal.demand))


def batches_of(profile: Profile, demand: Demand) -> list[int]:
    """Return batches from one to the largest that fits, in even logarithmic steps."""
    most = max(1, min(int(profile.total_kv_tokens / demand.context_tokens), profile.max_num_seqs))
    return sorted({round(most ** (i / (MAX_BATCHES - 1))) for i in range(MAX_BATCHES)})


def step_s(profile: Profile, batch: int, demand: Demand) -> float:
    return max(1e-9, profile.decode_s(batch * demand.context_tokens, demand.context_tokens))


def pareto_front(options: Sequence[Option]) -> list[int]:
    """Return the indices of the front, by increasing tokens/s/user."""
    order = sorted(
        (i for i, option in enumerate(options) if option.meets_ttft),
        key=lambda i: (-options[i].tokens_s_user, -options[i].tokens_s_gpu),
    )
    front: list[int] = []
    for i in order:
        if not front or options[i].tokens_s_gpu > options[front[-1]].tokens_s_gpu:
            front.append(i)
    return front[::-1]


def recommend(options: Sequence[Option], goal: Goal) -> int | None:
    """Return the option that keeps the SLO and carries most, or what is asked for, on the fewest GPUs."""
    meeting = [i for i, option in enumerate(options) if option.meets and option.rps >= goal.rps]
    if not meeting:
        return None
    enough_rps = goal.rps or NEARLY * max(options[i].rps for i in meeting)
    carrying = [i for i in meeting if options[i].rps >= enough_rps]
    return min(carrying, key=lambda i: (options[i].gpus, -options[i].tokens_s_user, -options[i].rps))


def reasons_of(
    options: Sequence[Option],
    index: int | None,
    prefill: Sequence[Profile],
    decode: Sequence[Profile],
    goal: Goal,
) -> list[Reason]:
    if index is None:
        return list(why_not(options, prefill, decode, goal))
    chosen = options[index]
    service = f"a prompt of {goal.demand.uncached_tokens:.0f} uncached tokens takes"
    reasons = [
        Reason(
            code="carries",
            text=f"{chosen.title}: {chosen.rps:.2f} requests/s, {chosen.tokens_s_gpu:.0f} tokens/s/GPU on "
            f"{chosen.gpus} of {goal.gpus} GPUs",
        ),
        Reason(
            code="ttft",
            text=f"{service} {1e3 * (prefill_time_of(chosen, prefill, goal)):.0f} ms on {chosen.prefill_mapping}, with "
            f"waiting {1e3 * chosen.ttft_s:.0f} ms; the SLO is {1e3 * goal.ttft_slo_s:.0f} ms",
        ),
        Reason(
            code="itl",
            text=f"a batch of {chosen.batch} takes {1e3 * chosen.itl_s:.1f} ms a step on {chosen.decode_mapping}; the "
            f"SLO is {1e3 * goal.itl_slo_s:.1f} ms",
        ),
    ]
    others = [o for o in options if o.meets and pair_of(o) != pair_of(chosen)]
    if others:
        second = max(others, key=lambda option: option.rps)
        text = f"the best other pair of mappings: {second.title}: {second.rps:.2f} requests/s on {second.gpus} GPUs"
        reasons.append(Reason(code="second", text=text))
    return reasons


def pair_of(option: Option) -> tuple[str, str]:
    return option.prefill_mapping, option.decode_mapping


def prefill_time_of(option: Option, prefill: Sequence[Profile], goal: Goal) -> float:
    profile = next(profile for profile in prefill if profile.mapping == option.prefill_mapping)
    return prefill_time_s(profile, goal.demand.uncached_tokens)


def why_not(
    options: Sequence[Option], prefill: Sequence[Profile], decode: Sequence[Profile], goal: Goal
) -> Iterator[Reason]:
    """Yield the reasons why nothing keeps the SLO, each with the nearest possible figure."""
    if not options:
        smallest = min(map(counted_gpus, prefill)) + min(map(counted_gpus, decode))
        yield Reason(code="gpus", text=f"one worker of each role takes {smallest} GPUs, there are {goal.gpus}")
        return
    if not any(option.meets_ttft for option in options):
        best_s = min(prefill_time_s(profile, goal.demand.uncached_tokens) for profile in prefill)
        text = (
            f"the fastest mapping takes {1e3 * best_s:.0f} ms for a prompt, the SLO is {1e3 * goal.ttft_slo_s:.0f} ms"
        )
        yield Reason(code="ttft", text=text)
    if not any(option.meets_itl for option in options):
        best_s = min(option.itl_s for option in options)
        text = (
            f"the fastest step, of one sequence, takes {1e3 * best_s:.1f} ms, the SLO is {1e3 * goal.itl_slo_s:.1f} ms"
        )
        yield Reason(code="itl", text=text)
    if meeting := [option.rps for option in options if option.meets]:
        text = f"{goal.gpus} GPUs carry {max(meeting):.2f} requests/s, {goal.rps:.2f} are asked for"
        yield Reason(code="rps", text=text)
