"""Run `kvmesh lab bench picker`: measure what an endpoint picker adds to a request through Envoy.

One Envoy has three ports: without a picker, with one in BUFFERED mode, and with one in FULL_DUPLEX_STREAMED mode. All
lead to the same server, which answers at once. Requests go in turn through each port, one at a time, so that whatever
else the machine does falls on all three. A difference of medians is what the picker adds: its own time, and Envoy's for
asking it.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import aiohttp
import psutil
from aiohttp import web
from msgspec import Meta, Struct, structs
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.lab.bench.envoy import HOST, EnvoyPort, Mode, free_ports, running_envoy
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.mesh.discovery import open_discovery
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard, encode_card

MODEL = "tiny"
MODES: tuple[Mode, ...] = ("none", "buffered", "duplex")
START_S = 60.0
GOAL_MS = 2.0
PARTS, STREAMS = 400, 8  # of a streamed answer; streams at once
PART = b'data: {"choices":[{"delta":{"content":"fox"}}]}\n\n'
PART_GAP_S = 0.002  # so that parts travel one by one
WORD = "quick brown fox "  # some five tokens of the tiny model


class PickerConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    requests: Annotated[int, Meta(ge=10, description="through each port, after as many to warm up")] = 1000
    prompt_words: Annotated[int, Meta(ge=1, description="of each chat, times three")] = 100
    workers: Annotated[int, Meta(ge=1, le=10_000, description="that the picker chooses from")] = 8


class PickerReport(Struct, frozen=True, kw_only=True):
    """Medians and 90th percentiles of a request's time at the client, in ms; added: the difference to no picker."""

    cpu: str
    requests: int
    prompt_tokens: int
    workers: int
    plain_p50_ms: float
    buffered_p50_ms: float
    duplex_p50_ms: float
    buffered_added_p50_ms: float
    duplex_added_p50_ms: float
    buffered_added_p90_ms: float
    duplex_added_p90_ms: float
    picker_pick_ms: float  # mean, by the picker's own clock, of all requests
    picker_cpu_ms: float  # CPU of the picker for a request, mean of both modes
    duplex_part_us: float  # CPU of the picker for each part of an answer that passes through it
    goal_ms: float = GOAL_MS
    meets_goal: bool = False


def main(argv: list[str]) -> int:
    config = load_config(
        PickerConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench picker",
        description="Measure what an endpoint picker adds to a request through a real Envoy, in pairs of one run, "
        "against the same Envoy without it. `make test-envoy` installs Envoy; KVMESH_ENVOY names another one.",
    )
    console = Console(stderr=config.json)
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        report = asyncio.run(measure(config, Path(folder)))
    show(report, console)
    if config.json:
        print(json.dumps(structs.asdict(report)))
    return 0


async def measure(config: PickerConfig, folder: Path) -> PickerReport:
    """Run the picker, Envoy and the server, and time requests. Raise ConfigError, EngineError."""
    ext_proc, http_port, endpoint, *ports = free_ports(3 + len(MODES))
    discovery = f"file:{folder / 'discovery'}"
    to = f"{HOST}:{endpoint}"
    listeners = [EnvoyPort(port, mode, to) for port, mode in zip(ports, MODES, strict=True)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(answering(endpoint))
        await stack.enter_async_context(joined(discovery, config.workers, to))
        picker = await stack.enter_async_context(running_picker(folder, ext_proc, http_port, discovery))
        stack.enter_context(running_envoy(folder, ext_proc, listeners))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://{HOST}:{http_port}"
        await until_picked(session, ports[1])
        await timed(session, ports, config.requests, config.prompt_words)
        before = await picker_time(session, url)
        cpu_before = cpu_s_of(picker)
        times = await timed(session, ports, config.requests, config.prompt_words)
        cpu_s = (cpu_s_of(picker) - cpu_before) / (2 * config.requests)
        after = await picker_time(session, url)
        part_s = await part_time(session, ports[2], picker)
    pick_s = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    return report_of(config, prompt_tokens(config.prompt_words), times, pick_s, cpu_s, part_s)


def report_of(
    config: PickerConfig, tokens: int, times: Sequence[Sequence[float]], pick_s: float, cpu_s: float, part_s: float
) -> PickerReport:
    """Return the report of the times at each port, in seconds, in the order of MODES."""
    plain, buffered, duplex = [statistics.median(one) * 1e3 for one in times]
    tails = [statistics.quantiles(one, n=10)[8] * 1e3 for one in times]
    added = buffered - plain, duplex - plain
    return PickerReport(
        cpu=cpu_name(),
        requests=config.requests,
        prompt_tokens=tokens,
        workers=config.workers,
        plain_p50_ms=round(plain, 3),
        buffered_p50_ms=round(buffered, 3),
        duplex_p50_ms=round(duplex, 3),
        buffered_added_p50_ms=round(added[0], 3),
        duplex_added_p50_ms=round(added[1], 3),
        buffered_added_p90_ms=round(tails[1] - tails[0], 3),
        duplex_added_p90_ms=round(tails[2] - tails[0], 3),
        picker_pick_ms=round(pick_s * 1e3, 3),
        picker_cpu_ms=round(cpu_s * 1e3, 3),
        duplex_part_us=round(part_s * 1e6, 1),
        meets_goal=max(added) <= GOAL_MS,
    )


async def timed(session: aiohttp.ClientSession, ports: Sequence[int], requests: int, words: int) -> list[list[float]]:
    """Return the times of requests through each port, taken in turn."""
    times: list[list[float]] = [[] for _ in ports]
    for number in range(requests):
        body = chat(number, words)
        for port, found in zip(ports, times, strict=True):
            began = time.perf_counter()
            async with session.post(f"http://{HOST}:{port}/v1/chat/completions", data=body) as reply:
                answer = await reply.read()
            found.append(time.perf_counter() - began)
            if reply.status != 200:
                raise EngineError(f"port {port} answered {reply.status}: {answer[:500]!r}")
    return times


def chat(number: int, words: int) -> bytes:
    """Return the next turn of one of 16 conversations: its beginning was seen before."""
    text = f"{number % 16}: " + WORD * words + f" {number}"
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 16}).encode()


