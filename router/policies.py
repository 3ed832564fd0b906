"""The routing policies: how one of the workers that can take a request is chosen. Pure.

This table is the one place that lists them. Settings, `--help`, `kvmesh replay`, explanations and the table in
docs/routing.md follow it.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvmesh.protocol.errors import NoWorkerError
from kvmesh.router.selection import Candidate, PlacementCost

Choose = Callable[[Sequence[Candidate], PlacementCost, float, random.Random], Candidate]
"""Arguments: at least one candidate, their costs, the temperature, the source of random numbers."""


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    choose: Choose
    looks_at: str  # for `--help`
    why: str = ""  # for explanations, where the cost is not the reason
    waits_for_room: bool = True  # a request waits in the router's queue while the chosen worker is full
    by_cost: bool = False  # the cheapest candidate is taken: cached prefixes count, and few workers may be scored


def choose(
    candidates: Sequence[Candidate], cost: PlacementCost, policy: "Policy", temperature: float, rng: random.Random
) -> Candidate:
    """Return the candidate that the policy chooses. Raises NoWorkerError if there is no candidate."""
    if not candidates:
        raise NoWorkerError("no worker is ready", hint="start one: `kvmesh up`, or `kvmesh worker --role decode`")
    return POLICIES[policy].choose(candidates, cost, temperature, rng)


def _cheapest(
    candidates: Sequence[Candidate], cost: PlacementCost, temperature: float, rng: random.Random
) -> Candidate:
    """Return the candidate of least cost; of equal ones the one chosen longest ago, then the first.

    A `temperature` above 0 draws one instead, with p ~ exp(-(cost - cheapest) / (spread * temperature)).
    """
    costs = cost.costs(candidates)
    return _draw(candidates, costs, temperature, rng) if temperature > 0 else _least(candidates, costs)


def _least_loaded(candidates: Sequence[Candidate], cost: PlacementCost, _: float, rng: random.Random) -> Candidate:
    return _least(candidates, [cost.load(c) for c in candidates])


def _less_loaded_of_two(
    candidates: Sequence[Candidate], cost: PlacementCost, _: float, rng: random.Random
) -> Candidate:
    two = rng.sample(candidates, min(2, len(candidates)))
    return _least(two, [cost.load(c) for c in two])


def _next_in_turn(candidates: Sequence[Candidate], cost: PlacementCost, _: float, rng: random.Random) -> Candidate:
    return min(candidates, key=lambda c: c.last_chosen)


def _drawn(candidates: Sequence[Candidate], cost: PlacementCost, _: float, rng: random.Random) -> Candidate:
    return rng.choice(candidates)


def _least(candidates: Sequence[Candidate], costs: Sequence[float]) -> Candidate:
    least = min(costs)
    chosen = candidates[costs.index(least)]
    if costs.count(least) == 1:
        return chosen
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


POLICIES: Mapping[str, RoutingPolicy] = {
    "kv": RoutingPolicy(_cheapest, "cached prefixes and load", by_cost=True),
    "least-loaded": RoutingPolicy(_least_loaded, "load", "the least loaded"),
    "power-of-two": RoutingPolicy(
        _less_loaded_of_two, "load of two workers drawn at random", "the less loaded of two that were drawn"
    ),
    "round-robin": RoutingPolicy(_next_in_turn, "turns", "whose turn it is", waits_for_room=False),
    "random": RoutingPolicy(_drawn, "chance", "drawn", waits_for_room=False),
}

if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]  # a setting of another value is refused, and the error lists these


def policies_help() -> str:
    """Return what each policy chooses a worker by, for `--help`."""
    return "how a worker is chosen. " + "; ".join(f"{name}: by {p.looks_at}" for name, p in POLICIES.items())
