"""Run `kvmesh lab bench frontend`: measure what the frontend, with its router inside, costs per request and per token.

Frontend, four mock workers and the load are processes of their own on this host. They share its cores, so the CPU time
of the frontend's processes counts. The workers answer at once; for the paced case a second mesh is started, whose
workers emit one token per stream every 5 ms. Prompts are random common words, which suits a tokenizer that remembers
words. Sampling is the default, and all answers have their full length.
"""

import asyncio
import json
import os
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, ClusterTls, UpConfig
from kvmesh.cluster.running import running_cluster
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.apart import apart
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.commands.bench.prompts import load_tokenizer, make_prompts
from kvmesh.lab.bench.load import ClientLoad, LoadOutcome, rss_mib, run_load, trees
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.protocol.errors import ConfigError, EngineError

CaseName = Literal["a64", "b64", "b64_paced", "c16", "cp16", "c1s"]
PACE_MS = 5.0
GROUPS = 8  # of prompts with a common beginning
SHOWN_FAILURES = 3


class FrontendBenchConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    model: Annotated[str, Meta(description="folder of the tokenizer; default: the tiny model's")] = str(CHECKPOINT_DIR)
    case: Annotated[tuple[CaseName, ...], Meta(description="only this one; may be given again")] = ()
    runs: Annotated[int, Meta(ge=1, description="each case is measured so often; the median counts")] = 3
    scale: Annotated[float, Meta(gt=0, description="share of the requests: 0.1 for a quick look")] = 1.0
    url: Annotated[str, Meta(description="of a server that runs already, http://host:port; with --pid")] = ""
    pid: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="of that server")] = None
    mesh_tls: ClusterTls = ""


@dataclass(frozen=True, slots=True)
class FrontendCase:
    name: CaseName
    concurrency: int
    requests: int
    warmup: int
    prompt_tokens: int
    output_tokens: int
    stream: bool = False
    shared_tokens: int = 0

    def scaled(self, scale: float) -> "FrontendCase":
        return replace(self, requests=max(4, round(scale * self.requests)), warmup=max(2, round(scale * self.warmup)))


BURST = (
    FrontendCase("a64", 64, requests=4000, warmup=500, prompt_tokens=32, output_tokens=1),
    FrontendCase("b64", 64, requests=256, warmup=64, prompt_tokens=32, output_tokens=256, stream=True),
    FrontendCase("c16", 16, requests=300, warmup=32, prompt_tokens=8192, output_tokens=1),
    FrontendCase("cp16", 16, requests=300, warmup=32, prompt_tokens=8192, output_tokens=1, shared_tokens=7372),
    FrontendCase("c1s", 1, requests=300, warmup=10, prompt_tokens=32, output_tokens=1, stream=True),
)
PACED = (FrontendCase("b64_paced", 64, requests=256, warmup=64, prompt_tokens=32, output_tokens=256, stream=True),)


class FrontendReport(Struct, frozen=True, kw_only=True):
    """Hold the figures; `null`: not measured."""

    a64_cpu_ms: float | None  # per request
    b64_cpu_us_per_token: float | None
    b64_paced_cpu_us_per_token: float | None
    b64_paced_itl_p99_ms: float | None  # between reads that held an event
    c16_cpu_ms: float | None
    cp16_cpu_ms: float | None
    c1s_ttft_p50_ms: float | None
    rss_mib: float | None  # after all cases; of the larger frontend
    errors: int  # answers that were not 200, not complete, or not of the length asked for
    machine: str
    others_cores: float | None  # that other programs used meanwhile: latency means little above a few tenths
    vocabulary: int  # of the tokenizer


GOALS = {
    "a64_cpu_ms": ("64 at once, 32 tokens in, 1 out: CPU per request", "ms", 0.40),
    "b64_cpu_us_per_token": ("64 streams of 256 tokens: CPU per token", "µs", 12.0),
    "b64_paced_cpu_us_per_token": ("the same, a token every 5 ms: CPU per token", "µs", 25.0),
    "b64_paced_itl_p99_ms": ("the same: gap between tokens, p99", "ms", 8.0),
    "c16_cpu_ms": ("16 at once, 8192 tokens in, 1 out: CPU per request", "ms", 3.0),
    "cp16_cpu_ms": ("the same, 90 % of it shared by 8 groups", "ms", 0.8),
    "c1s_ttft_p50_ms": ("alone, 32 tokens in, 1 out: time to first token, p50", "ms", 1.5),
    "rss_mib": ("memory afterwards", "MiB", 160.0),
    "errors": ("answers that failed", "", 0),
}


