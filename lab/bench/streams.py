"""Run `kvmesh lab bench streams`: measure what open but idle streams cost the frontend.

Frontend with its router, mock workers and the load are processes of their own. The workers take half a minute for a
token. Each stream has its first token before the clock starts, so it runs and does not wait; afterwards most clients
leave, the others read on to the end, and nothing may be left of either.
"""

import asyncio
import gc
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, UpConfig
from kvmesh.cluster.running import Cluster, running_cluster
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.apart import apart
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.commands.bench.prompts import PromptMaker, load_tokenizer
from kvmesh.lab.bench.frontend import SHOWN_FAILURES
from kvmesh.lab.bench.load import (
    ClientConnection,
    ClientLoad,
    TimedAnswer,
    failure_of,
    request_bytes,
    rss_mib,
    trees,
    used_cpu,
)
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.mesh.http.files import make_room_for_files
from kvmesh.protocol.errors import ConfigError, EngineError

STREAMS_PER_WORKER = 2500
MIN_WORKERS = 4
SPARE_FILES = 512  # of a process, beside those of its streams
AT_ONCE = 256  # connections that may wait to be accepted: the system drops more
PROMPT_TOKENS = 32
START_S = 120.0  # for all streams to be sent; on top come the steps in which their prompts are computed
SETTLE_S = 1.0  # after the last first token
CLEAN_S = 15.0  # for counts to go back
POLL_S = 0.05
LOOK_S = 0.5  # between looks at all streams
LEAVING_TOKENS = 512  # asked for by those whose clients leave
ENDING_SHARE = 0.1  # of the streams, the last ones: their clients stay
_GAUGES = re.compile(r"^kvmesh_(?:frontend_inflight|worker_(?:running|waiting)_requests)(?:\{[^}]*\})? (\S+)$", re.M)
P = TypeVar("P")
R = TypeVar("R")


class StreamsConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    streams: Annotated[int, Meta(ge=2, le=200_000, description="open at once")] = 10_000
    model: Annotated[str, Meta(description="folder of the tokenizer; default: the tiny model's")] = str(CHECKPOINT_DIR)
    itl_s: Annotated[float, Meta(gt=0, description="the workers need so long for a token")] = 30.0
    window_s: Annotated[float, Meta(gt=0, description="so long is measured, with all streams open")] = 20.0


class StreamsReport(Struct, frozen=True, kw_only=True):
    streams: int  # open while the clock ran
    cpu_share: float  # of one core, by the frontend's processes
    rss_mib: float  # of the frontend's processes, with all streams open
    rss_before_mib: float  # with none
    errors: int  # streams that did not open or end as they should, and counts that did not go back
    others_cores: float  # that other programs used meanwhile
    machine: str


ROWS = {
    "cpu_share": ("CPU of the frontend, of one core", "< 0.1"),
    "rss_mib": ("memory of the frontend, MiB", "< 600"),
    "rss_before_mib": ("the same with no stream", ""),
    "errors": ("streams that failed", "0"),
}


def main(argv: list[str]) -> int:
    config = load_config(
        StreamsConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench streams",
        description="Measure what idle streams cost the frontend: CPU and memory. A mesh of mock workers that take "
        "half a minute for a token is started, streams are opened, most clients leave, and the others read to the end.",
        section="bench",
    )
    check_files(config.streams)
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0 if report.errors == 0 else 1


def check_files(streams: int) -> None:
    """The processes that are started inherit the limit. Raises ConfigError."""
    wanted = streams + SPARE_FILES
    if (possible := make_room_for_files(wanted)) < wanted:
        raise ConfigError(
            f"{streams} streams need {wanted} open files in a process, and {possible} is the limit here",
            hint=f"ask for --streams {max(2, possible - SPARE_FILES)}, or raise the hard limit: `ulimit -Hn {wanted}` "
            "as root, LimitNOFILE= of systemd, --ulimit nofile= of docker",
        )


async def measure(config: StreamsConfig, console: Console) -> StreamsReport:
    def tell(line: str) -> None:
        console.print(line, highlight=False)

    async with running_cluster(mesh_of(config), tell) as cluster:
        await cluster.until_ready(tell)
        outcome = await apart(run_streams, plan_of(config, cluster))
    failures = outcome.failures
    tell(f"all open after {outcome.open_s:.0f} s")
    for failure in list(dict.fromkeys(failures))[:SHOWN_FAILURES]:
        tell(f"  failed: {failure}")
    return StreamsReport(
        streams=outcome.streams,
        cpu_share=round(outcome.cpu_share, 4),
        rss_mib=round(outcome.rss_mib, 1),
        rss_before_mib=round(outcome.rss_before_mib, 1),
        errors=len(failures),
        others_cores=round(outcome.others_cores, 2),
        machine=f"{os.cpu_count()} x {cpu_name()}",
    )


