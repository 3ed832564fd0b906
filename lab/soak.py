"""Run `kvmesh lab soak`: everything at once for a long time, and a look at what each process holds meanwhile."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import uvloop
from msgspec import Meta
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvmesh.lab.faults.growth import GROWTH
from kvmesh.lab.faults.mesh import remove_folder
from kvmesh.lab.faults.soak import GrowthReport, Sampler, draw, soak, soak_schedule
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load

WIDTH = 120  # where there is no terminal
SHOWN = ("rss_mib", "fds", "threads", "tasks", "shm_files")


class LongSoakConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_SOAK_<NAME>`, that over the TOML file of `--config`, that over the default."""

    seconds: Annotated[float, Meta(ge=10, le=7 * 86400, description="how long requests are sent")] = 1800.0
    clients: Annotated[int, Meta(ge=1, le=256, description="requests at once")] = 8
    seed: Annotated[int, Meta(ge=1, description="of the requests")] = 1
    png: Annotated[str, Meta(description="file for a picture of memory over time; empty: none")] = ""


def main(argv: list[str]) -> int:
    """Return 0 if nothing grew and every answer was right, else 1."""
    config = load(
        LongSoakConfig,
        argv,
        os.environ,
        prefix="KVMESH_SOAK_",
        prog="kvmesh lab soak",
        description="Run a mesh of processes for a long time under streams, long prompts, cancels, slow readers, kills "
        "and restarts, and report whether memory, file descriptors, threads, tasks and shared memory stay flat.",
        section="soak",
    )
    console = Console(stderr=config.json, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the mesh is ended in either case
    report = run_soak(config, console)
    if config.json:
        print(msgspec.json.encode(report).decode(), flush=True)
    else:
        show(report, console)
    return 0 if report.ok else 1


def run_soak(config: LongSoakConfig, console: Console) -> GrowthReport:
    """Run it in a folder of its own, which stays if something was found."""
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-soak-"))
    started_s = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:6.0f} s[/dim]  {escape(line)}", soft_wrap=True)

    sampler = Sampler()
    is_clean = False
    try:
        schedule = soak_schedule(config.seed, config.seconds, config.clients)
        report: GrowthReport = uvloop.run(soak(schedule, folder, tell, sampler))
        if config.png and (why := draw(sampler.samples, Path(config.png))):
            tell(why)
        is_clean = report.ok
        return report
    finally:
        if is_clean:
            remove_folder(folder)
        else:
            tell(f"the logs of this run stay in {folder}")


def show(report: GrowthReport, console: Console) -> None:
    title = f"{report.seconds:g} s, {report.requests} requests, {sum(report.faults.values())} kills and restarts"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("process", no_wrap=True)
    table.add_column("life, s", justify="right", no_wrap=True)
    for what in SHOWN:
        table.add_column(f"{what}, per hour", justify="right")
    table.add_column("gc pause, ms", justify="right")
    for life in report.lives:
        cells = []
        for what in SHOWN:
            slope = life.slopes[what]
            text = f"{slope.first:g} -> {slope.last:g}, {slope.per_hour:+.3g}"
            cells.append(text if slope.is_flat else f"[red]{text}[/red]")
        table.add_row(life.name, f"{life.seconds:.0f}", *cells, f"{life.gc_pause_ms:g}")
    console.print(table)
    console.print("flat is: " + ", ".join(f"{what} +{most:g}" for what, most in GROWTH.items()), soft_wrap=True)
    for line in report.problems:
        console.print(f"not as it should be: {line}", markup=False, style="red")
    console.print("flat" if report.ok else f"{len(report.problems)} problems")
