"""Run `kvmesh lab bench fidelity`: record a live run of mock workers, and simulate the same requests.

Frontend, router and workers are real processes. When each request was sent is recorded; the simulator is given these
times, the lengths and the names of the prompts' blocks. What the frontend takes on this machine (`hop_s`) is measured
before, on requests that are alone; of the run itself the simulator is told nothing.
"""

import asyncio
import json
import os
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, UpConfig
from kvmesh.cluster.running import running_cluster
from kvmesh.lab.bench.load import ClientConnection, TimedAnswer, failure_of, request_bytes
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.simulator import SimConfig, SimReport, SimRequest, simulate
from kvmesh.simulator.loads import Shape, constant, synthesize
from kvmesh.workers.engines.mock.vocabulary import FIRST_TOKEN

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
STEP_TOKENS = 2048
SEQUENCES = 64
TOKENS = 400  # distinct ones in prompts
WARM_UP = 4  # requests before anything is measured
ALONE = 12  # requests, one after the other, that tell what the frontend takes


class FidelityConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    mode: Annotated[Literal["aggregated", "disaggregated"], Meta(description="of the mesh")] = "aggregated"
    workers: Annotated[int, Meta(ge=1, le=8, description="workers, half of which prefill when disaggregated")] = 2
    rate: Annotated[float, Meta(gt=0, description="requests per second")] = 2.0
    duration_s: Annotated[float, Meta(gt=0, description="of the load")] = 60.0
    speedup: Annotated[float, Meta(gt=0, description="of the mock workers, against the fit to an 8B model")] = 0.25
    isl: Annotated[int, Meta(ge=16, description="prompt tokens, on average")] = 600
    osl: Annotated[int, Meta(ge=2, description="answer tokens, on average")] = 60
    seed: Annotated[int, Meta(ge=0, description="of the load")] = 1


class FidelityReport(Struct, frozen=True, kw_only=True):
    """Errors: simulated / live - 1."""

    requests: int
    failures: int
    hop_s: float
    live_ttft_p50_s: float
    simulated_ttft_p50_s: float
    ttft_error: float
    live_itl_p50_s: float
    simulated_itl_p50_s: float
    itl_error: float
    live_ttft_mean_s: float
    simulated_ttft_mean_s: float


class Sent(Struct):
    """Hold one request as it was sent, and its answer."""

    request: SimRequest
    answer: TimedAnswer


def main(argv: list[str]) -> int:
    config = load_config(
        FidelityConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench fidelity",
        description="Compare a live run of mock workers with its simulation. A mesh is started, requests are sent and "
        "recorded, and the simulator gets the same requests at the same times. Takes about two minutes.",
        section="bench",
    )
    alone, sent = asyncio.run(record(config, Console(stderr=True)))
    hop_s = hop_of(alone, config)
    report = report_of(sent, simulate(as_sent(sent), simulated(config, hop_s)), hop_s)
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0 if report.failures == 0 else 1


async def record(config: FidelityConfig, console: Console) -> tuple[list[Sent], list[Sent]]:
    """Return the lone requests and those of the load."""

    def tell(line: str) -> None:
        console.print(line, highlight=False)

    shape = Shape(isl_tokens=config.isl, osl_tokens=config.osl, spread=0.4, groups=4, prefix_tokens=128)
    load = constant(config.rate)
    requests = list(synthesize(load, config.duration_s, shape, seed=config.seed, block_size=BLOCK_SIZE))
    async with running_cluster(mesh_of(config), tell) as cluster:
        await cluster.until_ready(tell)
        warm_up = [msgspec.structs.replace(request, arrival_s=0.0) for request in requests[-WARM_UP:]]
        await asyncio.gather(*[send(cluster.url, cluster.model, each, 0.0, salt="warm-up") for each in warm_up])
        alone = [await send(cluster.url, cluster.model, each, 0.0, salt="alone") for each in requests[:ALONE]]
        tell(f"sending {len(requests)} requests in {config.duration_s:.0f} s")
        started = time.perf_counter() + 0.5
        tasks = [
            asyncio.create_task(send(cluster.url, cluster.model, request, started), name=f"request {request.thread}")
            for request in requests
        ]
        return alone, list(await asyncio.gather(*tasks))


