"""Run `kvmesh lab bench many`: measure what a large number of workers costs the router and the frontend.

First the router's core in this process: the CPU time of a placement while all workers are settled, while one has just
joined, while some have, and while one has just failed. Then a mesh: a frontend and mock workers, many in a process,
that are idle. The mesh runs once with file discovery and, where an etcd is installed, once with etcd.
"""

import asyncio
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.apart import apart
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.lab.bench.load import ClientLoad, cpu_s, rss_mib, trees, used_cpu
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.mesh.http.files import make_room_for_files
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import FrontendCard, Role, RouteRequest, WorkerCard, decode
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
SETTLE_S = 5.0  # from the last worker's joining to the first idle second
START_S = 60.0  # for all workers to be ready, and on top of it START_WORKER_S for each
START_WORKER_S = 0.6
POLL_S = 0.1
SCRAPES = 7
FILES_PER_WORKER = 8
SPARE_FILES = 1024
GOAL_RATIO = 1.3


class ManyConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    workers: Annotated[int, Meta(ge=10, le=10_000, description="in the router's core, and in the mesh")] = 1000
    per_process: Annotated[int, Meta(ge=1, description="mock workers in one process")] = 250
    rounds: Annotated[int, Meta(ge=1, description="of placements; the fastest counts")] = 9
    # The router compares digests with each worker every 30 s: a shorter window may miss them all.
    window_s: Annotated[float, Meta(gt=0, description="time in which idle processes are measured")] = 30.0
    etcd: Annotated[bool, Meta(description="measure with etcd too, if it is installed")] = True
    seed: Annotated[int, Meta(description="of the prompts")] = 1


class DiscoveryCpu(Struct, frozen=True, kw_only=True):
    """Hold the CPU of a process that only follows discovery, as a share of a core; None: not measured."""

    file: float
    etcd: float | None


class IdleMesh(Struct, frozen=True, kw_only=True):
    """Hold the figures of a mesh without requests. CPU is a share of one core."""

    ready_s: float  # from the start of all processes until the frontend's /health counts all workers
    idle_cpu_frontend: float
    idle_cpu_workers: float  # of all of them
    idle_cpu_discovery: float  # of a process that only follows discovery
    rss_mib: float  # of the frontend
    scrape_ms: float  # the frontend's /metrics, median
    others_cores: float  # that other programs used meanwhile


class ManyReport(Struct, frozen=True, kw_only=True):
    """Hold all figures. Those of a mesh are with file discovery; `etcd` has them with etcd, None without one."""

    workers: int
    place_us: float  # CPU time of one placement
    place_us_joining: float
    place_us_rolling: float  # while one worker in ROLLING joins
    place_us_dying: float
    joining_ratio: float  # to place_us
    rolling_ratio: float
    dying_ratio: float
    ready_s: float
    idle_cpu_frontend: float
    idle_cpu_workers: float
    idle_cpu_discovery: DiscoveryCpu
    rss_mib: float
    scrape_ms: float
    etcd: IdleMesh | None
    seed: int
    others_cores: float
    machine: str


MESH_ROWS = {
    "ready_s": "from start until all are ready, s",
    "idle_cpu_frontend": "idle: CPU of the frontend, of one core",
    "idle_cpu_workers": "idle: CPU of all workers, of one core",
    "idle_cpu_discovery": "idle: CPU of following discovery alone, of one core",
    "rss_mib": "memory of the frontend, MiB",
    "scrape_ms": "reading /metrics of the frontend, ms",
    "others_cores": "cores busy with other programs",
}


def main(argv: list[str]) -> int:
    config = load_config(
        ManyConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench many",
        description="Measure what many workers cost: the time of a placement while one of them joins or dies, and CPU "
        "and memory of an idle mesh of mock workers, with file discovery and with etcd.",
        section="bench",
    )
    report, meshes = asyncio.run(measure(config, Console(stderr=True)))
    console = Console()
    console.print(placement_table_of(report))
    console.print(mesh_table_of(meshes))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0