def prompt_tokens(words: int) -> int:
    content = json.loads(chat(0, words))["messages"][0]["content"]
    return len(Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")).encode(content).ids)


@asynccontextmanager
async def answering(port: int) -> AsyncIterator[None]:
    """Serve as the endpoint: every request has the same answer."""
    reply = json.dumps({"object": "chat.completion", "choices": []})

    async def answer(request: web.Request) -> web.StreamResponse:
        if b'"stream": true' not in await request.read():
            return web.Response(text=reply, content_type="application/json")
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for _ in range(PARTS):
            await stream.write(PART)
            await asyncio.sleep(PART_GAP_S)
        return stream

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def joined(place: str, workers: int, endpoint: str) -> AsyncIterator[None]:
    """Announce workers that are reached at one endpoint."""
    discovery = open_discovery(place)
    try:
        for number in range(workers):
            name = f"worker-{number}"
            card = WorkerCard(
                worker_id=WorkerId(name),
                name=name,
                role=Role.AGGREGATED,
                model=MODEL,
                model_path=str(CHECKPOINT_DIR),
                address=f"{HOST}:9",
                block_size=16,
                total_blocks=4096,
                context_tokens=2048,
                http_endpoint=endpoint,
            )
            await discovery.put(f"workers/{name}", encode_card(card))
        yield
    finally:
        await discovery.close()


@asynccontextmanager
async def running_picker(folder: Path, ext_proc: int, http_port: int, discovery: str) -> AsyncIterator[psutil.Process]:
    argv = [
        "-m",
        "kvmesh.router",
        "--ext-proc-port",
        str(ext_proc),
        "--http-port",
        str(http_port),
        "--discovery",
        discovery,
    ]
    with (folder / "picker.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, "-P", *argv, stdout=log, stderr=log)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def until_picked(session: aiohttp.ClientSession, port: int) -> None:
    """Wait until requests get through. Raise EngineError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        async with session.post(f"http://{HOST}:{port}/v1/chat/completions", data=chat(0, 1)) as reply:
            if reply.status == 200:
                return
        await asyncio.sleep(0.2)
    raise EngineError(f"no request got through the gateway within {START_S:.0f} s", hint=f"it said {reply.status}")


async def part_time(session: aiohttp.ClientSession, port: int, picker: psutil.Process) -> float:
    """Return the CPU time of the picker for a part of an answer, in seconds."""

    async def stream() -> None:
        body = json.loads(chat(0, 1)) | {"stream": True}
        async with session.post(f"http://{HOST}:{port}/v1/chat/completions", data=json.dumps(body)) as reply:
            await reply.read()

    before = cpu_s_of(picker)
    await asyncio.gather(*[stream() for _ in range(STREAMS)])
    return (cpu_s_of(picker) - before) / (PARTS * STREAMS)


def cpu_s_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def picker_time(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Return the seconds that the picker has taken for its picks, and their number."""
    async with session.get(f"{url}/metrics") as reply:
        text = await reply.text()
    lines = (line for line in text.splitlines() if line.startswith("kvmesh_picker_pick_seconds_"))
    found = {line.partition("{")[0].split(" ")[0]: line.rsplit(" ", 1)[1] for line in lines}
    return float(found["kvmesh_picker_pick_seconds_sum"]), float(found["kvmesh_picker_pick_seconds_count"])


def show(report: PickerReport, console: Console) -> None:
    table = Table(title=f"a chat of {report.prompt_tokens} tokens through Envoy, {report.workers} workers")
    for title in ("picker", "p50", "added p50", "added p90"):
        table.add_column(title, justify="left" if title == "picker" else "right")
    table.add_row("none", f"{report.plain_p50_ms:.2f} ms", "", "")
    for mode in ("buffered", "duplex"):
        row = [getattr(report, f"{mode}_{name}_ms") for name in ("p50", "added_p50", "added_p90")]
        table.add_row(mode, *[f"{value:.2f} ms" for value in row])
    console.print(table)
    verdict = f"{'meets' if report.meets_goal else 'misses'} the goal of {report.goal_ms:g} ms added at p50"
    console.print(f"picks took {report.picker_pick_ms:.3f} ms; {verdict}")
    parts = f"a part of an answer that passes through it {report.duplex_part_us:.0f} us"
    console.print(f"a request took {report.picker_cpu_ms:.2f} ms of the picker's CPU, {parts}")
