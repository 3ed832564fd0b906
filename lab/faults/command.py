"""Run `kvmesh lab faults`: a mesh under a seeded schedule of faults, judged by an oracle that knows every token."""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvmesh.lab.faults.config import FaultsConfig
from kvmesh.lab.faults.drills import DRILLS
from kvmesh.lab.faults.mesh import remove_folder
from kvmesh.lab.faults.report import FaultsReport
from kvmesh.lab.faults.room import PrivateRoom
from kvmesh.lab.faults.run import FaultsRun
from kvmesh.lab.faults.schedule import MeshShape, PlannedFault, Schedule, TrafficMix, plan, read_schedule, written
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run as run_until_done
from kvmesh.mesh.lifecycle import unless_stopped

T = TypeVar("T")
AFTER_S = 4.0  # a shortened run goes on so long after its last fault


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_runs: int) -> list[T]:
    """Return a part of `items` for which `fails` holds, and of which no tried part fails.

    `fails(items)` must hold. Parts keep their order. At most `most_runs` calls are made.
    """
    left = list(items)
    runs, parts = 0, 2
    while len(left) >= 1:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            without = left[:start] + left[start + size :]
            if runs >= most_runs:
                return left
            runs += 1
            if fails(without):
                left, parts = without, max(parts - 1, 2)
                break
        else:
            if parts >= len(left):
                return left
            parts = min(2 * parts, len(left))
    return left


def shortened(schedule: Schedule) -> Schedule:
    """Return a schedule that ends a few seconds after its last fault."""
    last_s = max((fault.at_s + fault.for_s for fault in schedule.faults), default=0.0)
    return replace(schedule, seconds=round(min(schedule.seconds, last_s + AFTER_S), 2))


WIDTH = 120  # where there is no terminal


def main(argv: list[str]) -> int:
    """Return 0 if the run was clean, else 1."""
    config = load(
        FaultsConfig,
        argv,
        os.environ,
        prefix="KVMESH_FAULTS_",
        prog="kvmesh lab faults",
        description="Start a mesh of processes on this machine, send it mixed requests, and break it in all ways by a "
        "schedule that a seed makes. An oracle knows every right token.",
        section="faults",
    )
    console = Console(stderr=config.json, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    schedule = schedule_of(config)
    report = run_one(schedule, config, console)
    if config.json:
        print(msgspec.json.encode(report).decode(), flush=True)
    else:
        show(report, console)
    if config.shrink and not report.ok:
        shrink_run(schedule, report, config, console)
    return 0 if report.ok else 1


def schedule_of(config: FaultsConfig) -> Schedule:
    if config.schedule:
        return read_schedule(Path(config.schedule))
    if config.drill or (config.without and not (config.seed or config.only)):
        return DRILLS[config.drill or config.without]
    seed = config.seed or random.randrange(1, 1 << 31)
    has_tls = seed % 2 == 1 if not config.tls else config.tls == "on"
    mesh = MeshShape(torch=config.torch, tls=has_tls)
    return plan(seed, config.seconds, mesh=mesh, kinds=config.kinds(), traffic=TrafficMix(clients=config.clients))


def run_one(schedule: Schedule, config: FaultsConfig, console: Console) -> FaultsReport:
    """Run a schedule in a folder of its own, which stays if the run was not clean."""
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-faults-"))
    started_s = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {escape(line)}", soft_wrap=True)

    (folder / "schedule.json").write_bytes(written(schedule))
    tell(f"seed {schedule.seed}: {len(schedule.faults)} faults in {schedule.seconds:g} s")
    room = PrivateRoom(folder / "disk")
    is_clean = False
    try:
        run = FaultsRun(schedule, folder, tell, without=config.without, room=room)
        report = report_of(run)
        is_clean = report.ok
        return report
    finally:
        if is_clean and not config.keep_logs:
            room.close()
            remove_folder(folder)
        else:
            room.keep(folder / "kept")
            room.close()
            tell(f"the schedule and the logs of this run stay in {folder}")


def report_of(run: FaultsRun) -> FaultsReport:
    """Run the schedule on a new event loop. Raise SystemExit if it was interrupted, or has failed.

    The first signal ends the mesh in order, the second at once. The third ends this process, and its children with it.
    """
    reports: list[FaultsReport] = []

    async def until_reported(stop: asyncio.Event) -> int:
        if (report := await unless_stopped(run.run(), stop)) is not None:
            reports.append(report)
        return 0

    code = run_until_done(until_reported)
    if not reports:
        raise SystemExit(code or 128 + signal.SIGINT)
    return reports[0]


def shrink_run(schedule: Schedule, report: FaultsReport, config: FaultsConfig, console: Console) -> None:
    """Find the shortest schedule that fails as `report` does, and print it with the command that runs it."""
    kinds = {problem.partition(":")[0] for problem in report.problems}

    def fails(faults: Sequence[PlannedFault]) -> bool:
        part = shortened(msgspec.structs.replace(schedule, faults=tuple(faults)))
        console.print(f"trying {len(faults)} of {len(schedule.faults)} faults")
        again = run_one(part, config, console)
        return bool(kinds & {problem.partition(":")[0] for problem in again.problems})

    left = shrink(schedule.faults, fails, config.shrink_runs)
    shortest = shortened(msgspec.structs.replace(schedule, faults=tuple(left)))
    path = Path(tempfile.mkdtemp(prefix="kvmesh-faults-")) / "shortest.json"
    path.write_bytes(written(shortest))
    for fault in left:
        console.print(fault.in_words(), markup=False)
    without = f" --without {config.without}" if config.without else ""
    console.print(
        f"{len(left)} faults are enough; run them: kvmesh lab faults --schedule {path}{without}", markup=False
    )


def show(report: FaultsReport, console: Console) -> None:
    table = Table(title=f"seed {report.seed}: {report.requests} requests", title_justify="left", box=None)
    for column in ("fault", "times"):
        table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True)
    for kind, times in report.faults.items():
        table.add_row(kind, str(times))
    console.print(table)
    for kind, reason in report.skipped.items():
        console.print(f"skipped: {kind}: {reason}")
    names = (
        "hung", "empty_200", "wrong_tokens", "refused", "truncated", "leaked", "diverged", "crashed", "failed_checks",
    )  # fmt: skip
    console.print(", ".join(f"{name} {getattr(report, name)}" for name in names))
    console.print(
        f"{report.errors_reported} errors reported {dict(report.error_codes)}, {report.migrated} streams migrated; "
        f"{report.hit} requests hit, recovery p50 {report.p50_recovery_s} s, p99 {report.p99_recovery_s} s"
    )
    for line in report.slowest:
        console.print(f"slowest: {line}", markup=False)
    for line in report.problems:
        console.print(f"not as it should be: {line}", markup=False, style="red")
    console.print(
        "clean" if report.ok else f"{len(report.problems)} problems; repeat: kvmesh lab faults --seed {report.seed}"
    )