def main(argv: list[str]) -> int:
    config = load_config(
        FrontendBenchConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench frontend",
        description="Measure frontend and router: CPU per request and per token, latency, memory. A mesh of "
        "mock workers that answer at once is started, and load is sent from this host; or name a running "
        "server by --url and --pid.",
        section="bench",
    )
    check_named(config.url, config.pid)
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0 if report.errors == 0 else 1


def check_named(url: str, pid: int | None) -> None:
    """Raise ConfigError if a running server is named by its URL or by its process alone."""
    if bool(url) != (pid is not None):
        raise ConfigError("only one of --url and --pid is given", hint="name both, or none to have a mesh started")


# --- measuring --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BenchServer:
    """Hold a running server. CPU and memory of `pid` and all its descendants count."""

    url: str
    model: str  # the name to ask for
    pid: int


@dataclass(slots=True)
class MeasuredCases:
    outcomes: dict[CaseName, list[LoadOutcome]] = field(default_factory=dict)  # one per run
    rss_mib: list[float] = field(default_factory=list)  # of each frontend, after its cases


async def measure(config: FrontendBenchConfig, console: Console) -> FrontendReport:
    vocabulary = load_tokenizer(config.model).get_vocab_size()
    if config.model == str(CHECKPOINT_DIR):
        console.print(f"the tiny model's vocabulary is small ({vocabulary}): --model names the folder of a real one")
    measured = MeasuredCases()
    if config.url:
        server = BenchServer(config.url.rstrip("/"), await asyncio.to_thread(model_at, config.url), config.pid or 0)
        await run_cases(chosen((*BURST, *PACED) if config.case else BURST, config), server, config, measured, console)
    else:
        for cases, mesh in ((chosen(BURST, config), burst_mesh(config)), (chosen(PACED, config), paced_mesh(config))):
            if cases:
                await run_on_mesh(cases, mesh, config, measured, console)
    return report_of(measured, vocabulary)


def chosen(cases: Sequence[FrontendCase], config: FrontendBenchConfig) -> list[FrontendCase]:
    return [case.scaled(config.scale) for case in cases if not config.case or case.name in config.case]


def burst_mesh(config: FrontendBenchConfig) -> ClusterConfig:
    """Return a mesh whose workers are never the bottleneck: no delay, and room for every case on each worker."""
    return ClusterConfig(
        UpConfig(
            engine="mock",
            port=0,
            prefill=0,
            decode=0,
            aggregated=4,
            model_path=config.model,
            mesh_tls=config.mesh_tls,
            drain_timeout_s=1.0,
            log_level="warning",
        ),
        worker={
            "mock_speedup": 0,
            "num_blocks": 16384,
            "max_num_seqs": 64,
            "max_step_tokens": 65536,
            "kv_transfer": "shm",
        },
    )


def paced_mesh(config: FrontendBenchConfig) -> ClusterConfig:
    burst = burst_mesh(config)
    return ClusterConfig(burst.up, worker={**burst.worker, "mock_itl_ms": PACE_MS})


async def run_on_mesh(
    cases: Sequence[FrontendCase],
    mesh: ClusterConfig,
    config: FrontendBenchConfig,
    measured: MeasuredCases,
    console: Console,
) -> None:
    def tell(line: str) -> None:
        console.print(line, highlight=False)

    async with running_cluster(mesh, tell) as cluster:
        await cluster.until_ready(tell)
        pid = cluster.supervisor.pid("frontend")
        if pid is None:
            raise EngineError("the frontend has died", hint=f"see {cluster.run_dir}/logs")
        await run_cases(cases, BenchServer(cluster.url, cluster.model, pid), config, measured, console)


async def run_cases(
    cases: Sequence[FrontendCase],
    server: BenchServer,
    config: FrontendBenchConfig,
    measured: MeasuredCases,
    console: Console,
) -> None:
    """All cases in turn, and that `runs` times, so that a slow minute of the machine does not hit one case alone."""
    for run in range(config.runs):
        for case in cases:
            outcome = await apart(run_case, case, server, config.model, run)
            measured.outcomes.setdefault(case.name, []).append(outcome)
            console.print(f"{case.name}: {said(outcome)}", highlight=False)
    measured.rss_mib.append(rss_mib(trees([server.pid])))


