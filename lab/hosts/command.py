"""Run `kvmesh lab cluster-check`: a mesh on four hosts of this machine, under all faults, with one verdict."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from kvmesh.lab.hosts.check import check_hosts
from kvmesh.lab.hosts.lab import why_not
from kvmesh.lab.hosts.mesh import SERVERS
from kvmesh.lab.hosts.report import HEALED_S, REPLUGGED_S, RESET_S, SILENCE_S, HostsReport, judge
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError

WIDTH = 120  # where there is no terminal
LEGEND = """sent: requests; wrong: tokens; worst, usual: seconds that the fault cost a request (waits: nobody could
answer, then the seconds from healing to the answer); pulled: with KV over NIXL; healed: seconds of the first request
after it"""


class ClusterCheckConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_CLUSTER_CHECK_<NAME>`, that over the TOML file of `--config`, that over the default."""

    seed: Annotated[int, Meta(ge=0, description="of the order of prompts; 0: a new one, which is printed")] = 0


def main(argv: list[str]) -> int:
    """Return 0 if every promise was kept, else 1."""
    config = load(
        ClusterCheckConfig,
        argv,
        os.environ,
        prefix="KVMESH_CLUSTER_CHECK_",
        prog="kvmesh lab cluster-check",
        description="Build four hosts on this machine (network namespaces; needs root), run a mesh on them, break the "
        "network, etcd and NATS in every way, and measure what requests see of it.",
        section="cluster-check",
    )
    check_tools()
    console = Console(stderr=config.json, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    started_s = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:6.1f} s[/dim]  {line}", soft_wrap=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the hosts are removed in either case
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-hosts-"))
    try:
        measured = check_hosts(folder, config.seed or random.randrange(1, 1 << 31), tell)
    except BaseException:
        tell(f"it did not come to its end; the logs stay in {folder}")
        raise
    shutil.rmtree(folder)
    report = judge(measured)
    if config.json:
        print(msgspec.json.encode(report).decode(), flush=True)
    else:
        show(report, console)
    return 0 if report.ok else 1


def check_tools() -> None:
    """Raise ConfigError if this machine cannot play four hosts."""
    if problem := why_not():
        raise ConfigError(problem, hint="run it as root on a Linux machine, or in a privileged container")
    if missing := [server for server in SERVERS if shutil.which(server) is None]:
        raise ConfigError(f"missing: {', '.join(missing)}", hint="apt-get install etcd-server nats-server")


def show(report: HostsReport, console: Console) -> None:
    table = Table(title=f"{report.requests} requests on {report.hosts} hosts", title_justify="left", box=None)
    table.add_column("fault", no_wrap=True)
    for column in ("sent", "failed", "wrong", "worst", "usual", "pulled", "healed"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in report.faults:
        late = one.worst_extra_s is None
        table.add_row(
            one.fault,
            str(one.requests),
            str(one.failed),
            str(one.wrong_tokens),
            f"waits, {one.waited_s:.2f}" if late else f"+{one.worst_extra_s:.2f}",
            "" if late else f"+{one.usual_extra_s:.2f}",
            str(one.pulled),
            f"{one.heal_first_request_s:.2f}",
        )
    console.print(table)
    console.print(f"[dim]{LEGEND}[/dim]")
    console.print(
        f"resets cost {report.reset_recovery_s} s (limit {RESET_S}), silence {report.partition_recovery_s} s (limit "
        f"{SILENCE_S}), the first request after healing {report.heal_first_request_s} s (limit {HEALED_S}), "
        f"with a link up again {report.replug_first_request_s} s (limit {REPLUGGED_S})"
    )
    for skipped in report.skipped:
        console.print(f"skipped: {skipped}")
    for problem in report.problems:
        console.print(f"[red]not as it should be:[/red] {problem}")
    console.print("all promises were kept" if report.ok else f"{len(report.problems)} promises were not kept")
