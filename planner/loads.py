"""Read the loads that workers report on their /metrics pages."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

import aiohttp
from msgspec.structs import replace

from kvmesh.planner.model import WorkerLoad
from kvmesh.planner.scrape import fetch_page, samples
from kvmesh.protocol.errors import MeshError, WireError
from kvmesh.protocol.messages import WorkerCard
from kvmesh.protocol.version import NEIGHBOURS

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
AT_ONCE = 32
_P = "kvmesh_worker_"
RUNNING, WAITING = _P + "running_requests", _P + "waiting_requests"
USED_BLOCKS, QUEUED_TOKENS = _P + "used_blocks", _P + "queued_tokens"
CACHED_BLOCKS = _P + "cached_blocks"


def read_load(page: str, card: WorkerCard, isl_tokens: float | None = None) -> WorkerLoad:
    """Return the load on a page. Pure. Raise WireError if the page has none.

    If a worker does not count its queued tokens, each waiting request counts as a prompt of `isl_tokens`. If several
    workers share the page, the samples that are labelled with this worker's name count.
    """
    gauges = _gauges(page, card.name)
    missing = [name for name in (RUNNING, WAITING, USED_BLOCKS) if not math.isfinite(gauges.get(name, math.nan))]
    if missing:
        raise WireError(f"{card.name} does not tell its {', '.join(missing)}", hint=NEIGHBOURS)
    queued = gauges.get(QUEUED_TOKENS, math.nan)
    if not math.isfinite(queued):
        queued = gauges[WAITING] * (isl_tokens or 0.0)
    return WorkerLoad(
        name=card.name,
        queued_tokens=_count(queued),
        running=_count(gauges[RUNNING]),
        waiting=_count(gauges[WAITING]),
        kv_tokens=_count(gauges[USED_BLOCKS]) * card.block_size,
        total_kv_tokens=card.total_blocks * card.block_size * card.dp_size,
        cached_blocks=_count(cached) if math.isfinite(cached := gauges.get(CACHED_BLOCKS, 0.0)) else 0,
    )


def _gauges(page: str, worker: str) -> Mapping[str, float]:
    shared: dict[str, float] = {}
    own: dict[str, float] = {}
    for sample in samples(page, _P):
        told = sample.labels.get("worker")
        if told is None:
            shared[sample.name] = shared.get(sample.name, 0.0) + sample.value
        elif told == worker:
            own[sample.name] = own.get(sample.name, 0.0) + sample.value
    return shared | own


def shared_out(loads: tuple[WorkerLoad, ...], waiting_tokens: float) -> tuple[WorkerLoad, ...]:
    """Add the tokens that wait in routers, in equal parts: they will come to these workers. Pure."""
    more = _count(waiting_tokens / max(1, len(loads)))
    return tuple(replace(load, queued_tokens=load.queued_tokens + more) for load in loads)


def _count(value: float) -> int:
    return max(0, round(value))


async def fetch_load(http: aiohttp.ClientSession, card: WorkerCard, isl_tokens: float | None = None) -> WorkerLoad:
    """Return the load of a worker. Raise MeshError if it has no readable page."""
    if not card.metrics_url:
        raise MeshError(f"{card.name} has no /metrics page")
    return read_load(await fetch_page(http, card.metrics_url, TIMEOUT_S), card, isl_tokens)


async def fetch_loads(
    http: aiohttp.ClientSession, cards: Sequence[WorkerCard], isl_tokens: float | None
) -> tuple[WorkerLoad, ...]:
    """Return all loads, sorted by name; none if one is missing: a missing load must not look like an idle worker."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def fetch(card: WorkerCard) -> WorkerLoad | None:
        async with turn:
            try:
                return await fetch_load(http, card, isl_tokens)
            except MeshError as error:
                log.info("no load: %s", error)
                return None

    loads = await asyncio.gather(*(fetch(card) for card in sorted(cards, key=lambda card: card.name)))
    told = tuple(load for load in loads if load is not None)
    return told if len(told) == len(loads) else ()
