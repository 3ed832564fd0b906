"""`kvmesh replay`: drive the real router core and real block pools through a trace, in simulated time.

The workers are prefill workers: each is a FIFO that computes the uncached tokens of one prompt at a time, at a fixed
rate. Its block pool decides what is cached, and tells the router by the same events as a live worker. TTFT is the time
from the arrival to the end of the prompt's computation; nothing else is modelled: no decode (one worker that is never
full takes all answers), no network, no step overhead.
"""

import heapq
import json
import math
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.trace import TraceRequest, expand, read_rows
from kvcache.pool import BlockPool
from mesh.config import load
from protocol.errors import MeshError
from protocol.hashing import sequence_hash_bytes, unpack_hashes
from protocol.ids import RequestId, SequenceHash, WorkerId
from protocol.messages import Placed, Role, RouteRequest, WorkerCard
from router.core import Outcome, RouterRules, RouterState, Saturation
from router.index import Holder
from router.load import Share
from router.selection import Policy

MODEL = "trace"
_FOREVER = float("inf")


class ReplayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_REPLAY_<NAME>`, that over the TOML file of `--config`, that over the default."""

    trace: Annotated[str, Meta(description="a trace in Mooncake's format: JSON lines")]
    workers: Annotated[int, Meta(ge=1, description="workers")] = 8
    blocks_per_worker: Annotated[int, Meta(ge=1, description="KV blocks of each worker")] = 6000
    block_size: Annotated[int, Meta(ge=1, description="tokens per block, as in the trace")] = 512
    prefill_rate: Annotated[float, Meta(gt=0, description="tokens/s that one worker computes")] = 8000.0
    policy: Annotated[Policy, Meta(description="how a worker is chosen")] = "kv"
    recompute_price: Annotated[
        float, Meta(ge=0, description="blocks in a queue that one to compute weighs as much as; 0: worked out")
    ] = 0.0
    saturation_tokens: Annotated[
        int, Meta(ge=0, description="a worker with so many tokens to compute gets no more; 0: all go at once")
    ] = 2048
    routers: Annotated[int, Meta(ge=1, description="routers that share the requests")] = 1
    gossip_lag_s: Annotated[float, Meta(ge=0, description="how old what a router knows of the others' load is")] = 0.005
    event_lag_s: Annotated[float, Meta(ge=0, description="from a cache's change until the routers know")] = 0.005
    jitter_s: Annotated[
        float, Meta(ge=0, description="spread each arrival over so long: traces have coarse clocks")
    ] = 0.0
    limit: Annotated[int, Meta(ge=0, description="requests of the trace; 0: all")] = 0
    seed: Annotated[int, Meta(ge=0, description="of what is random: policies that draw, the jitter")] = 1
    json: Annotated[bool, Meta(description="the last line is one JSON object")] = False


class ReplayReport(Struct, frozen=True, kw_only=True):
    requests: int
    failed: int
    hit_share: float  # of all prompt tokens, those found in the cache of the worker that computed the prompt
    predicted_hit_share: float  # the same as the router had believed when it placed
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_max_s: float
    queue_mean_s: float  # of the TTFT, spent waiting in the router
    balance: float  # most / mean computed tokens of a worker
    busy_share: float  # of the workers' time until the last request ended
    cpu_s: float  # of this replay


def main(argv: list[str]) -> int:
    config = load(
        ReplayConfig,
        argv,
        {},
        prefix="KVMESH_REPLAY_",
        prog="kvmesh replay",
        description="Drive the router through a request trace, with workers simulated as FIFOs.",
    )
    rows = read_rows(Path(config.trace), config.limit)
    console = Console(stderr=config.json)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"replaying {len(rows)} requests", total=len(rows))
        report = replay(expand(rows, config.block_size), config, lambda: progress.advance(task))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        console.print(as_table(config, report))
    return 0


def replay(requests: Iterator[TraceRequest], config: ReplayConfig, done: Callable[[], object] = bool) -> ReplayReport:
    started = time.process_time()
    simulation = Simulation(config, done)
    simulation.run(requests)
    return simulation.report(time.process_time() - started)


@dataclass(slots=True)
class _Request:
    route: RouteRequest
    tokens: bytes
    arrival_s: float
    router: int
    placed_s: float = 0.0
    cached_tokens: int = 0
    predicted_tokens: int = 0


@dataclass(slots=True)
class _Worker:
    """A FIFO in front of a block pool."""

    card: WorkerCard
    pool: BlockPool
    waiting: deque[_Request] = field(default_factory=deque)
    running: _Request | None = None
    held: list[int] = field(default_factory=list)
    computed_tokens: int = 0


class Simulation:
    """Discrete events: arrivals, ends of computation, and news that arrive with a lag."""

    def __init__(self, config: ReplayConfig, done: Callable[[], object]) -> None:
        self._config = config
        self._done = done
        limits = Saturation(queued_tokens=config.saturation_tokens) if config.saturation_tokens else None
        rules = RouterRules(policy=config.policy, saturation=limits, recompute_price=config.recompute_price, ramp_s=0)
        self._routers = [RouterState(rules, seed=config.seed + number) for number in range(config.routers)]
        self._workers = {worker.card.worker_id: worker for worker in map(self._worker, range(config.workers))}
        for router in self._routers:
            router.add_worker(self._card("decode", Role.DECODE, 1 << 40))
            for worker in self._workers.values():
                router.add_worker(worker.card)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = 0.0
        self._open: dict[RequestId, _Request] = {}
        self._ttfts_s: list[float] = []
        self._waits_s: list[float] = []
        self._isl_tokens = self._cached_tokens = self._predicted_tokens = self._failed = 0

    def run(self, requests: Iterator[TraceRequest]) -> None:
        """Requests that arrive at the same instant are in the queue together before any of them is placed."""
        arrivals = self._arrivals(requests)
        arrival = next(arrivals, None)
        while arrival is not None or self._agenda:
            self._now = min(
                arrival.arrival_s if arrival else _FOREVER, self._agenda[0][0] if self._agenda else _FOREVER
            )
            while self._agenda and self._agenda[0][0] <= self._now:
                heapq.heappop(self._agenda)[2]()
            while arrival is not None and arrival.arrival_s <= self._now:
                self._submit(arrival)
                arrival = next(arrivals, None)
            for number in range(len(self._routers)):
                self._dispatch(number)

    def report(self, cpu_s: float) -> ReplayReport:
        computed = [worker.computed_tokens for worker in self._workers.values()]
        ttfts = sorted(self._ttfts_s)
        return ReplayReport(
            requests=len(ttfts) + self._failed,
            failed=self._failed,
            hit_share=self._cached_tokens / max(1, self._isl_tokens),
            predicted_hit_share=self._predicted_tokens / max(1, self._isl_tokens),
            ttft_mean_s=statistics.fmean(ttfts) if ttfts else 0.0,
            ttft_p50_s=percentile(ttfts, 0.5),
            ttft_p99_s=percentile(ttfts, 0.99),
            ttft_max_s=ttfts[-1] if ttfts else 0.0,
            queue_mean_s=statistics.fmean(self._waits_s) if self._waits_s else 0.0,
            balance=max(computed) / max(1e-9, statistics.fmean(computed)),
            busy_share=sum(computed) / self._config.prefill_rate / max(1e-9, self._now) / len(computed),
            cpu_s=round(cpu_s, 3),
        )

    def _worker(self, number: int) -> _Worker:
        blocks = self._config.blocks_per_worker
        card = self._card(f"worker-{number:04d}", Role.PREFILL, blocks)
        return _Worker(card, BlockPool(blocks, self._config.block_size))

    def _card(self, name: str, role: Role, blocks: int) -> WorkerCard:
        return WorkerCard(
            worker_id=WorkerId(name),
            name=name,
            role=role,
            model=MODEL,
            model_path="",
            address="",
            block_size=self._config.block_size,
            total_blocks=blocks,
            context_tokens=1 << 30,
            max_num_seqs=1 << 40,
            kv_events="simulated",
            transfer="simulated",
        )

    def _arrivals(self, requests: Iterator[TraceRequest]) -> Iterator[_Request]:
        late = _jittered(requests, self._config) if self._config.jitter_s else requests
        for number, request in enumerate(late):
            hashes = sequence_hash_bytes(request.tokens, self._config.block_size)
            route = RouteRequest(
                request_id=RequestId(str(number)),
                model=MODEL,
                isl_tokens=request.isl_tokens,
                sequence_hashes=hashes,
                disaggregate=True,
            )
            yield _Request(route, request.tokens, request.arrival_s, number % len(self._routers))

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), action))

    # --- the router's side ---------------------------------------------------------------------------

    def _submit(self, request: _Request) -> None:
        router = self._routers[request.router]
        self._open[request.route.request_id] = request
        try:
            outcomes = router.submit(request.route, self._now)
        except MeshError:
            self._fail(request)
            return
        for outcome in outcomes:
            self._fail(self._open[outcome.request_id])

    def _dispatch(self, number: int) -> None:
        outcomes = self._routers[number].dispatch(self._now)
        for outcome in outcomes:
            self._place(outcome)
        if outcomes:
            self._gossip(number)

    def _place(self, outcome: Outcome) -> None:
        request = self._open[outcome.request_id]
        if not isinstance(outcome.result, Placed):
            self._fail(request)
            return
        target = outcome.result.prefill
        assert target is not None
        request.placed_s = self._now
        request.predicted_tokens = target.overlap_blocks * self._config.block_size
        worker = self._workers[target.worker_id]
        worker.waiting.append(request)
        self._begin(worker)

    def _fail(self, request: _Request) -> None:
        del self._open[request.route.request_id]
        self._failed += 1
        self._done()

    def _gossip(self, number: int) -> None:
        """What this router has placed by now, as the others will know it a little later."""
        if len(self._routers) == 1:
            return
        shares = self._routers[number].load.shares()
        self._at(self._now + self._config.gossip_lag_s, lambda: self._hear(number, shares))

    def _hear(self, number: int, shares: Mapping[Holder, Share]) -> None:
        for other, router in enumerate(self._routers):
            if other != number:
                router.set_elsewhere(str(number), shares)

    # --- the worker's side ---------------------------------------------------------------------------

    def _begin(self, worker: _Worker) -> None:
        if worker.running is not None or not worker.waiting:
            return
        request = worker.running = worker.waiting.popleft()
        hashes = _names(request.route.sequence_hashes)
        matched = worker.pool.match(hashes)
        room = min(len(hashes) - len(matched), worker.pool.available_blocks)
        worker.held = matched + worker.pool.allocate(room)
        request.cached_tokens = min(request.route.isl_tokens, len(matched) * self._config.block_size)
        uncached = request.route.isl_tokens - request.cached_tokens
        worker.computed_tokens += uncached
        self._at(self._now + uncached / self._config.prefill_rate, lambda: self._end(worker))

    def _end(self, worker: _Worker) -> None:
        request = worker.running
        assert request is not None
        worker.running = None
        self._cache(worker, request)
        self._ttfts_s.append(self._now - request.arrival_s)
        self._waits_s.append(request.placed_s - request.arrival_s)
        self._isl_tokens += request.route.isl_tokens
        self._cached_tokens += request.cached_tokens
        self._predicted_tokens += request.predicted_tokens
        router = self._routers[request.router]
        router.prefill_done(request.route.request_id, self._now)
        router.free(request.route.request_id, self._now)
        self._gossip(request.router)
        del self._open[request.route.request_id]
        self._done()
        self._begin(worker)

    def _cache(self, worker: _Worker, request: _Request) -> None:
        """The computed blocks are shared from now on, and the routers hear of what came and went."""
        stride = 4 * self._config.block_size
        previous: int | None = None
        for number, name in enumerate(_names(request.route.sequence_hashes)[: len(worker.held)]):
            block_id = worker.held[number]
            tokens = array("I", request.tokens[number * stride : (number + 1) * stride])
            previous = worker.held[number] = worker.pool.commit(block_id, name, previous, tokens)
        worker.pool.release(worker.held)
        worker.held = []
        events = worker.pool.take_events()
        worker_id = worker.card.worker_id

        def tell() -> None:
            for router in self._routers:
                router.on_kv_events(worker_id, 0, events)

        if events:
            self._at(self._now + self._config.event_lag_s, tell)


def _names(hashes: bytes) -> list[SequenceHash]:
    return [SequenceHash(name) for name in unpack_hashes(hashes)]


def _jittered(requests: Iterator[TraceRequest], config: ReplayConfig) -> Iterator[TraceRequest]:
    """Arrivals moved by up to `jitter_s`, in order again. Holds what lies within that time of each other."""
    rng = random.Random(config.seed)
    pending: list[tuple[float, int, TraceRequest]] = []
    for number, request in enumerate(requests):
        moved = request.arrival_s + rng.random() * config.jitter_s
        while pending and pending[0][0] <= request.arrival_s:
            yield heapq.heappop(pending)[2]
        heapq.heappush(pending, (moved, number, msgspec.structs.replace(request, arrival_s=moved)))
    while pending:
        yield heapq.heappop(pending)[2]


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.floor(len(ordered) * share))] if ordered else 0.0


def as_table(config: ReplayConfig, report: ReplayReport) -> Table:
    title = f"{report.requests} requests, {config.workers} workers x {config.blocks_per_worker} blocks, {config.policy}"
    table = Table("figure", "value", title=title)
    table.add_row("prompt tokens from cache", f"{report.hit_share:.1%} (predicted {report.predicted_hit_share:.1%})")
    table.add_row("TTFT mean", f"{report.ttft_mean_s:.3f} s, of it in the router's queue {report.queue_mean_s:.3f} s")
    table.add_row("TTFT p50, p99, max", f"{report.ttft_p50_s:.3f}, {report.ttft_p99_s:.3f}, {report.ttft_max_s:.3f} s")
    table.add_row("balance (most / mean tokens computed)", f"{report.balance:.3f}")
    table.add_row("workers busy", f"{report.busy_share:.1%}")
    table.add_row("failed", str(report.failed))
    table.add_row("CPU of this replay", f"{report.cpu_s:.1f} s")
    return table
