"""Run `kvmesh lab bench many`: measure what a large number of workers costs the router.

That is the CPU time of a placement in the router's core, while all workers are settled, while one has just joined,
while some have, and while one has just failed.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.commands.bench.machine import cpu_name
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Role, RouteRequest, WorkerCard
from kvmesh.router.core import RouterState
from kvmesh.router.rules import RouterRules

MODEL = "tiny"
BLOCK = 16  # tokens
PROMPTS, PROMPT_BLOCKS = 64, 8
RUNNING = 2  # requests that run at each worker while others are placed
BATCH = 64  # placements that are timed together, then ended
BATCHES = 10  # of one round
AFTER_S = 0.1  # of the router's time: a worker joined or failed so long ago
BETWEEN_S = 1000.0  # of the router's time: what happened in a round is over in the next one
ROLLING = 50  # in a rolling restart, one worker in so many has just joined
GOAL_RATIO = 1.3


class ManyConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    workers: Annotated[int, Meta(ge=10, le=10_000, description="of the router")] = 1000
    rounds: Annotated[int, Meta(ge=1, description="of placements; the fastest counts")] = 9
    seed: Annotated[int, Meta(description="of the prompts")] = 1


class ManyReport(Struct, frozen=True, kw_only=True):
    """Hold the CPU time of a placement, and its ratios."""

    workers: int
    place_us: float
    place_us_joining: float
    place_us_rolling: float  # while one worker in ROLLING joins
    place_us_dying: float
    joining_ratio: float  # to place_us
    rolling_ratio: float
    dying_ratio: float
    seed: int
    machine: str


def main(argv: list[str]) -> int:
    config = load_config(
        ManyConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench many",
        description="Measure the CPU time of a placement among many workers: all of them settled, one or some that "
        "have just joined, one that has just failed.",
        section="bench",
    )
    report = report_of(config, place_times(config.workers, config.rounds, config.seed))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0


# --- placing ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PlaceTimes:
    """Hold the CPU microseconds of one placement, of the fastest round so far."""

    settled: float = float("inf")
    joining: float = float("inf")
    rolling: float = float("inf")
    dying: float = float("inf")


def place_times(workers: int, rounds: int, seed: int) -> PlaceTimes:
    state, prompts = busy_router(workers), make_prompts(Random(seed))
    times, now = PlaceTimes(), BETWEEN_S
    for number in range(rounds):
        times.settled = min(times.settled, place_us(state, prompts, now))
        now += BETWEEN_S
        with newcomers(state, [f"newcomer-{number}"], now):
            times.joining = min(times.joining, place_us(state, prompts, now + AFTER_S))
        now += BETWEEN_S
        with newcomers(state, [f"newcomer-{number}-{n}" for n in range(max(2, workers // ROLLING))], now):
            times.rolling = min(times.rolling, place_us(state, prompts, now + AFTER_S))
        now += BETWEEN_S
        with one_avoided(state, now):
            times.dying = min(times.dying, place_us(state, prompts, now + AFTER_S))
        now += BETWEEN_S
    return times


def make_prompts(draw: Random) -> list[bytes]:
    """Return the sequence hashes of some prompts. Each is placed again and again, so some worker has its blocks."""
    return [draw.randbytes(8 * PROMPT_BLOCKS) for _ in range(PROMPTS)]


def busy_router(workers: int) -> RouterState:
    """Return a router whose workers all run requests, and joined long ago."""
    state = RouterState(RouterRules(lease_s=float("inf")))
    for number in range(workers):
        state.add_worker(mock_card(f"worker-{number}"), 0.0)
    for number in range(RUNNING * workers):
        request = route_request(f"running-{number}", b"")
        state.place(request, BETWEEN_S / 2)
        state.prefill_done(request.request_id, BETWEEN_S / 2)
    return state


def place_us(state: RouterState, prompts: list[bytes], now: float) -> float:
    """Return the mean CPU time of a placement, over batches of them."""
    total_ns = 0
    for _ in range(BATCHES):
        requests = [route_request(f"timed-{number}", prompts[number % PROMPTS]) for number in range(BATCH)]
        started_ns = time.process_time_ns()
        placed = [state.try_place(request, now) for request in requests]
        total_ns += time.process_time_ns() - started_ns
        if None in placed:
            raise EngineError("the router found no room for a request of the benchmark")
        for request in requests:
            state.prefill_done(request.request_id, now)
            state.free(request.request_id, now)
    return total_ns / (BATCHES * BATCH) / 1000


@contextmanager
def newcomers(state: RouterState, names: Sequence[str], now: float) -> Iterator[None]:
    """Let workers join and take the one request that each may have at first; at the end they leave."""
    requests = [route_request(f"first-of-{name}", b"") for name in names]
    for name in names:
        state.add_worker(mock_card(name), now)
    placed = {state.place(request, now).decode.worker_id for request in requests}
    if placed != set(names):
        raise EngineError(f"the first requests after {len(names)} workers joined went to {sorted(placed)}")
    yield
    if len(state.fleet.warm_up) != len(names):
        raise EngineError(f"of {len(names)} that joined some were settled before the end of the round")
    for name, request in zip(names, requests, strict=True):
        state.free(request.request_id, now)
        state.remove_worker(WorkerId(name), now)


@contextmanager
def one_avoided(state: RouterState, now: float) -> Iterator[None]:
    """Let a worker have failed a request; at the end it is trusted again."""
    state.fleet.avoid([WorkerId("worker-1")], now)
    yield
    if not state.fleet.avoided_until:
        raise EngineError("the worker that failed was trusted before the end of its round")
    state.fleet.forgive(now + BETWEEN_S / 2)


def route_request(name: str, hashes: bytes) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId(name), model=MODEL, isl_tokens=BLOCK * PROMPT_BLOCKS, sequence_hashes=hashes
    )


def mock_card(name: str) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name),
        name=name,
        role=Role.AGGREGATED,
        model=MODEL,
        model_path="",
        address="",
        block_size=BLOCK,
        total_blocks=16_384,
        max_num_seqs=256,
        context_tokens=1 << 20,
    )


# --- what it gave -----------------------------------------------------------------------------------------


def report_of(config: ManyConfig, placing: PlaceTimes) -> ManyReport:
    return ManyReport(
        workers=config.workers,
        place_us=round(placing.settled, 1),
        place_us_joining=round(placing.joining, 1),
        place_us_rolling=round(placing.rolling, 1),
        place_us_dying=round(placing.dying, 1),
        joining_ratio=round(placing.joining / placing.settled, 2),
        rolling_ratio=round(placing.rolling / placing.settled, 2),
        dying_ratio=round(placing.dying / placing.settled, 2),
        seed=config.seed,
        machine=f"{os.cpu_count()} x {cpu_name()}",
    )


def table_of(report: ManyReport) -> Table:
    table = Table(title=f"{report.workers} workers on {report.machine}, seed {report.seed}", title_justify="left")
    for column in ("CPU of one placement", "µs", "to settled", "goal"):
        table.add_column(column)
    table.add_row("all workers are settled", f"{report.place_us:g}", "", "")
    for text, place, ratio in (
        ("one has just joined", report.place_us_joining, report.joining_ratio),
        (f"one in {ROLLING} has just joined", report.place_us_rolling, report.rolling_ratio),
        ("one has just failed", report.place_us_dying, report.dying_ratio),
    ):
        table.add_row(text, f"{place:g}", f"{ratio:g}", f"<= {GOAL_RATIO:g}")
    return table
