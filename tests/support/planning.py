"""Profiles, demands and fleets for the planner's tests."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kvmesh.planner.model import Observation, RoleFleet, ScalingDecision, Traffic, WorkerLoad
from kvmesh.planner.sizing import Demand
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from kvmesh.protocol.timing import PolynomialTiming


def an_8b(speedup: float = 1.0, total_kv_tokens: int = 400_000, gpus: int = 1) -> Profile:
    """Return a profile by the polynomial of the mock engine."""
    timing = PolynomialTiming(total_kv_tokens, speedup)
    isl_tokens = [1, *range(256, 8193, 256)]
    kv_tokens = [total_kv_tokens * part // 32 for part in range(33)]
    return Profile(
        model="m",
        engine="mock",
        device="d",
        gpus=gpus,
        prefill=PrefillTable(isl_tokens=isl_tokens, ttft_s=[timing.prefill_s(tokens) for tokens in isl_tokens]),
        decode=DecodeTable(
            kv_tokens=kv_tokens, context_tokens=[1], itl_s=[[timing.decode_s(1, held)] for held in kv_tokens]
        ),
        total_kv_tokens=total_kv_tokens,
    )


def demands() -> st.SearchStrategy[Demand]:
    return st.builds(
        Demand,
        rps=st.floats(0.01, 500),
        isl_tokens=st.floats(1, 8000),
        osl_tokens=st.floats(1, 2000),
        hit_share=st.floats(0, 1),
    )


@dataclass
class FakeFleet:
    """Counts that follow decisions: what is ordered is ready `start_s` later, what is taken away is gone at once."""

    prefill: int
    decode: int
    start_s: float = 30.0
    starting: list[tuple[float, str]] = field(default_factory=list)  # ready when, role

    def seen(self, at_s: float) -> tuple[RoleFleet, RoleFleet]:
        for ready_s, role in [item for item in self.starting if item[0] <= at_s]:
            self.starting.remove((ready_s, role))
            setattr(self, role, getattr(self, role) + 1)
        return self._of("prefill"), self._of("decode")

    def apply(self, decision: ScalingDecision) -> None:
        flipped = {"prefill": 0, "decode": 0}
        if decision.flip is not None:
            flipped[decision.flip.to_role] = decision.flip.count
        for role in ("prefill", "decode"):
            there = self._of(role).ordered
            wanted = getattr(decision, role)
            if wanted < there:
                assert there - wanted <= getattr(self, role), "a worker that starts was taken away"
                setattr(self, role, getattr(self, role) - (there - wanted))
            for number in range(wanted - there):
                wait_s = 3.0 if number < flipped[role] else self.start_s
                self.starting.append((decision.at_s + wait_s, role))

    def _of(self, role: str) -> RoleFleet:
        return RoleFleet(ready=getattr(self, role), starting=sum(name == role for _, name in self.starting))


def arrivals(rate: Callable[[float], float], seconds: float, step_s: float, seed: int) -> Iterator[tuple[float, int]]:
    """Yield the end of each step and the random number of its requests."""
    rng = random.Random(seed)
    for number in range(int(seconds / step_s)):
        yield (number + 1) * step_s, poisson(rng, rate(number * step_s) * step_s)


def poisson(rng: random.Random, mean: float) -> int:
    if mean > 200:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    count, product, limit = 0, rng.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def observe(
    fleet: FakeFleet,
    at_s: float,
    requests: float | None,
    step_s: float = 5.0,
    loads: Iterable[WorkerLoad] = (),
    idle: bool = False,
    **lengths: float,
) -> Observation:
    """Return an observation. None `requests` means no figures; with `idle`, workers report that they have no work."""
    prefill, decode = fleet.seen(at_s)
    nothing = WorkerLoad(name="idle", total_kv_tokens=400_000)
    prefill_loads = tuple(loads) or ((nothing,) * prefill.ready if idle else ())
    known = {"isl_tokens": 2000.0, "osl_tokens": 200.0} | lengths
    traffic = Traffic(start_s=at_s - step_s, end_s=at_s, requests=requests, **known)
    return Observation(
        at_s=at_s,
        prefill=prefill,
        decode=decode,
        traffic=None if requests is None else traffic,
        prefill_loads=prefill_loads,
        decode_loads=(nothing,) * decode.ready if idle else (),
    )
