"""Run `kvmesh lab bench soak`: measure whether the frontend's memory grows with the requests it has answered.

Frontend with its router, mock workers that answer at once, and the load are processes of their own. The requests are
short chats, no two alike; every other one is streamed, and one in a hundred is left by its client before its end. Until
half of them are answered caches may fill; from then on memory should stay as it is. All are of common words: fast
tokenizers remember the words they have met, up to a bound that takes millions of new ones to reach (`--new-words`).
"""

import asyncio
import gc
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, UpConfig
from kvmesh.cluster.running import running_cluster
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.apart import apart
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.commands.bench.prompts import COMMON_WORDS
from kvmesh.lab.bench.frontend import SHOWN_FAILURES
from kvmesh.lab.bench.load import ClientConnection, TimedAnswer, failure_of, request_bytes, rss_mib, trees
from kvmesh.lab.bench.streams import body_of, until_held
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.protocol.errors import EngineError

WORDS_PER_PROMPT = 12
TOKENS = 4  # of an answer
LONG_TOKENS = 256  # of requests whose client leaves
LEAVES_EVERY = 100
LEAVES_WITHIN_S = 0.01
ANSWER_S = 60.0  # an answer that takes longer has failed
LOOKS = (0.1, 0.5, 1.0)  # at memory, after these shares of the requests


class SoakConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    requests: Annotated[int, Meta(ge=10, description="to send")] = 200_000
    concurrency: Annotated[int, Meta(ge=1, le=1024, description="at once")] = 32
    model: Annotated[str, Meta(description="folder of the tokenizer; default: the tiny model's")] = str(CHECKPOINT_DIR)
    new_words: Annotated[bool, Meta(description="a word in every prompt that was in none before")] = False


class SoakReport(Struct, frozen=True, kw_only=True):
    requests: int
    rss_10_mib: float  # of the frontend's processes, after 10 % of the requests
    rss_50_mib: float
    rss_100_mib: float
    growth_bytes_per_request: float  # in the second half
    requests_per_s: float
    errors: int  # answers that were not as asked for, and requests that are still held at the end
    machine: str


ROWS = {
    "rss_10_mib": "memory of the frontend after 10 %, MiB",
    "rss_50_mib": "after 50 %",
    "rss_100_mib": "after all",
    "growth_bytes_per_request": "growth per request in the second half, bytes",
    "requests_per_s": "requests per second",
    "errors": "requests that failed",
}


def main(argv: list[str]) -> int:
    config = load_config(
        SoakConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench soak",
        description="Measure whether the frontend's memory grows with the requests it has answered. A mesh of mock "
        "workers is started and answers short chats; memory is read after shares of them.",
        section="bench",
    )
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0 if report.errors == 0 else 1


async def measure(config: SoakConfig, console: Console) -> SoakReport:
    def tell(line: str) -> None:
        console.print(line, highlight=False)

    async with running_cluster(mesh_of(config), tell) as cluster:
        await cluster.until_ready(tell)
        pid = cluster.supervisor.pid("frontend")
        if pid is None:
            raise EngineError("the frontend has died", hint=f"see {cluster.run_dir}/logs")
        metrics = (f"{cluster.url}/metrics", *(card.metrics_url for card in cluster.cards.values()))
        plan = SoakPlan(cluster.url, cluster.model, config.requests, config.concurrency, config.new_words, metrics, pid)
        outcome = await apart(run_soak, plan)
    for failure in outcome.failures:
        tell(f"  failed: {failure}")
    return report_of(outcome)


def mesh_of(config: SoakConfig) -> ClusterConfig:
    """Few KV blocks, so that the router's index is soon as full as it gets."""
    return ClusterConfig(
        UpConfig(
            engine="mock",
            port=0,
            prefill=0,
            decode=0,
            aggregated=2,
            model_path=config.model,
            drain_timeout_s=1.0,
            log_level="warning",
        ),
        worker={
            "mock_speedup": 0,
            "num_blocks": 4096,
            "max_num_seqs": config.concurrency,
            "max_step_tokens": 65536,
            "kv_transfer": "shm",
        },
    )


# --- the process of the load ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SoakPlan:
    url: str  # of the frontend
    model: str
    requests: int
    concurrency: int
    new_words: bool
    metrics_urls: tuple[str, ...]  # of all processes that count what they hold
    pid: int  # of the frontend


@dataclass(slots=True)
class SoakOutcome:
    requests: int
    rss_mib: list[float] = field(default_factory=list)  # at LOOKS
    wall_s: float = 0.0
    errors: int = 0
    failures: list[str] = field(default_factory=list)  # the first ones