def run_case(case: FrontendCase, server: BenchServer, tokenizer: str, seed: int) -> LoadOutcome:
    """Make the bodies of the requests, in the process of the load."""
    prompts = make_prompts(
        load_tokenizer(tokenizer), seed, case.warmup + case.requests, case.prompt_tokens, case.shared_tokens, GROUPS
    )
    return run_load(
        ClientLoad(
            url=f"{server.url}/v1/chat/completions",
            bodies=[body_of(case, server.model, prompt) for prompt in prompts],
            warmup=case.warmup,
            concurrency=case.concurrency,
            stream=case.stream,
            output_tokens=case.output_tokens,
            pid=server.pid,
            with_pids=(os.getppid(),),  # this benchmark, and the mesh it has started
        )
    )


def body_of(case: FrontendCase, model: str, prompt: str) -> bytes:
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": case.output_tokens,
        "ignore_eos": True,
        "stream": case.stream,
    }
    return msgspec.json.encode(body | ({"stream_options": {"include_usage": True}} if case.stream else {}))


def model_at(url: str) -> str:
    """The first model that a server names. Raises ConfigError if there is none to ask for."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=5) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{url} names no model: {error!r}", hint="start the server, and give --url without a path"
        ) from error


# --- what it gave -----------------------------------------------------------------------------------------


def report_of(measured: MeasuredCases, vocabulary: int) -> FrontendReport:
    cases = {case.name: case for case in (*BURST, *PACED)}

    def median(name: CaseName, figure: Callable[[LoadOutcome], float | None]) -> float | None:
        figures = [value for outcome in measured.outcomes.get(name, []) if (value := figure(outcome)) is not None]
        return round(statistics.median(figures), 4) if figures else None

    def cpu_per_token_us(name: CaseName) -> float | None:
        return median(name, lambda outcome: 1000 * cpu_ms(outcome) / cases[name].output_tokens)

    return FrontendReport(
        a64_cpu_ms=median("a64", cpu_ms),
        b64_cpu_us_per_token=cpu_per_token_us("b64"),
        b64_paced_cpu_us_per_token=cpu_per_token_us("b64_paced"),
        b64_paced_itl_p99_ms=median("b64_paced", lambda outcome: quantile_ms(outcome.gaps_s, 0.99)),
        c16_cpu_ms=median("c16", cpu_ms),
        cp16_cpu_ms=median("cp16", cpu_ms),
        c1s_ttft_p50_ms=median("c1s", lambda outcome: quantile_ms(outcome.ttft_s, 0.5)),
        rss_mib=round(max(measured.rss_mib), 1) if measured.rss_mib else None,
        errors=sum(len(outcome.failures) for outcomes in measured.outcomes.values() for outcome in outcomes),
        others_cores=others_cores(measured),
        machine=f"{os.cpu_count()} x {cpu_name()}",
        vocabulary=vocabulary,
    )


def others_cores(measured: MeasuredCases) -> float | None:
    """The median over all runs of all cases."""
    cores = [outcome.others_s / outcome.wall_s for outcomes in measured.outcomes.values() for outcome in outcomes]
    return round(statistics.median(cores), 2) if cores else None


def cpu_ms(outcome: LoadOutcome) -> float:
    """Return the server's CPU time per request."""
    return 1000 * outcome.cpu_s / outcome.requests


def quantile_ms(values_s: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed."""
    if not values_s:
        return None
    return 1000 * sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))]


def said(outcome: LoadOutcome) -> str:
    """Return one line about a run, with the first failures."""
    parts = [
        f"{outcome.requests / outcome.wall_s:,.0f} requests/s",
        f"{cpu_ms(outcome):.3f} ms CPU per request",
        *(
            f"{name} p50 {quantile_ms(values, 0.5):.2f} ms, p99 {quantile_ms(values, 0.99):.2f} ms"
            for name, values in (("first token", outcome.ttft_s), ("gap", outcome.gaps_s))
            if values
        ),
    ]
    parts.append(f"{outcome.others_s / outcome.wall_s:.2f} cores busy with other programs")
    failures = [f"\n  failed: {failure}" for failure in outcome.failures[:SHOWN_FAILURES]]
    return ", ".join(parts) + "".join(failures)


def table_of(report: FrontendReport) -> Table:
    title = f"{report.machine}, {report.others_cores} cores busy with other programs, vocabulary of {report.vocabulary}"
    table = Table(title=title, title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, (text, unit, goal) in GOALS.items():
        value = getattr(report, name)
        table.add_row(text, "" if value is None else f"{value:g} {unit}", f"<= {goal:g} {unit}")
    return table
