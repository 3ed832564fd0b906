"""Run `kvmesh lab overload`: what a mesh answers in time at once, three and ten times what it can do."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Literal, Protocol

import msgspec
import psutil
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, UpConfig
from kvmesh.cluster.processes import discovery_of
from kvmesh.cluster.running import Cluster, running_cluster
from kvmesh.lab.bench.load import cpu_s, rss_mib
from kvmesh.lab.overload.client import ClosedLoop, LoadAnswer, LoadResult, send
from kvmesh.lab.overload.report import (
    MeasuredCapacity,
    NormalAnswers,
    PhaseReport,
    capacity_of,
    normal_of,
    phase_numbers,
    quantile,
)
from kvmesh.lab.overload.shapes import PlannedRequest, Segment, ShapeName, planned, samples
from kvmesh.lab.overload.simulated import SimulatedMesh
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.mesh.supervisor import ProcessSpec
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import FrontendCard, decode
from kvmesh.simulator.config import SimConfig
from kvmesh.workers.config import WorkerConfig

CALM = 0.5  # of the capacity: the load before and after
CALM_S = 6.0
CALM_REQUESTS = 40  # are sent after each load at least
HOP_S = 0.001
WARM_UP_S = 3.0
SAMPLES = 1000  # requests of the closed loop, in turn
MODEL = "tiny"


class OverloadConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_OVERLOAD_<NAME>`, that over the TOML file of `--config`, that over the default."""

    seed: Annotated[int, Meta(description="of arrivals, prompts and lengths")] = 1
    load: Annotated[str, Meta(description="loads, in times of the measured capacity, with commas")] = "1,3,10"
    shape: Annotated[ShapeName, Meta(description="kind of the requests; see docs/overload.md")] = "mix"
    seconds: Annotated[float, Meta(ge=5, le=600, description="of each load")] = 30.0
    capacity_s: Annotated[float, Meta(ge=5, le=600, description="of the closed loop that finds the capacity")] = 30.0
    workers: Annotated[int, Meta(ge=1, le=64, description="mock workers: aggregated, or to decode")] = 2
    prefill: Annotated[int, Meta(ge=0, le=64, description="mock workers that only prefill; 0: aggregated ones")] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024, description="sequences that one runs at once")] = 16
    mock_speedup: Annotated[float, Meta(gt=0, description="of the mock workers' timing")] = 0.5
    frontends: Annotated[int, Meta(ge=1, le=8, description="frontends, each with a router inside")] = 1
    router: Annotated[Literal["embedded", "remote"], Meta(description="remote: a router process of its own")] = (
        "embedded"
    )
    admission: Annotated[bool, Meta(description="no: without refusals by estimates, to compare")] = True
    simulate: Annotated[
        bool, Meta(description="in simulated time: live routers and schedulers without processes, always alike")
    ] = False


class OverloadReport(Struct, frozen=True, kw_only=True):
    seed: int
    shape: str
    capacity_requests_per_s: float
    capacity_tokens_per_s: float
    ttft_before_p50_s: float
    goodput_1x: float | None
    goodput_3x: float | None
    goodput_10x: float | None
    refused_p99_ms: float  # the largest of all loads
    rss_growth_mib: float  # the largest of all loads
    normal_again_s: float  # the largest of all loads; CALM_S: not within that time
    sender_cpu_share: float
    machine_cpu_share: float
    phases: list[PhaseReport]


def main(argv: list[str]) -> int:
    config = load_config(
        OverloadConfig,
        argv,
        os.environ,
        prefix="KVMESH_OVERLOAD_",
        prog="kvmesh lab overload",
        description="Start a mesh of mock workers that take the time of real ones, find out what it can do, ask it for "
        "more than that, and report what it answered in time.",
        section="overload",
    )
    loads = loads_of(config.load)
    console = Console(stderr=config.json, highlight=False)
    report = asyncio.run(measure(config, loads, console))
    show(report, console)
    if config.json:
        print(msgspec.json.encode(report).decode())
    return 0


def loads_of(text: str) -> list[float]:
    """Raises ConfigError."""
    with suppress(ValueError):
        loads = [float(part) for part in text.split(",")]
        if all(0.1 <= load <= 100 for load in loads):
            return loads
    raise ConfigError(f"--load is {text!r}", hint="write numbers from 0.1 to 100, with commas: 1,3,10")


async def measure(config: OverloadConfig, loads: list[float], console: Console) -> OverloadReport:
    if config.simulate:
        return await _Bench(config, SimulatedLoadedMesh(simulated_of(config)), console).run(loads)
    async with running_cluster(cluster_of(config), lambda text: None) as cluster:
        await cluster.until_ready(lambda text: None)
        target = LiveLoadedMesh(cluster, await urls_of(cluster, config.frontends))
        return await _Bench(config, target, console).run(loads)