@dataclass(frozen=True, slots=True)
class SoakRequest:
    data: bytes
    stream: bool
    leaves: bool


def run_soak(plan: SoakPlan) -> SoakOutcome:
    gc.freeze()
    outcome: SoakOutcome = uvloop.run(drive(plan))
    return outcome


async def drive(plan: SoakPlan) -> SoakOutcome:
    outcome = SoakOutcome(plan.requests)
    started = time.perf_counter()
    await answer_all(make_requests(plan), plan, outcome)
    outcome.wall_s = time.perf_counter() - started
    note(outcome, await until_held(plan.metrics_urls, 0, "at the end"))
    return outcome


def make_requests(plan: SoakPlan) -> Iterator[SoakRequest]:
    """Make the requests one after the other: a million of them would take more memory than the measured process."""
    draw, words = random.Random(0), COMMON_WORDS.split()
    for number in range(plan.requests):
        prompt = " ".join([*draw.choices(words, k=WORDS_PER_PROMPT), *([f"x{number}"] if plan.new_words else [])])
        leaves = number % LEAVES_EVERY == LEAVES_EVERY - 1
        stream = number % 2 == 0 or number % (2 * LEAVES_EVERY) == LEAVES_EVERY - 1
        body = body_of(plan.model, prompt, LONG_TOKENS if leaves else TOKENS, stream=stream)
        yield SoakRequest(request_bytes(f"{plan.url}/v1/chat/completions", body), stream, leaves)


async def answer_all(requests: Iterator[SoakRequest], plan: SoakPlan, outcome: SoakOutcome) -> None:
    frontend = trees([plan.pid])
    looks = {max(1, round(share * plan.requests)) for share in LOOKS}
    ended = itertools.count(1)
    draw = random.Random(1)

    async def work() -> None:
        clients = {stream: Client(plan.url, stream=stream) for stream in (False, True)}
        for request in requests:
            client = clients[request.stream]
            if request.leaves:
                await client.leave(request, draw.uniform(0, LEAVES_WITHIN_S))
            elif failure := await client.ask(request):
                note(outcome, [failure])
            if next(ended) in looks:
                outcome.rss_mib.append(rss_mib(frontend))
        for client in clients.values():
            client.close()

    await asyncio.gather(*(work() for _ in range(plan.concurrency)))


def note(outcome: SoakOutcome, failures: list[str]) -> None:
    outcome.errors += len(failures)
    outcome.failures += failures[: max(0, SHOWN_FAILURES - len(outcome.failures))]


class Client:
    """Send requests over one connection, and open it again when it breaks."""

    def __init__(self, url: str, *, stream: bool) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._stream = stream
        self._connection: ClientConnection | None = None

    async def ask(self, request: SoakRequest) -> str:
        """Return what is wrong with the answer, "" if nothing."""
        answer = TimedAnswer(broken="no answer in time")
        try:
            async with asyncio.timeout(ANSWER_S):
                await (await self._connected()).ask(request.data, answer)
        except TimeoutError:
            self.close()
        except OSError as error:
            answer.broken = f"no connection: {error}"
        return failure_of(answer, request.stream, TOKENS)

    async def leave(self, request: SoakRequest, after_s: float) -> None:
        """Wait for no answer, nor for the end of one that has begun."""
        try:
            end = (await self._connected()).ask(request.data, TimedAnswer())
        except OSError:  # the next request will say so
            return
        await asyncio.wait([end], timeout=after_s)
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> ClientConnection:
        if self._connection is None or self._connection.closed:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                lambda: ClientConnection(self._stream, loop), self._host, self._port
            )
        return self._connection


# --- what it gave -----------------------------------------------------------------------------------------


def report_of(outcome: SoakOutcome) -> SoakReport:
    at_10, at_50, at_100 = outcome.rss_mib
    second_half = outcome.requests - round(LOOKS[1] * outcome.requests)
    return SoakReport(
        requests=outcome.requests,
        rss_10_mib=round(at_10, 1),
        rss_50_mib=round(at_50, 1),
        rss_100_mib=round(at_100, 1),
        growth_bytes_per_request=round((at_100 - at_50) * 2**20 / second_half, 1),
        requests_per_s=round(outcome.requests / outcome.wall_s, 1),
        errors=outcome.errors,
        machine=f"{os.cpu_count()} x {cpu_name()}",
    )


def table_of(report: SoakReport) -> Table:
    table = Table(title=f"{report.requests} requests on {report.machine}", title_justify="left")
    for column in ("", "measured"):
        table.add_column(column)
    for name, text in ROWS.items():
        table.add_row(text, f"{getattr(report, name):g}")
    return table
