"""Change when the requests of a trace arrive, and how many of them count."""

import heapq
import random
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from kvmesh.simulator.requests import SimRequest


def sped_up(requests: Iterable[SimRequest], factor: float) -> Iterator[SimRequest]:
    """Let the requests come `factor` times as fast."""
    for request in requests:
        yield msgspec.structs.replace(request, arrival_s=request.arrival_s / factor)


def limited(requests: Iterable[SimRequest], count: int) -> Iterator[SimRequest]:
    """Return the first `count` requests, all of them if `count` is 0."""
    return islice(requests, count or None)


def jittered(requests: Iterable[SimRequest], jitter_s: float, seed: int) -> Iterator[SimRequest]:
    """Move arrivals by up to `jitter_s` and sort them again. Only requests within that time are held."""
    rng = random.Random(seed)
    pending: list[tuple[float, int, SimRequest]] = []
    for number, request in enumerate(requests):
        moved = request.arrival_s + rng.random() * jitter_s
        while pending and pending[0][0] <= request.arrival_s:
            yield heapq.heappop(pending)[2]
        heapq.heappush(pending, (moved, number, msgspec.structs.replace(request, arrival_s=moved)))
    while pending:
        yield heapq.heappop(pending)[2]