def simulated_of(config: OverloadConfig) -> SimConfig:
    """Return the same mesh for the simulator, with the defaults of workers."""
    worker = WorkerConfig(model_path="")
    return SimConfig(
        mode="disaggregated" if config.prefill else "aggregated",
        workers=config.workers + config.prefill,
        prefill_workers=config.prefill,
        blocks=worker.num_blocks,
        block_size=worker.block_size,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=worker.max_step_tokens,
        speedup=config.mock_speedup,
        kv_bandwidth_gbps=worker.mock_kv_bandwidth_gbps,
        load_report_interval_s=worker.load_report_interval_s,
        admission=config.admission,
        routers=1 if config.router == "remote" else config.frontends,
        hop_s=HOP_S,
    )


def cluster_of(config: OverloadConfig) -> ClusterConfig:
    decode, aggregated = (config.workers, 0) if config.prefill else (0, config.workers)
    up = UpConfig(
        port=0, prefill=config.prefill, decode=decode, aggregated=aggregated, engine="mock", router=config.router
    )
    worker = {"mock_speedup": config.mock_speedup, "max_num_seqs": config.max_num_seqs, "kv_transfer": "shm"}
    return ClusterConfig(up, worker=worker, router={"admission": config.admission})


async def urls_of(cluster: Cluster, count: int) -> list[str]:
    """Start the further frontends, and return the URLs of all once they know the workers."""
    place = discovery_of(cluster.run_dir)
    for number in range(1, count):
        flags = ["-m", "kvmesh.frontend", "--name", f"frontend-{number}", "--port", "0", "--discovery", place]
        cluster.supervisor.start(ProcessSpec(f"frontend-{number}", flags))
    urls = dict[str, str]()
    discovery = open_discovery(place)
    try:
        async for change in discovery.watch("frontends/"):
            if isinstance(change, Put):
                urls[change.key] = decode(change.value, FrontendCard).url
            if len(urls) == count:
                break
    finally:
        await discovery.close()
    await asyncio.sleep(1.0 if count > 1 else 0.0)
    return sorted(urls.values())


class Loaded(Struct, frozen=True, kw_only=True):
    """The answers of one load, and what the processes needed for it."""

    answers: list[LoadAnswer]
    sender_cpu_share: float = 0.0
    frontend_cpu_share: float = 0.0
    machine_cpu_share: float = 0.0
    rss_growth_mib: float = 0.0


class LoadedMesh(Protocol):
    """The mesh that is asked."""

    async def send(self, requests: Sequence[PlannedRequest], loop: ClosedLoop | None = None) -> list[LoadAnswer]: ...

    async def load(self, requests: Sequence[PlannedRequest], seconds: float) -> Loaded: ...


class SimulatedLoadedMesh:
    def __init__(self, config: SimConfig) -> None:
        self._mesh = SimulatedMesh(config)

    async def send(self, requests: Sequence[PlannedRequest], loop: ClosedLoop | None = None) -> list[LoadAnswer]:
        return self._mesh.send(requests, loop)

    async def load(self, requests: Sequence[PlannedRequest], seconds: float) -> Loaded:
        return Loaded(answers=self._mesh.send(requests))


class LiveLoadedMesh:
    def __init__(self, cluster: Cluster, urls: list[str]) -> None:
        self._urls = urls
        names = ["frontend", "router", *[f"frontend-{i}" for i in range(1, 8)]]
        pids = [pid for name in names if (pid := cluster.supervisor.pid(name)) is not None]
        self._processes = [psutil.Process(pid) for pid in pids]

    async def send(self, requests: Sequence[PlannedRequest], loop: ClosedLoop | None = None) -> list[LoadAnswer]:
        return (await asyncio.to_thread(send, self._urls, requests, MODEL, loop)).answers

    async def load(self, requests: Sequence[PlannedRequest], seconds: float) -> Loaded:
        await asyncio.sleep(1.0)
        rss_mib_before, cpu_before = rss_mib(self._processes), cpu_s(self._processes)
        psutil.cpu_percent()
        sending = asyncio.create_task(asyncio.to_thread(send, self._urls, requests, MODEL))
        watch = await _watch(sending, seconds, lambda: rss_mib(self._processes), lambda: cpu_s(self._processes))
        result = await sending
        return Loaded(
            answers=result.answers,
            sender_cpu_share=round(result.cpu_share, 2),
            frontend_cpu_share=round((watch.cpu_s - cpu_before) / seconds, 2),
            machine_cpu_share=round(watch.machine, 2),
            rss_growth_mib=round(max(0.0, watch.rss_mib - rss_mib_before), 1),
        )


