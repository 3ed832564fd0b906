"""Run `kvmesh lab demo-planner`: a mesh of processes under a load that triples and falls, and a planner.

Soon after the fall a short burst comes. The planner has kept the workers of the peak for such a return, so it orders
none.
"""

import asyncio
import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, UpConfig
from kvmesh.cluster.running import Cluster, running_cluster
from kvmesh.lab.demo_planner_page import DemoBurst, Event, Point, Report, write_html, write_png
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run, unless_stopped
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.record import Record, read_records
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.messages import Role

ISL_TOKENS = 384
OSL_TOKENS = 32
TIMEOUT_S = 60.0
BURST = (0.50, 0.53)  # of the time: as many requests as at the peak
SAMPLE_S = 1.0


class DemoPlannerConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_DEMO_PLANNER_<NAME>`, that over the TOML file of `--config`, that over the default."""

    out: Annotated[str, Meta(description="folder for planner.png, planner.html and the planner's record")] = (
        ".run/demo-planner"
    )
    low_rps: Annotated[float, Meta(gt=0, description="requests per second at the start and at the end")] = 4.0
    times: Annotated[float, Meta(ge=1, description="how many times as many at the peak")] = 3.0
    seconds: Annotated[float, Meta(ge=20, le=3600, description="how long requests are sent")] = 300.0
    ttft_slo_s: Annotated[float, Meta(gt=0, description="TTFT to keep")] = 1.0
    itl_slo_s: Annotated[float, Meta(gt=0, description="mean gap between tokens to keep")] = 0.08
    mock_speedup: Annotated[float, Meta(gt=0, description="speed of the workers against a data-centre GPU")] = 0.25
    mock_start_s: Annotated[float, Meta(ge=0, description="how long a worker loads, besides starting its process")] = (
        3.0
    )
    seed: Annotated[int, Meta(ge=0, description="of arrivals and prompts")] = 1


@dataclass(slots=True)
class DemoRequest:
    """Hold one request as the client saw it. Times are seconds since the load began."""

    at_s: float
    ttft_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    failure: str = ""

    @property
    def itl_s(self) -> float | None:
        if self.ttft_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.at_s - self.ttft_s) / (self.tokens - 1)

    def keeps(self, ttft_slo_s: float, itl_slo_s: float) -> bool:
        itl_s = self.itl_s
        return (
            not self.failure and self.ttft_s is not None and self.ttft_s <= ttft_slo_s and (itl_s or 0.0) <= itl_slo_s
        )


def main(argv: list[str]) -> int:
    config = load(
        DemoPlannerConfig,
        argv,
        os.environ,
        prefix="KVMESH_DEMO_PLANNER_",
        prog="kvmesh lab demo-planner",
        description="Start a mesh of mock workers on this host with a planner, send it a load that triples and falls, "
        "and show how the number of workers follows. Takes about five and a half minutes.",
        section="demo_planner",
    )
    console = Console(stderr=config.json, highlight=False)
    return run(lambda stop: demo(config, stop, console))


async def demo(config: DemoPlannerConfig, stop: asyncio.Event, console: Console) -> int:
    """Return 0 if no request failed and the workers followed the load, else 1."""
    report = await unless_stopped(show(config, console), stop, lambda: console.print("stopping"))
    if report is None:
        return 130
    if config.json:
        print(msgspec.json.encode(report).decode(), flush=True)
    return 0 if report.ok else 1


def emptied(folder: Path) -> Path:
    """Remove the files of the last demo and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("planner.jsonl", "planner.jsonl.1", "planner.html", "planner.png"):
        (folder / name).unlink(missing_ok=True)
    return folder


def mesh_of(config: DemoPlannerConfig) -> tuple[ClusterConfig, ServiceConfig]:
    up = ClusterConfig(
        UpConfig(engine="mock", port=0, prefill=1, decode=1, drain_timeout_s=30.0),
        worker={
            "kv_transfer": "shm",
            "mock_speedup": config.mock_speedup,
            "mock_start_s": config.mock_start_s,
            "max_num_seqs": 8,
            "max_step_tokens": 512,
            "num_blocks": 1024,
        },
    )
    planner = ServiceConfig(
        connector="local",
        ttft_slo_s=config.ttft_slo_s,
        itl_slo_s=config.itl_slo_s,
        max_gpus=10,
        predictive_interval_s=6.0,
        reactive_interval_s=2.0,
        start_s=config.mock_start_s + 3.0,
        flip_s=2.0,
        record_file=str(Path(config.out) / "planner.jsonl"),
    )
    return up, planner


def rate_at(config: DemoPlannerConfig, at_s: float) -> float:
    """Requests per second: low, a rise, the peak, a fall, a burst, low for longer than the planner keeps workers."""
    share = at_s / config.seconds
    if BURST[0] <= share < BURST[1]:
        return config.low_rps * config.times
    corners = ((0.0, 0.0), (0.15, 0.0), (0.30, 1.0), (0.42, 1.0), (0.47, 0.0), (1.0, 0.0))
    for (left, low), (right, high) in itertools.pairwise(corners):
        if share <= right:
            height = low + (high - low) * (share - left) / (right - left)
            return config.low_rps * (1 + (config.times - 1) * height)
    return config.low_rps


def arrivals(config: DemoPlannerConfig) -> list[float]:
    """Poisson, of a rate that changes: by thinning."""
    draw = random.Random(config.seed)
    peak = config.low_rps * config.times
    times: list[float] = []
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(peak)) < config.seconds:
        if draw.random() * peak <= rate_at(config, at_s):
            times.append(at_s)
    return times


async def show(config: DemoPlannerConfig, console: Console) -> Report:
    started = time.monotonic()
    out = emptied(Path(config.out))

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {line}", soft_wrap=True)

    up, planner = mesh_of(config)
    tell("starting a frontend, 1 prefill and 1 decode worker, and a planner, each a process of its own")
    async with running_cluster(up, tell, planner=planner) as cluster:
        await cluster.until_ready(tell)
        began_wall_s = time.time()
        sent, points = await load_mesh(config, cluster, tell)
        tell("the last answer has come; stopping")
    records = read_records(out / "planner.jsonl", 100_000)
    report = judge(config, sent, points, records, began_wall_s)
    console.print(table_of(config, report, sent))
    write_html(out / "planner.html", report)
    try:
        await asyncio.to_thread(write_png, out / "planner.png", report)
        picture = str(out / "planner.png")
    except ImportError:
        picture = "no picture: matplotlib is not installed, see `make dev`"
    console.print(f"\npage and picture: {out / 'planner.html'}, {picture}")
    told = f"decisions:        kvmesh planner explain --changes --record-file {out / 'planner.jsonl'}"
    console.print(told, soft_wrap=True)
    console.print(report.burst.text, soft_wrap=True)
    for problem in report.problems:
        console.print(f"[red]not as it should be:[/red] {problem}")
    return report


# --- the load -----------------------------------------------------------------------------------------


async def load_mesh(
    config: DemoPlannerConfig, cluster: Cluster, tell: Callable[[str], None]
) -> tuple[list[DemoRequest], list[Point]]:
    """Send all requests and wait for their answers. Return the requests, and the workers in every second."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    sent: list[DemoRequest] = []
    points: list[Point] = []
    watching = asyncio.create_task(watch(cluster, config, began_s, points, tell), name="watch the workers")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    draw = random.Random(config.seed + 1)
    try:
        async with (
            aiohttp.ClientSession(base_url=cluster.url, connector=connector, timeout=timeout) as http,
            asyncio.TaskGroup() as asking,
        ):
            for at_s in arrivals(config):
                await asyncio.sleep(began_s + at_s - clock())
                one = DemoRequest(clock() - began_s)
                sent.append(one)
                prompt = [draw.randrange(100, 1900) for _ in range(ISL_TOKENS)]  # no two alike: no cache helps
                asking.create_task(ask(http, cluster.model, prompt, one, began_s))
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    return sent, points


async def ask(
    http: aiohttp.ClientSession, model: str, prompt: Sequence[int], sent: DemoRequest, began_s: float
) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OSL_TOKENS,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    clock = asyncio.get_running_loop().time
    try:
        async with http.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise EngineError(f"status {response.status}: {(await response.text())[:200]}")
            is_done = False
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    take_chunk(sent, json.loads(line[6:]), clock() - began_s)
        if not is_done or sent.tokens != OSL_TOKENS:
            sent.failure = f"the answer has {sent.tokens} of {OSL_TOKENS} tokens"
    except (aiohttp.ClientError, TimeoutError, EngineError, ValueError) as error:
        sent.failure = str(error) or f"no answer within {TIMEOUT_S:g} s"


def take_chunk(sent: DemoRequest, chunk: dict[str, Any], at_s: float) -> None:
    if "error" in chunk:
        raise EngineError(f"the stream ended with an error: {chunk['error']}")
    if usage := chunk.get("usage"):
        sent.tokens = usage["completion_tokens"]
    if chunk.get("choices"):
        if sent.ttft_s is None:
            sent.ttft_s = at_s - sent.at_s
        sent.last_s = at_s


async def watch(
    cluster: Cluster, config: DemoPlannerConfig, began_s: float, points: list[Point], tell: Callable[[str], None]
) -> None:
    """Record every second which workers run, as the supervisor knows it."""
    clock = asyncio.get_running_loop().time
    for number in itertools.count():
        await asyncio.sleep(began_s + number * SAMPLE_S - clock())
        states = [(report.role, report.state) for report in cluster.crew.reports()]
        point = Point(
            at_s=number * SAMPLE_S,
            offered_rps=rate_at(config, number * SAMPLE_S) if number * SAMPLE_S < config.seconds else 0.0,
            prefill_ready=states.count((Role.PREFILL, "ready")),
            decode_ready=states.count((Role.DECODE, "ready")),
            prefill_all=sum(role is Role.PREFILL for role, _ in states),
            decode_all=sum(role is Role.DECODE for role, _ in states),
        )
        points.append(point)
        if number % 15 == 0:
            tell(f"{point.offered_rps:4.1f} requests/s, {point.prefill_ready} prefill and {point.decode_ready} decode")


# --- what came of it ----------------------------------------------------------------------------------


def judge(
    config: DemoPlannerConfig,
    sent: Sequence[DemoRequest],
    points: Sequence[Point],
    records: Iterable[Record],
    began_s: float,
) -> Report:
    """Check what happened against what a planner promises."""
    events = events_of(records, began_s)
    kept = sum(one.keeps(config.ttft_slo_s, config.itl_slo_s) for one in sent)
    failures = [one.failure for one in sent if one.failure]
    workers = [point.prefill_ready + point.decode_ready for point in points]
    in_all = [point.prefill_all + point.decode_all for point in points]
    problems = [f"{len(failures)} of {len(sent)} requests failed: {failures[0]}"] if failures else []
    if max(workers) <= workers[0]:
        problems.append("there were never more workers than at the start")
    if in_all[-1] >= max(in_all):
        problems.append("the workers did not become fewer when the load fell")
    burst = burst_of(config, points)
    if burst.ordered:
        problems.append(f"{burst.ordered} workers were ordered for a burst of {burst.to_s - burst.from_s:.0f} s")
    hours = sum(in_all) * SAMPLE_S / 3600
    return Report(
        ok=not problems,
        problems=problems,
        requests=len(sent),
        failed=len(failures),
        attainment=kept / max(1, len(sent)),
        ttft_slo_s=config.ttft_slo_s,
        itl_slo_s=config.itl_slo_s,
        ttft_p50_s=quantile([one.ttft_s for one in sent], 0.5),
        ttft_p95_s=quantile([one.ttft_s for one in sent], 0.95),
        itl_p50_s=quantile([one.itl_s for one in sent], 0.5),
        itl_p95_s=quantile([one.itl_s for one in sent], 0.95),
        workers_at_start=workers[0],
        workers_at_peak=max(workers),
        workers_at_end=in_all[-1],
        flips=sum(bool(event.flip) for event in events),
        burst=burst,
        worker_hours=hours,
        worker_hours_static_peak=max(workers) * len(points) * SAMPLE_S / 3600,
        points=list(points),
        events=events,
        ttft_s=[(one.at_s, one.ttft_s) for one in sent if one.ttft_s is not None],
        itl_s=[(one.at_s, itl_s) for one in sent if (itl_s := one.itl_s) is not None],
    )


def burst_of(config: DemoPlannerConfig, points: Sequence[Point]) -> DemoBurst:
    """Say how many workers the burst found, and how many were ordered until the time of a start after it."""
    from_s, to_s = (share * config.seconds for share in BURST)
    before = [point for point in points if point.at_s <= from_s][-1:]
    later = [point for point in points if from_s < point.at_s <= to_s + config.mock_start_s + 3.0]
    found = sum(point.prefill_all + point.decode_all for point in before)
    most = max([found, *(point.prefill_all + point.decode_all for point in later)])
    return DemoBurst(from_s=from_s, to_s=to_s, found=found, ordered=most - found)


def events_of(records: Iterable[Record], began_s: float) -> list[Event]:
    """Return the planner's decisions that were carried out, in seconds since the load began."""
    return [
        Event(
            at_s=record.ts_s - began_s,
            prefill=record.decision.prefill,
            decode=record.decision.decode,
            text="; ".join(reason.text for reason in record.decision.reasons) or "as decided before",
            flip=record.decision.flip.to_role if record.decision.flip is not None else "",
        )
        for record in records
        if record.applied is not None and record.ts_s >= began_s
    ]


def quantile(values: Iterable[float | None], share: float) -> float:
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) - 1, math.floor(share * len(known)))] if known else math.nan


PHASES = (
    ("low", 0.0, 0.15),
    ("rising", 0.15, 0.30),
    ("peak", 0.30, 0.42),
    ("falling", 0.42, BURST[0]),
    ("burst", *BURST),
    ("low", BURST[1], 1.0),
)


def table_of(config: DemoPlannerConfig, report: Report, sent: Sequence[DemoRequest]) -> Table:
    table = Table(title="What happened", title_justify="left")
    table.add_column("load")
    for name in ("req/s", "prefill + decode", "TTFT p50 / p95", "ITL p50 / p95", "within SLO", "failed"):
        table.add_column(name, justify="right")
    rows = [(name, left * config.seconds, right * config.seconds) for name, left, right in PHASES]
    for name, left_s, right_s in [*rows, ("all", 0.0, math.inf)]:
        some = [one for one in sent if left_s <= one.at_s < right_s]
        there = [point for point in report.points if left_s <= point.at_s < right_s]
        if not some or not there:
            continue
        kept = sum(one.keeps(config.ttft_slo_s, config.itl_slo_s) for one in some) / len(some)
        prefill = statistics.mean(point.prefill_ready for point in there)
        decode = statistics.mean(point.decode_ready for point in there)
        table.add_row(
            name,
            f"{len(some) / (min(right_s, config.seconds) - left_s):.1f}",
            f"{prefill:.1f} + {decode:.1f}",
            f"{milliseconds(some, 'ttft_s', 0.5)} / {milliseconds(some, 'ttft_s', 0.95)}",
            f"{milliseconds(some, 'itl_s', 0.5)} / {milliseconds(some, 'itl_s', 0.95)}",
            f"{kept:.1%}",
            str(sum(bool(one.failure) for one in some)),
        )
    saved = 1 - report.worker_hours / report.worker_hours_static_peak
    table.caption = (
        f"Times in ms. SLO: TTFT {config.ttft_slo_s * 1000:.0f}, ITL {config.itl_slo_s * 1000:.0f}. Workers' time: "
        f"{report.worker_hours:.2f} h, {saved:.0%} less than the {report.workers_at_peak} of the peak all the time"
    )
    return table


def milliseconds(some: Iterable[DemoRequest], name: str, share: float) -> str:
    return f"{1000 * quantile([getattr(one, name) for one in some], share):.0f}"
