"""Run everything for a long time on the fault machine's mesh, and watch what each process holds meanwhile."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

from kvmesh.lab.faults.growth import MOST_GC_PAUSE_MS, ProcessLife, SizeSample, life_of
from kvmesh.lab.faults.kinds import DECODE, FRONTEND, PREFILL, ROUTER
from kvmesh.lab.faults.mesh import FaultsMesh
from kvmesh.lab.faults.report import FaultsReport
from kvmesh.lab.faults.run import FaultsRun
from kvmesh.lab.faults.schedule import MeshShape, PlannedFault, Schedule, TrafficMix

SAMPLE_S = 2.0
FAULT_EVERY_S = 20.0
FIRST_FAULT_S = 10.0
LAST_FAULT_S = 10.0  # before the end
# The last process of each role is killed or restarted again and again, and joins anew. The others live all the time.
VICTIMS = ((DECODE, "kill"), (PREFILL, "restart"), (ROUTER, "kill"), (DECODE, "restart"), (FRONTEND, "restart"),
           (PREFILL, "kill"))  # fmt: skip
SHM = "/dev/shm/"


class GrowthReport(Struct, frozen=True, kw_only=True):
    """The outcome of a soak. `growing` names a process and what it holds more and more of."""

    ok: bool
    seconds: float
    requests: int
    errors_reported: int
    faults: dict[str, int]
    lives: list[ProcessLife]  # of processes that lived long enough to say something
    growing: list[str]
    problems: list[str]  # growth, and all that the oracle found wrong


def soak_schedule(seed: int, seconds: float, clients: int) -> Schedule:
    """Return a schedule of kills and restarts that leaves most processes alone."""
    mesh = MeshShape(frontends=2, routers=2, prefill=2, decode=3, etcd=False, nats=False)
    faults = []
    turns = itertools.cycle(VICTIMS)
    at_s = FIRST_FAULT_S
    while at_s < seconds - LAST_FAULT_S:
        role, kind = next(turns)
        faults.append(PlannedFault(at_s=at_s, kind=kind, role=role, index=mesh.count(role) - 1))
        at_s += FAULT_EVERY_S
    return Schedule(
        seed=seed, seconds=seconds, faults=tuple(faults), mesh=mesh, traffic=TrafficMix(clients=clients), quiet_s=45.0
    )


class Sampler:
    """Reads again and again what each process of the mesh holds."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[SizeSample]] = {}  # by name and process id

    async def watch(self, mesh: FaultsMesh, clock: Callable[[], float]) -> None:
        """Take samples until this is cancelled."""
        while True:
            pids = dict(mesh.pids())
            taken = await asyncio.to_thread(read_all, pids)
            for name, sizes in taken.items():
                if sizes is None or mesh.supervisor.pid(name) != pids[name]:
                    continue
                rss_mib, fds, threads, shm_files, shm_mib = sizes
                inside = mesh.switches[name]
                sample = SizeSample(
                    clock(), rss_mib, fds, threads, inside.tasks, shm_files, shm_mib, inside.gc_pause_ms
                )
                self.samples.setdefault((name, pids[name]), []).append(sample)
            await asyncio.sleep(SAMPLE_S)

    def lives(self) -> list[ProcessLife]:
        return [life_of(name, pid, samples) for (name, pid), samples in self.samples.items()]


Sizes = tuple[float, int, int, int, float]


def read_all(pids: Mapping[str, int]) -> dict[str, Sizes | None]:
    return {name: read_sizes(pid) for name, pid in pids.items()}


def read_sizes(pid: int) -> Sizes | None:
    """Return memory in MiB, file descriptors, threads, and what is mapped of /dev/shm; None: the process has ended."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        with process.oneshot():
            files, size_bytes = mapped_shm(pid)
            rss_mib = process.memory_info().rss / 2**20
            return rss_mib, process.num_fds(), process.num_threads(), files, size_bytes / 2**20
    return None


def mapped_shm(pid: int) -> tuple[int, int]:
    """Return how many files of /dev/shm a process maps, and their bytes."""
    paths = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if (at := line.find(SHM)) >= 0:
            paths.add(line[at:].removesuffix(" (deleted)"))
    sizes = []
    for path in paths:
        with suppress(OSError):
            sizes.append(os.stat(path).st_size)
    return len(paths), sum(sizes)


async def soak(schedule: Schedule, folder: Path, tell: Callable[[str], None], sampler: Sampler) -> GrowthReport:
    """Run it. Raises MeshError if the mesh cannot run."""
    run = FaultsRun(schedule, folder, tell, watch=sampler.watch)
    return soak_report(await run.run(), sampler.lives())


def soak_report(found: FaultsReport, lives: Sequence[ProcessLife]) -> GrowthReport:
    growing = [
        f"{life.name} (pid {life.pid}, {life.seconds:.0f} s): {what} grew by {life.slopes[what].growth:g} "
        f"from {life.slopes[what].first:g}"
        for life in lives
        for what in life.growing
    ]
    pauses = [
        f"{life.name} (pid {life.pid}): its garbage collector held a thread for {life.gc_pause_ms:g} ms of CPU time"
        for life in lives
        if life.gc_pause_ms > MOST_GC_PAUSE_MS
    ]
    # How fast faults are recovered from is asked by `kvmesh lab faults`; a soak asks what is left of them.
    problems = [*growing, *pauses, *(line for line in found.problems if not line.startswith("slow:"))]
    return GrowthReport(
        ok=not problems,
        seconds=found.seconds,
        requests=found.requests,
        errors_reported=found.errors_reported,
        faults=dict(found.faults),
        lives=[life for life in lives if life.slopes],
        growing=growing,
        problems=problems,
    )


def draw(samples: Mapping[tuple[str, int], Sequence[SizeSample]], path: Path) -> str:
    """Draw memory over time as a PNG. Return why it could not be drawn, or ""."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "the picture needs matplotlib: pip install 'kvmesh[plots]'"
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = sorted({name for name, _ in samples})
    for (name, _), taken in samples.items():
        label = name if next(key for key in samples if key[0] == name) == (name, _) else None
        times, sizes = [sample.at_s for sample in taken], [sample.rss_mib for sample in taken]
        axes.plot(times, sizes, color=f"C{names.index(name)}", linewidth=1, label=label)
    axes.set(xlabel="seconds", ylabel="RSS, MiB", title="Memory of each process; a gap is a restart", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=120, metadata={"Software": "kvmesh"})
    return ""
