"""Choose where a request runs. Pure: facts come in, a decision goes out."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.errors import NoWorkerError
from router.index import Holder

Policy = Literal["kv", "round-robin", "random"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One (worker, dp rank) as the router sees it now."""

    holder: Holder
    overlap_blocks: int = 0  # leading blocks of the prompt in its cache; <= prompt_blocks
    active_prefill_tokens: int = 0  # placed there, still to compute
    active_decode_blocks: int = 0  # of the prompts of running requests, and one for each answer
    new_blocks: int = 0  # of this prompt, that no running request there holds
    active_requests: int = 0
    last_chosen: int = 0  # when it was chosen last, as a count of choices: breaks ties in turn


@dataclass(frozen=True, slots=True)
class Weights:
    """What a placement costs, in KV blocks. Source: docs/routing.md, "Cost of a placement"."""

    prefill: float = 1.0  # per block still to prefill: favours cache reuse and so TTFT
    decode: float = 1.0  # per block held by running requests: evens load and so ITL
    request: float = 0.0  # per running request
    transfer: float = 0.1  # per block that must be pulled from a prefill worker


Cost = Callable[[Candidate], float]


def whole_cost(isl_tokens: int, block_size: int, weights: Weights) -> Cost:
    """Cost of computing prompt and answer on one worker."""

    def cost(c: Candidate) -> float:
        to_prefill = max(0.0, (c.active_prefill_tokens + isl_tokens) / block_size - c.overlap_blocks)
        decode = c.active_decode_blocks + c.new_blocks
        return weights.prefill * to_prefill + weights.decode * decode + weights.request * c.active_requests

    return cost


def prefill_cost(isl_tokens: int, block_size: int, weights: Weights) -> Cost:
    """Cost of computing the prompt alone."""

    def cost(c: Candidate) -> float:
        to_prefill = max(0.0, (c.active_prefill_tokens + isl_tokens) / block_size - c.overlap_blocks)
        return weights.prefill * to_prefill

    return cost


def decode_cost(prompt_blocks: int, weights: Weights) -> Cost:
    """Cost of the answer alone: blocks that are there already need not be pulled."""

    def cost(c: Candidate) -> float:
        decode = weights.decode * (c.active_decode_blocks + c.new_blocks) + weights.request * c.active_requests
        return decode + weights.transfer * (prompt_blocks - c.overlap_blocks)

    return cost


def place(
    candidates: Sequence[Candidate], cost: Cost, policy: Policy, temperature: float, rng: random.Random
) -> Candidate:
    """The candidate to run on. Raises NoWorkerError if there is none.

    kv: the cheapest; equal costs go to who was chosen longest ago, then to the lowest holder. A `temperature`
    above 0 draws instead, with p ~ exp(-(cost - cheapest) / (spread * temperature)): spread herds at the price
    of reuse. round-robin and random do not look at the cost.
    """
    if not candidates:
        raise NoWorkerError("no worker is ready", hint="start one: `kvmesh up`, or `python -m workers --role decode`")
    in_turn = sorted(candidates, key=lambda c: (c.last_chosen, c.holder))
    match policy:
        case "round-robin":
            return in_turn[0]
        case "random":
            return rng.choice(in_turn)
    costs = [cost(c) for c in in_turn]
    cheapest, spread = min(costs), max(costs) - min(costs)
    if temperature <= 0 or spread == 0:
        return in_turn[costs.index(cheapest)]
    weights = [math.exp(-(c - cheapest) / (spread * temperature)) for c in costs]
    return rng.choices(in_turn, weights)[0]