async def send(url: str, model: str, request: SimRequest, started: float, *, salt: str = "") -> Sent:
    body = {
        "model": model,
        "prompt": tokens_of(request, salt),
        "max_tokens": request.osl_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = request_bytes(f"{url}/v1/completions", json.dumps(body).encode())
    await asyncio.sleep(max(0.0, started + request.arrival_s - time.perf_counter()))
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: ClientConnection(True, loop), parts.hostname or "", parts.port or 80
    )
    answer = TimedAnswer()
    try:
        await connection.ask(data, answer)
    finally:
        connection.close()
    return Sent(request, answer)


def tokens_of(request: SimRequest, salt: str) -> list[int]:
    """Equal names, equal tokens; with another salt they are others."""
    names = array("Q", request.names)
    tokens = [token for name in names for token in _block(f"{name} {salt}", BLOCK_SIZE)]
    return tokens + _block(f"{request.thread} end {salt}", request.isl_tokens - len(tokens))


def _block(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [FIRST_TOKEN + rng.randrange(TOKENS) for _ in range(count)]


def as_sent(sent: Sequence[Sent]) -> list[SimRequest]:
    """Return the requests with the times at which they really were sent."""
    first_s = min(each.answer.sent_s for each in sent)
    moved = [msgspec.structs.replace(each.request, arrival_s=each.answer.sent_s - first_s) for each in sent]
    return sorted(moved, key=lambda request: request.arrival_s)


def hop_of(alone: Sequence[Sent], config: FidelityConfig) -> float:
    """Half of what the first token of a request that is alone takes longer than simulated."""
    simulation = simulate(as_sent(alone), simulated(config, 0.0))
    live_s = statistics.median(each.answer.first_token_s - each.answer.sent_s for each in alone)
    return max(0.0, live_s - simulation.ttft_s.p50) / 2


def report_of(sent: Sequence[Sent], simulation: SimReport, hop_s: float) -> FidelityReport:
    answers = [(each.request, each.answer) for each in sent]
    failures = [failure_of(answer, True, request.osl_tokens) for request, answer in answers]
    ttfts = [answer.first_token_s - answer.sent_s for _, answer in answers if answer.first_token_s]
    itls = [
        (answer.last_event_s - answer.first_token_s) / (request.osl_tokens - 1)
        for request, answer in answers
        if answer.first_token_s and request.osl_tokens > 1
    ]
    ttft, itl = statistics.median(ttfts), statistics.median(itls)
    return FidelityReport(
        requests=len(sent),
        failures=sum(map(bool, failures)),
        hop_s=hop_s,
        live_ttft_p50_s=ttft,
        simulated_ttft_p50_s=simulation.ttft_s.p50,
        ttft_error=simulation.ttft_s.p50 / ttft - 1,
        live_itl_p50_s=itl,
        simulated_itl_p50_s=simulation.itl_s.p50,
        itl_error=simulation.itl_s.p50 / itl - 1,
        live_ttft_mean_s=statistics.fmean(ttfts),
        simulated_ttft_mean_s=simulation.ttft_s.mean,
    )


def mesh_of(config: FidelityConfig) -> ClusterConfig:
    is_split = config.mode == "disaggregated"
    num_prefill = max(1, config.workers // 2) if is_split else 0
    return ClusterConfig(
        UpConfig(
            engine="mock",
            port=0,
            prefill=num_prefill,
            decode=config.workers - num_prefill if is_split else 0,
            aggregated=0 if is_split else config.workers,
            drain_timeout_s=1.0,
            log_level="warning",
        ),
        worker={
            "mock_speedup": config.speedup,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": SEQUENCES,
            "max_step_tokens": STEP_TOKENS,
            "kv_transfer": "shm",
        },
    )


def simulated(config: FidelityConfig, hop_s: float) -> SimConfig:
    return SimConfig(
        mode=config.mode,
        workers=config.workers,
        blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=SEQUENCES,
        max_step_tokens=STEP_TOKENS,
        speedup=config.speedup,
        kv_bandwidth_gbps=0.0,
        hop_s=hop_s,
        seed=config.seed,
    )


def table_of(report: FidelityReport) -> Table:
    table = Table("figure", "live", "simulated", "error", title=f"{report.requests} requests")
    for name, live, simulation, error in (
        ("TTFT p50", report.live_ttft_p50_s, report.simulated_ttft_p50_s, report.ttft_error),
        ("ITL p50", report.live_itl_p50_s, report.simulated_itl_p50_s, report.itl_error),
    ):
        table.add_row(name, f"{live * 1e3:.2f} ms", f"{simulation * 1e3:.2f} ms", f"{error:+.1%}")
    return table
