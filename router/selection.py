"""Choose where a request runs. Pure: facts come in, a decision goes out."""

import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from protocol.errors import NoWorkerError
from router.index import Depths, Holder

Policy = Literal["kv", "least-loaded", "power-of-two", "round-robin", "random"]
Leg = Literal["whole", "prefill", "decode"]
NOWHERE: Depths = (0, 0, 0, 0)


class Candidate(Struct):
    """One (worker, dp rank) as the router sees it now."""

    holder: Holder
    overlap: Depths = NOWHERE  # leading blocks of the prompt: on its device, there or in host memory, ... anywhere
    queued_tokens: float = 0.0  # placed there, still to compute
    held_blocks: float = 0.0  # of the prompts of running requests, and of their answers
    new_blocks: int = 0  # of this prompt, that no running request there holds
    requests: int = 0
    capacity: float = 1.0  # > 0; speed against the others
    last_chosen: int = 0  # when it was chosen last, as a count of choices: breaks ties in turn


class Weights(Struct, frozen=True):
    """What a placement costs, in KV blocks. Source: docs/routing.md, "Cost of a placement"."""

    prefill: float = 1.0  # per block to compute or queued: favours TTFT
    decode: float = 0.2  # per block held by running requests: evens load and so ITL
    request: float = 0.0  # per running request
    transfer: float = 0.1  # per block that must be pulled from a prefill worker
    host: float = 0.75  # share of a block's work that is saved where it lies in host memory
    disk: float = 0.25
    object: float = 0.1

    @property
    def prefers_less(self) -> bool:
        """Of two workers the one with fewer blocks in use, and no more of anything else, costs less."""
        return self.decode > 0 and min(self.prefill, self.request) >= 0


class Terms(NamedTuple):
    """What a cost is made of, in blocks."""

    compute: float
    queue: float
    held: float
    requests: float
    transfer: float


class Prompt:
    """What is to be placed, and what each part of a cost counts for it."""

    __slots__ = ("_isl_blocks", "_rates", "_weights")

    def __init__(
        self, isl_tokens: int, block_size: int, leg: Leg, weights: Weights, recompute_price: float = 1.0
    ) -> None:
        computes, decodes = leg != "decode", leg != "prefill"
        self._isl_blocks = isl_tokens / block_size
        self._weights = weights
        self._rates = (
            weights.prefill * recompute_price * computes,  # per block to compute
            weights.prefill / block_size * computes,  # per queued token
            weights.decode * decodes,  # per block held
            weights.request * decodes,  # per request
            weights.transfer * (not computes),  # per block to pull
        )

    def terms(self, c: Candidate) -> tuple[float, float, float, float, float]:
        """As in `Terms`."""
        compute, queue, held, request, transfer = self._rates
        device, host, disk, anywhere = c.overlap
        missing = self._isl_blocks - device
        if anywhere != device:  # a block in a slower tier saves a share of its work
            tier = self._weights
            missing -= tier.host * (host - device) + tier.disk * (disk - host) + tier.object * (anywhere - disk)
        if missing < 0.0:
            missing = 0.0
        return (
            compute * missing,
            queue * c.queued_tokens,
            held * (c.held_blocks + c.new_blocks),
            request * c.requests,
            transfer * missing,
        )

    def cost(self, c: Candidate) -> float:
        return self.costs((c,))[0]

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """Of each the sum of its terms, by its capacity: in one go, because every placement asks for all."""
        compute, queue, held, request, transfer = self._rates
        isl_blocks, tier = self._isl_blocks, self._weights
        costs: list[float] = []
        for c in candidates:
            device, host, disk, anywhere = c.overlap
            missing = isl_blocks - device
            if anywhere != device:
                missing -= tier.host * (host - device) + tier.disk * (disk - host) + tier.object * (anywhere - disk)
            if missing < 0.0:
                missing = 0.0
            cost = compute * missing + queue * c.queued_tokens + held * (c.held_blocks + c.new_blocks)
            costs.append((cost + request * c.requests + transfer * missing) / c.capacity)
        return costs

    def load(self, c: Candidate) -> float:
        """What runs and waits there: what policies that know of no cache go by."""
        _, queue, held, request, _ = self._rates
        return (queue * c.queued_tokens + held * c.held_blocks + (request + 1) * c.requests) / c.capacity


def choose(
    candidates: Sequence[Candidate], prompt: Prompt, policy: Policy, temperature: float, rng: random.Random
) -> Candidate:
    """The candidate to run on. Raises NoWorkerError if there is none.

    kv: the cheapest; equal costs go to who was chosen longest ago, then to the first. A `temperature` above 0 draws
    instead, with p ~ exp(-(cost - cheapest) / (spread * temperature)): spread herds at the price of reuse.
    least-loaded and power-of-two (the less loaded of two drawn ones) look at load alone, round-robin and random at
    nothing.
    """
    if not candidates:
        raise NoWorkerError("no worker is ready", hint="start one: `kvmesh up`, or `python -m workers --role decode`")
    match policy:
        case "kv":
            costs = prompt.costs(candidates)
            return _draw(candidates, costs, temperature, rng) if temperature > 0 else _least(candidates, costs)
        case "least-loaded":
            return _least(candidates, [prompt.load(c) for c in candidates])
        case "power-of-two":
            two = rng.sample(candidates, min(2, len(candidates)))
            return _least(two, [prompt.load(c) for c in two])
        case "round-robin":
            return min(candidates, key=lambda c: c.last_chosen)
        case "random":
            return rng.choice(candidates)


def _least(candidates: Sequence[Candidate], costs: Sequence[float]) -> Candidate:
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)]
    chosen = candidates[costs.index(least)]
    for c, cost in zip(candidates, costs, strict=True):
        if cost == least and c.last_chosen < chosen.last_chosen:
            chosen = c
    return chosen


def _draw(candidates: Sequence[Candidate], costs: Sequence[float], temperature: float, rng: random.Random) -> Candidate:
    least, spread = min(costs), max(costs) - min(costs)
    if spread == 0:
        return _least(candidates, costs)
    odds = [math.exp(-(cost - least) / (spread * temperature)) for cost in costs]
    [drawn] = rng.choices(candidates, odds)
    return drawn
