"""Run `kvmesh lab bench pairs`: compare two settings of the frontend by its CPU time, in pairs.

Three meshes of mock workers are up at the same time, and asked in turn: one as it is (base), one with other settings of
the frontend (changed), and another one as it is (control). What the machine does meanwhile hits all three. The control
says how far two equal frontends are apart: a difference that is smaller than that is none.
"""

import asyncio
import gc
import json
import math
import os
import shlex
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import uvloop
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, load_cluster
from kvmesh.cluster.running import running_cluster
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.apart import apart
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.commands.bench.prompts import load_tokenizer, make_prompts
from kvmesh.lab.bench.frontend import (
    BURST,
    GROUPS,
    BenchServer,
    FrontendBenchConfig,
    FrontendCase,
    body_of,
    burst_mesh,
    check_named,
)
from kvmesh.lab.bench.load import ClientLoad, ClientSlot, answers_to, failure_of, request_bytes, used_cpu
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.protocol.errors import ConfigError, EngineError

BASE, CHANGED, CONTROL = "base", "changed", "control"
SHOWN_FAILURES = 3
WARMUP_REQUESTS = 1000  # of each side


class PairsConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_PAIRS_<NAME>`, that over the TOML file of `--config`, that over the default."""

    change: Annotated[
        str, Meta(description="settings of the changed mesh, as flags of kvmesh up: --change='--trace-share 1'")
    ] = ""
    base: Annotated[str, Meta(description="settings of all meshes, the same way")] = ""
    url: Annotated[str, Meta(description="of a server that is the changed side, http://host:port; with --pid")] = ""
    pid: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="of that server")] = None
    model: Annotated[str, Meta(description="folder of the tokenizer; default: the tiny model's")] = str(CHECKPOINT_DIR)
    case: Annotated[Literal["a64", "b64", "c16", "cp16"], Meta(description="as of kvmesh lab bench frontend")] = "a64"
    pairs: Annotated[int, Meta(ge=6, le=2000, description="of measurements; the median of their ratios counts")] = 60
    requests: Annotated[int, Meta(ge=4, description="in one measurement of one side")] = 400


class Ratio(Struct, frozen=True, kw_only=True):
    """CPU time of one side to that of the base, over all pairs."""

    median: float
    low: float  # the median of many more pairs lies between these two, at 95 %
    high: float
    quartiles: tuple[float, float]


class PairsReport(Struct, frozen=True, kw_only=True):
    """Hold the figures of a comparison."""

    case: str
    change: str
    pairs: int
    requests: int  # in a measurement
    base_cpu_ms: float  # per request, median
    changed_cpu_ms: float
    changed: Ratio
    control: Ratio
    errors: int
    machine: str
    others_cores: float  # that other programs used meanwhile


@dataclass(slots=True)
class MeasuredPairs:
    """CPU seconds of each side's server in each pair."""

    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    others_s: float = 0.0
    wall_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    config = load_config(
        PairsConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_PAIRS_",
        prog="kvmesh lab bench pairs",
        description="Compare two settings of the frontend by the CPU time of its process for a request. Both are up "
        "and asked in turn, beside a third that equals the first and shows what chance does. Mock workers answer at "
        "once.",
        section="bench_pairs",
    )
    check_named(config.url, config.pid)
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0 if report.errors == 0 else 1


# --- measuring --------------------------------------------------------------------------------------------


async def measure(config: PairsConfig, console: Console) -> PairsReport:
    async with AsyncExitStack() as meshes:
        sides: dict[str, BenchServer] = {}
        for side in (BASE, CHANGED, CONTROL):
            console.print(f"starting: {side}", highlight=False)
            if side == CHANGED and config.url:
                sides[side] = BenchServer(config.url.rstrip("/"), sides[BASE].model, config.pid or 0)
            else:
                flags = f"{config.base} {config.change}" if side == CHANGED else config.base
                sides[side] = await meshes.enter_async_context(server_with(flags, config))
        measured = await apart(run_pairs, sides, config)
    for failure in measured.failures[:SHOWN_FAILURES]:
        console.print(f"failed: {failure}", highlight=False)
    return report_of(measured, config)


@asynccontextmanager
async def server_with(flags: str, config: PairsConfig) -> AsyncIterator[BenchServer]:
    """Run a mesh of mock workers with these settings of its services."""
    plain = burst_mesh(FrontendBenchConfig(model=config.model))
    given = settings_in(flags)
    worker = {**plain.worker, **given.worker}
    mesh = ClusterConfig(plain.up, worker=worker, frontend=given.frontend, router=given.router)
    async with running_cluster(mesh, lambda line: None) as cluster:
        await cluster.until_ready(lambda line: None)
        pid = cluster.supervisor.pid("frontend")
        if pid is None:
            raise EngineError("the frontend has died", hint=f"see {cluster.run_dir}/logs")
        yield BenchServer(cluster.url, cluster.model, pid)


def settings_in(flags: str) -> ClusterConfig:
    """Return the settings that are written as flags of `kvmesh up`. Raise ConfigError."""
    try:
        return load_cluster(shlex.split(flags), {})
    except ValueError as error:
        raise ConfigError(
            f"the settings {flags!r} cannot be read: {error}", hint="quote them as for a shell"
        ) from error


def run_pairs(sides: dict[str, BenchServer], config: PairsConfig) -> MeasuredPairs:
    """Measure all pairs. It needs a process of its own, because it turns the garbage collector off."""
    gc.freeze()
    gc.disable()
    measured: MeasuredPairs = uvloop.run(drive_pairs(sides, config))
    return measured


async def drive_pairs(sides: dict[str, BenchServer], config: PairsConfig) -> MeasuredPairs:
    case = next(case for case in BURST if case.name == config.case)
    parent, measured = os.getppid(), MeasuredPairs(cpu_s={side: [] for side in sides})
    loads = {
        side: ClientLoad(
            url=f"{server.url}/v1/chat/completions", bodies=(), warmup=0, concurrency=case.concurrency,
            stream=case.stream, output_tokens=case.output_tokens, pid=server.pid, with_pids=(parent,),
        )
        for side, server in sides.items()
    }  # fmt: skip
    slots = {side: [ClientSlot(load) for _ in range(load.concurrency)] for side, load in loads.items()}
    tokenizer = load_tokenizer(config.model)
    for pair in range(-1, config.pairs):  # the first one warms up
        count = config.requests if pair >= 0 else max(case.concurrency, min(WARMUP_REQUESTS, config.requests))
        prompts = make_prompts(tokenizer, pair, count, case.prompt_tokens, case.shared_tokens, GROUPS)
        for side in in_turn(list(sides), pair):
            cpu_s = await ask(loads[side], slots[side], requests_of(case, sides[side], prompts), measured)
            if pair >= 0:
                measured.cpu_s[side].append(cpu_s)
    for of_side in slots.values():
        for slot in of_side:
            slot.close()
    return measured


def requests_of(case: FrontendCase, server: BenchServer, prompts: Sequence[str]) -> list[bytes]:
    url = f"{server.url}/v1/chat/completions"
    return [request_bytes(url, body_of(case, server.model, prompt)) for prompt in prompts]


async def ask(
    load: ClientLoad, slots: Sequence[ClientSlot], requests: Sequence[bytes], measured: MeasuredPairs
) -> float:
    """Send the requests of one measurement; return the CPU seconds that the server took."""
    loop = asyncio.get_running_loop()
    before, began = used_cpu(load), loop.time()
    answers = await answers_to(requests, slots, load.timeout_s)
    after = used_cpu(load)
    measured.wall_s += loop.time() - began
    measured.others_s += after.others_s - before.others_s
    measured.failures += [why for one in answers if (why := failure_of(one, load.stream, load.output_tokens))]
    return after.server_s - before.server_s


def in_turn(sides: Sequence[str], pair: int) -> list[str]:
    """Return the order in which sides are asked: each is first, in the middle and last as often, after each other."""
    first = pair % len(sides)
    order = [*sides[first:], *sides[:first]]
    return order if pair // len(sides) % 2 == 0 else order[::-1]


# --- what it gave -----------------------------------------------------------------------------------------


def ratio_of(ours_s: Sequence[float], base_s: Sequence[float]) -> Ratio:
    """Return what the pairs say. Pure. The interval of the median comes from the order of the values alone."""
    ratios = sorted(ours / base for ours, base in zip(ours_s, base_s, strict=True))
    count = len(ratios)
    at = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))  # binomial, at 95 %
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(
        median=round(statistics.median(ratios), 4),
        low=round(ratios[at], 4),
        high=round(ratios[count - 1 - at], 4),
        quartiles=(round(quartiles[0], 4), round(quartiles[2], 4)),
    )


def report_of(measured: MeasuredPairs, config: PairsConfig) -> PairsReport:
    cpu_s = measured.cpu_s

    def cpu_ms(side: str) -> float:
        return round(1000 * statistics.median(cpu_s[side]) / config.requests, 4)

    return PairsReport(
        case=config.case,
        change=config.url or config.change,
        pairs=config.pairs,
        requests=config.requests,
        base_cpu_ms=cpu_ms(BASE),
        changed_cpu_ms=cpu_ms(CHANGED),
        changed=ratio_of(cpu_s[CHANGED], cpu_s[BASE]),
        control=ratio_of(cpu_s[CONTROL], cpu_s[BASE]),
        errors=len(measured.failures),
        machine=f"{os.cpu_count()} x {cpu_name()}",
        others_cores=round(measured.others_s / measured.wall_s, 2) if measured.wall_s else 0.0,
    )


def table_of(report: PairsReport) -> Table:
    title = (
        f"{report.case}, {report.pairs} pairs of {report.requests} requests, {report.machine}, "
        f"{report.others_cores} cores busy with other programs"
    )
    table = Table(title=title, title_justify="left")
    for column in ("CPU of the frontend to that of the base", "median", "95 % of the median", "quartiles"):
        table.add_column(column)
    for name, ratio in (
        (report.change or "nothing changed", report.changed),
        ("control: the same again", report.control),
    ):
        low, high = ratio.quartiles
        table.add_row(name, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", f"{low:.3f} to {high:.3f}")
    table.caption = f"base {report.base_cpu_ms:.3f} ms per request, changed {report.changed_cpu_ms:.3f} ms"
    return table