async def measure(config: ManyConfig, console: Console) -> tuple[ManyReport, dict[str, IdleMesh]]:
    def tell(line: str) -> None:
        console.print(line, highlight=False)

    tell(f"placing among {config.workers} workers, seed {config.seed}")
    placing = place_times(config.workers, config.rounds, config.seed)
    make_room_for_files(FILES_PER_WORKER * config.workers + SPARE_FILES)  # the processes that are started inherit it
    meshes: dict[str, IdleMesh] = {}
    with tempfile.TemporaryDirectory(prefix="kvmesh-many-") as folder:
        tell("a mesh with file discovery")
        meshes["file"] = await idle_mesh(config, f"file:{folder}/discovery", Path(folder), tell)
    if config.etcd and shutil.which("etcd") is None:
        tell("etcd is not installed: its figures are null (apt-get install etcd-server)")
    elif config.etcd:
        with tempfile.TemporaryDirectory(prefix="kvmesh-many-") as folder:
            tell("a mesh with etcd")
            async with running_etcd(Path(folder)) as endpoint:
                meshes["etcd"] = await idle_mesh(config, f"etcd:{endpoint}/many", Path(folder), tell)
    return report_of(config, placing, meshes), meshes


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


# --- the mesh ---------------------------------------------------------------------------------------------


async def idle_mesh(config: ManyConfig, discovery: str, folder: Path, tell: Callable[[str], None]) -> IdleMesh:
    """Start a mesh, measure it while it is idle, and stop it."""
    supervisor = Supervisor(folder / "logs", tell)
    started = time.perf_counter()
    try:
        for spec in mesh_specs(config, discovery):
            supervisor.start(spec)
        async with asyncio.timeout(START_S + START_WORKER_S * config.workers):
            url = await frontend_url(discovery)
            async with aiohttp.ClientSession(base_url=url) as http:
                await until_seen(http, config.workers, supervisor)
                ready_s = time.perf_counter() - started
                tell(f"all {config.workers} are ready after {ready_s:.1f} s")
        return await measure_idle(config, discovery, url, supervisor.pids(), ready_s)
    except TimeoutError as error:
        raise EngineError(
            f"the frontend does not see {config.workers} workers", hint=supervisor.log_tail("frontend")
        ) from error
    finally:
        await supervisor.stop_all(timeout_s=10.0)
        await supervisor.kill_all()


def mesh_specs(config: ManyConfig, discovery: str) -> list[ProcessSpec]:
    """Return the frontend's process and those of the workers."""
    common = ["--discovery", discovery, "--log-level", "warning", "--drain-timeout-s", "0"]
    worker = ["-m", "kvmesh.workers", *common, "--engine", "mock", "--kv-transfer", "shm", "--role", "aggregated"]
    worker += ["--model", MODEL, "--model-path", str(CHECKPOINT_DIR), "--mock-speedup", "0"]
    specs = [ProcessSpec("frontend", ["-m", "kvmesh.frontend", *common, "--port", "0"])]
    for first in range(0, config.workers, config.per_process):
        count = min(config.per_process, config.workers - first)
        name = f"many-{first}"
        specs.append(ProcessSpec(name, [*worker, "--name", name, "--count", str(count)]))
    return specs


async def frontend_url(discovery_url: str) -> str:
    """Return the address of the frontend, once it has registered."""
    discovery = open_discovery(discovery_url)
    try:
        async for change in discovery.watch("frontends/"):
            if isinstance(change, Put):
                return decode(change.value, FrontendCard).url
    finally:
        await discovery.close()
    raise EngineError("the discovery watch ended before the frontend registered")


async def until_seen(http: aiohttp.ClientSession, workers: int, supervisor: Supervisor) -> None:
    while not supervisor.failed.is_set():
        async with http.get("/health") as reply:
            seen = (await reply.json()).get("workers", {}).get(MODEL, {})
        if sum(seen.values()) >= workers:
            return
        await asyncio.sleep(POLL_S)
    assert supervisor.failure is not None
    raise supervisor.failure