def mesh_of(config: StreamsConfig) -> ClusterConfig:
    """Return a mesh whose workers each have room for every stream and are slow to make a token."""
    return ClusterConfig(
        UpConfig(
            engine="mock",
            port=0,
            prefill=0,
            decode=0,
            aggregated=max(MIN_WORKERS, -(-config.streams // STREAMS_PER_WORKER)),
            model_path=config.model,
            drain_timeout_s=1.0,
            log_level="warning",
        ),
        worker={
            "mock_speedup": 0,
            "mock_itl_ms": 1000 * config.itl_s,
            "num_blocks": max(4096, 8 * config.streams),
            "max_num_seqs": config.streams,
            "max_step_tokens": 1 << 20,
            "kv_transfer": "shm",
        },
        # No stream is one too many, and none waits in the router: the prompts of all streams that come during one
        # step of the workers are still to compute.
        frontend={"max_inflight": config.streams + 64, "max_connections": config.streams + SPARE_FILES // 2},
        router={"saturation_tokens": 0, "saturation_requests_share": 0.0, "saturation_blocks_share": 0.0},
    )


# --- the process of the load ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamsPlan:
    url: str  # of the frontend
    model: str
    tokenizer: str
    streams: int
    ending_tokens: int  # of streams that are read to their end
    window_s: float
    itl_s: float
    metrics_urls: tuple[str, ...]  # of all processes that count what they hold
    pid: int  # of the frontend
    with_pids: tuple[int, ...]  # what else belongs to the measurement


@dataclass(frozen=True, slots=True)
class StreamsOutcome:
    streams: int
    open_s: float  # until all had their first token
    cpu_share: float
    others_cores: float
    rss_mib: float
    rss_before_mib: float
    failures: list[str]


def plan_of(config: StreamsConfig, cluster: Cluster) -> StreamsPlan:
    pid = cluster.supervisor.pid("frontend")
    if pid is None:
        raise EngineError("the frontend has died", hint=f"see {cluster.run_dir}/logs")
    return StreamsPlan(
        url=cluster.url,
        model=cluster.model,
        tokenizer=config.model,
        streams=config.streams,
        ending_tokens=ending_tokens(config.window_s, config.itl_s),
        window_s=config.window_s,
        itl_s=config.itl_s,
        metrics_urls=(f"{cluster.url}/metrics", *(card.metrics_url for card in cluster.cards.values())),
        pid=pid,
        with_pids=(os.getpid(),),
    )


def ending_tokens(window_s: float, itl_s: float) -> int:
    """Return a length at which no stream ends before the window: when the last has its first token, some have two."""
    return 4 + math.ceil((window_s + 2 * SETTLE_S) / itl_s)


def run_streams(plan: StreamsPlan) -> StreamsOutcome:
    gc.freeze()
    gc.disable()
    outcome: StreamsOutcome = uvloop.run(drive(plan))
    return outcome


class OpenStream:
    """Hold one request for a stream, and its outcome. `leaves`: its client will not wait for the end."""

    def __init__(self, request: bytes, tokens: int, *, leaves: bool) -> None:
        self.leaves = leaves
        self.answer = TimedAnswer(broken="it was not sent")
        self._request = request
        self._tokens = tokens
        self._connection: ClientConnection | None = None
        self._end: asyncio.Future[None] | None = None

    async def send(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, self._connection = await loop.create_connection(lambda: ClientConnection(True, loop), host, port)
        except OSError as error:
            self.answer.broken = f"no connection: {error}"
        else:
            self.answer.broken = "it did not end in time"
            self._end = self._connection.ask(self._request, self.answer)

    @property
    def is_open(self) -> bool:
        return bool(self.answer.first_token_s) and not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._end is None or self._end.done()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def failure(self) -> str:
        """Return why a stream has not come to its end, "" if it has."""
        return failure_of(self.answer, True, self._tokens)


async def drive(plan: StreamsPlan) -> StreamsOutcome:
    streams = make_streams(plan)
    load = ClientLoad(plan.url, (), 0, 0, True, 0, pid=plan.pid, with_pids=plan.with_pids)
    server = trees([plan.pid])
    rss_before_mib = rss_mib(server)
    async with AsyncExitStack() as cleanup:
        for stream in streams:
            cleanup.callback(stream.close)
        started = time.perf_counter()
        await send_all(streams, plan.url)
        await until(
            lambda: not any(not s.is_open and not s.has_ended for s in streams), START_S + 5 * plan.itl_s, LOOK_S
        )
        open_s = time.perf_counter() - started
        await asyncio.sleep(SETTLE_S)
        before, began = used_cpu(load), time.perf_counter()
        await asyncio.sleep(plan.window_s)
        after, took_s = used_cpu(load), time.perf_counter() - began
        rss = rss_mib(server)
        failures = [shut_stream(s) for s in streams if not s.is_open]
        failures += await let_go(streams, plan)
    return StreamsOutcome(
        streams=sum(s.answer.first_token_s > 0 for s in streams),
        open_s=open_s,
        cpu_share=(after.server_s - before.server_s) / took_s,
        others_cores=(after.others_s - before.others_s) / took_s,
        rss_mib=rss,
        rss_before_mib=rss_before_mib,
        failures=failures,
    )


def make_streams(plan: StreamsPlan) -> list[OpenStream]:
    """Open the streams whose clients leave first: they may have more tokens than the others when all are open."""
    maker = PromptMaker(load_tokenizer(plan.tokenizer), 0)
    leaving = plan.streams - max(1, round(ENDING_SHARE * plan.streams))
    streams = []
    for number in range(plan.streams):
        tokens = LEAVING_TOKENS if number < leaving else plan.ending_tokens
        body = body_of(plan.model, maker.prompt(PROMPT_TOKENS), tokens, stream=True)
        request = request_bytes(f"{plan.url}/v1/chat/completions", body)
        streams.append(OpenStream(request, tokens, leaves=number < leaving))
    return streams


def body_of(model: str, prompt: str, tokens: int, *, stream: bool) -> bytes:
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return msgspec.json.encode(body | ({"stream_options": {"include_usage": True}} if stream else {}))


async def send_all(streams: Sequence[OpenStream], url: str) -> None:
    """A few at a time; the next when a connection that came after them is answered."""
    parts = urlsplit(url)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for first in range(0, len(streams), AT_ONCE):
            some = streams[first : first + AT_ONCE]
            await asyncio.gather(*(stream.send(parts.hostname or "", parts.port or 80) for stream in some))
            async with session.get(f"{url}/live") as reply:
                await reply.read()


async def let_go(streams: Sequence[OpenStream], plan: StreamsPlan) -> list[str]:
    """Most clients leave, the others read to the end. Says what is not as it should be then."""
    ending = [stream for stream in streams if not stream.leaves]
    for stream in streams:
        if stream.leaves:
            stream.close()
    workers = plan.metrics_urls[1:]
    failures = await until_held(workers, len([s for s in ending if not s.has_ended]), "after the others left")
    await until(lambda: all(stream.has_ended for stream in ending), plan.ending_tokens * plan.itl_s + START_S, POLL_S)
    failures += [why for stream in ending if stream.answer.first_token_s and (why := stream.failure())]
    for url in plan.metrics_urls:
        failures += await until_held([url], 0, "at the end")
    return failures


def shut_stream(stream: OpenStream) -> str:
    """Return why a stream is not open when the clock stops."""
    answer = stream.answer
    if answer.first_token_s and not answer.broken:
        return "it ended while the clock ran"
    return answer.broken or f"status {answer.status}: {b''.join(answer.body)[:200].decode(errors='replace')}"


async def until_held(metrics_urls: Sequence[str], most: int, when: str) -> list[str]:
    """Wait until the processes hold `most` requests together; a failure for each one too many after CLEAN_S."""
    deadline = time.perf_counter() + CLEAN_S
    async with aiohttp.ClientSession() as session:
        while (held := sum([await requests_held(session, url) for url in metrics_urls])) > most:
            if time.perf_counter() > deadline:
                return [f"{held} requests instead of {most} are held {when}: {', '.join(metrics_urls)}"] * (held - most)
            await asyncio.sleep(POLL_S)
    return []


async def requests_held(session: aiohttp.ClientSession, metrics_url: str) -> int:
    """Raises EngineError if the process does not say."""
    try:
        async with session.get(metrics_url) as reply:
            counts = _GAUGES.findall(await reply.text())
    except aiohttp.ClientError as error:
        raise EngineError(f"{metrics_url} does not answer: {error}") from error
    if not counts:
        raise EngineError(f"{metrics_url} does not say how many requests are held")
    return round(sum(float(count) for count in counts))


async def until(condition: Callable[[], bool], patience_s: float, look_s: float) -> None:
    """Wait for the streams, at most as long as patience lasts. Late streams are found afterwards."""
    deadline = time.perf_counter() + patience_s
    while not condition() and time.perf_counter() < deadline:  # noqa: ASYNC110 - 10,000 connections have no one event
        await asyncio.sleep(look_s)


# --- what it gave -----------------------------------------------------------------------------------------


def table_of(report: StreamsReport) -> Table:
    title = f"{report.streams} idle streams on {report.machine}, {report.others_cores} cores busy with other programs"
    table = Table(title=title, title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, (text, goal) in ROWS.items():
        table.add_row(text, f"{getattr(report, name):g}", goal)
    return table