class _Bench:
    """Runs the parts of a measurement one after the other."""

    def __init__(self, config: OverloadConfig, target: LoadedMesh, console: Console) -> None:
        self._config = config
        self._target = target
        self._console = console
        self._number = 0

    async def run(self, loads: list[float]) -> OverloadReport:
        config = self._config
        capacity = await self._find_capacity()
        calm = Segment(CALM * capacity.requests_per_s, max(CALM_S, CALM_REQUESTS / (CALM * capacity.requests_per_s)))
        before = await self._target.send(self._planned([Segment(calm.rate, 2 * calm.seconds)]))
        normal = normal_of(before)
        phases = [await self._overload(load, capacity, calm, normal) for load in loads]
        goodput = {phase.load: phase.goodput for phase in phases}
        return OverloadReport(
            seed=config.seed,
            shape=config.shape,
            capacity_requests_per_s=round(capacity.requests_per_s, 2),
            capacity_tokens_per_s=round(capacity.tokens_per_s, 1),
            ttft_before_p50_s=round(quantile([a.first_s for a in before], 0.5), 3),
            goodput_1x=goodput.get(1.0),
            goodput_3x=goodput.get(3.0),
            goodput_10x=goodput.get(10.0),
            refused_p99_ms=max(phase.refused_p99_ms for phase in phases),
            rss_growth_mib=max(phase.rss_growth_mib for phase in phases),
            normal_again_s=max(phase.normal_again_s for phase in phases),
            sender_cpu_share=max(phase.sender_cpu_share for phase in phases),
            machine_cpu_share=max(phase.machine_cpu_share for phase in phases),
            phases=phases,
        )

    async def _find_capacity(self) -> MeasuredCapacity:
        """Keep all seats taken, with as many waiting: what ends per second is what the mesh can do."""
        config = self._config
        seats = config.workers * config.max_num_seqs
        requests = samples(config.shape, SAMPLES, config.seed)
        loop = ClosedLoop(seats + seats // 2, WARM_UP_S + config.capacity_s)
        found = capacity_of(await self._target.send(requests, loop), WARM_UP_S, loop.seconds)
        self._console.print(f"capacity: {found.requests_per_s:.1f} requests/s, {found.tokens_per_s:.0f} tokens/s")
        return found

    def _planned(self, segments: list[Segment]) -> list[PlannedRequest]:
        self._number += 1
        return planned(self._config.shape, segments, self._config.seed + 1000 * self._number)

    async def _overload(
        self, load: float, capacity: MeasuredCapacity, calm: Segment, normal: NormalAnswers
    ) -> PhaseReport:
        seconds = self._config.seconds
        loaded = await self._target.load(
            self._planned([Segment(load * capacity.requests_per_s, seconds), calm]), seconds
        )
        numbers = phase_numbers(loaded.answers, load, seconds, capacity, normal)
        needed = msgspec.structs.asdict(loaded)
        del needed["answers"]
        report = msgspec.convert(numbers | needed, PhaseReport)
        self._console.print(
            f"{load:g}x: goodput {report.goodput:.2f}, {report.in_time} in time, {report.late} late, "
            f"{report.refused} refused"
        )
        return report


class _Watched(Struct):
    rss_mib: float
    cpu_s: float
    machine: float


async def _watch(
    sending: "asyncio.Task[LoadResult]", seconds: float, rss: Callable[[], float], cpu: Callable[[], float]
) -> _Watched:
    """Look at the processes while a load is sent."""
    most, loop = rss(), asyncio.get_running_loop()
    until_s = loop.time() + seconds + 1.0  # the sender needs a second to start
    while loop.time() < until_s and not sending.done():
        await asyncio.sleep(0.5)
        most = max(most, rss())
    return _Watched(most, cpu(), psutil.cpu_percent() / 100)


def show(report: OverloadReport, console: Console) -> None:
    table = Table(title=f"{report.shape}, seed {report.seed}", title_justify="left")
    for name in ("load", "goodput", "in time", "late", "refused", "failed", "refused p99", "TTFT p50, p99", "normal"):
        table.add_column(name, justify="right")
    for phase in report.phases:
        table.add_row(
            f"{phase.load:g}x",
            f"{phase.goodput:.2f}",
            str(phase.in_time),
            str(phase.late),
            str(phase.refused),
            str(phase.failed),
            f"{phase.refused_p99_ms:.0f} ms",
            f"{phase.ttft_p50_s:.2f}, {phase.ttft_p99_s:.2f} s",
            f"{phase.normal_again_s:.1f} s",
        )
    console.print(table)
    console.print(
        f"memory +{report.rss_growth_mib:.1f} MiB; the sender took {report.sender_cpu_share:.0%} of a core, "
        f"the machine was {report.machine_cpu_share:.0%} busy"
    )