async def measure_idle(config: ManyConfig, discovery: str, url: str, pids: dict[str, int], ready_s: float) -> IdleMesh:
    """Measure for a window in which nothing is asked of the mesh, then its memory and a scrape."""
    await asyncio.sleep(SETTLE_S)
    load = ClientLoad(url, (), 0, 0, True, 0, pid=pids["frontend"])
    workers = trees([pid for name, pid in pids.items() if name != "frontend"])
    following = asyncio.create_task(apart(follow, FollowPlan(discovery, config.workers, config.window_s)))
    try:
        before, workers_before_s, began = used_cpu(load), cpu_s(workers), time.perf_counter()
        await asyncio.sleep(config.window_s)
        after, workers_after_s, took_s = used_cpu(load), cpu_s(workers), time.perf_counter() - began
    finally:
        follower_share = await following
    return IdleMesh(
        ready_s=round(ready_s, 2),
        idle_cpu_frontend=round((after.server_s - before.server_s) / took_s, 4),
        idle_cpu_workers=round((workers_after_s - workers_before_s) / took_s, 4),
        idle_cpu_discovery=round(follower_share, 4),
        rss_mib=round(rss_mib(trees([pids["frontend"]])), 1),
        scrape_ms=await scrape_ms(url),
        others_cores=round((after.others_s - before.others_s) / took_s, 2),
    )


async def scrape_ms(url: str) -> float:
    """Return the median time of reading the frontend's metrics."""
    times_ms: list[float] = []
    async with aiohttp.ClientSession(base_url=url) as http:
        for _ in range(SCRAPES):
            started = time.perf_counter()
            async with http.get("/metrics") as reply:
                await reply.read()
            times_ms.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(times_ms), 2)


@dataclass(frozen=True, slots=True)
class FollowPlan:
    discovery: str
    workers: int
    window_s: float


def follow(plan: FollowPlan) -> float:
    """Follow discovery in this process. Return its CPU, as a share of one core, once all workers are known."""
    return asyncio.run(_follow(plan))


async def _follow(plan: FollowPlan) -> float:
    discovery = open_discovery(plan.discovery)
    known: set[str] = set()
    all_known = asyncio.Event()

    async def watch() -> None:
        async for change in discovery.watch("workers/"):
            known.add(change.key)
            if len(known) >= plan.workers:
                all_known.set()

    watching = asyncio.create_task(watch(), name="follow discovery")
    try:
        async with asyncio.timeout(START_S):
            await all_known.wait()
        used_s, began = time.process_time(), time.perf_counter()
        await asyncio.sleep(plan.window_s)
        return (time.process_time() - used_s) / (time.perf_counter() - began)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await discovery.close()


@asynccontextmanager
async def running_etcd(folder: Path) -> AsyncIterator[str]:
    """Run an etcd on free ports, with its data in `folder`, and yield its endpoint."""
    endpoint, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    client = f"http://{endpoint}"
    flags = ["--data-dir", str(folder / "etcd"), "--logger", "zap", "--log-level", "error"]
    flags += ["--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with (folder / "etcd.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            "etcd", *flags, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield endpoint  # discovery itself waits until etcd answers
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# --- what it gave -----------------------------------------------------------------------------------------


def report_of(config: ManyConfig, placing: PlaceTimes, meshes: dict[str, IdleMesh]) -> ManyReport:
    by_file, by_etcd = meshes["file"], meshes.get("etcd")
    return ManyReport(
        workers=config.workers,
        place_us=round(placing.settled, 1),
        place_us_joining=round(placing.joining, 1),
        place_us_rolling=round(placing.rolling, 1),
        place_us_dying=round(placing.dying, 1),
        joining_ratio=round(placing.joining / placing.settled, 2),
        rolling_ratio=round(placing.rolling / placing.settled, 2),
        dying_ratio=round(placing.dying / placing.settled, 2),
        ready_s=by_file.ready_s,
        idle_cpu_frontend=by_file.idle_cpu_frontend,
        idle_cpu_workers=by_file.idle_cpu_workers,
        idle_cpu_discovery=DiscoveryCpu(
            file=by_file.idle_cpu_discovery, etcd=None if by_etcd is None else by_etcd.idle_cpu_discovery
        ),
        rss_mib=by_file.rss_mib,
        scrape_ms=by_file.scrape_ms,
        etcd=by_etcd,
        seed=config.seed,
        others_cores=by_file.others_cores,
        machine=f"{os.cpu_count()} x {cpu_name()}",
    )


def placement_table_of(report: ManyReport) -> Table:
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


def mesh_table_of(meshes: dict[str, IdleMesh]) -> Table:
    table = Table(title="the mesh, without requests", title_justify="left")
    for column in ("", *(f"{backend} discovery" for backend in meshes)):
        table.add_column(column)
    for name, text in MESH_ROWS.items():
        table.add_row(text, *(f"{getattr(mesh, name):g}" for mesh in meshes.values()))
    return table
