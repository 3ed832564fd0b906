"""Run `kvmesh lab bench engine`: measure what the mesh adds to vLLM, with the same requests to both in turn.

One side is `vllm serve` as anybody runs it, the other a frontend and a worker of ours that hosts vLLM; both are given
the same flags for vLLM and the same environment, and both stay up: while one is asked, the other is idle. Answers are
greedy, streamed, and all of one length. `kvmesh lab bench engine steps` measures the torch engine instead.
"""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import aiohttp
import msgspec
import psutil
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, UpConfig, served_name
from kvmesh.cluster.running import Cluster, running_cluster
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.bench.apart import apart
from kvmesh.commands.bench.machine import cpu_name
from kvmesh.commands.bench.prompts import load_tokenizer, make_prompts
from kvmesh.lab.bench import engine_steps, engine_versus
from kvmesh.lab.bench.frontend import quantile_ms
from kvmesh.lab.bench.load import ClientLoad, ClientWaits, LoadOutcome, run_in_turn, run_load, trees
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.config import load as load_config
from kvmesh.protocol.errors import ConfigError, EngineError
from kvmesh.workers.engines.vllm.driver import ONE_PROCESS

START_S = 300.0  # of the bare server; imports alone take a minute on a busy machine
STOP_S = 20.0
POLL_S = 0.2
SHOWN_FAILURES = 3
API_SERVER = "vllm.entrypoints.openai.api_server"  # what `vllm serve` runs; that command fails in vLLM's CPU package
PYTHON = "KVMESH_VLLM_PYTHON"
KVMESH, BARE = "kvmesh", "bare"

R = TypeVar("R")


class EngineBenchConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    model_path: Annotated[str, Meta(description="Hugging Face folder; default: the tiny model")] = str(CHECKPOINT_DIR)
    engine_args: Annotated[str, Meta(description="flags of vLLM for both sides, as for a shell")] = (
        "--dtype float32 --enforce-eager --max-model-len 1024"
    )
    isl_tokens: Annotated[int, Meta(ge=8, description="words of a prompt, in tokens, without the template")] = 128
    osl_tokens: Annotated[int, Meta(ge=2, description="length of every answer")] = 64
    concurrency: Annotated[int, Meta(ge=1, description="requests at once while throughput is measured")] = 8
    requests: Annotated[int, Meta(ge=1, description="of each side in a round of that")] = 32
    rounds: Annotated[int, Meta(ge=1, description="of throughput, each side once; the median ratio counts")] = 24
    pairs: Annotated[int, Meta(ge=1, description="requests alone on the machine, each asked of both sides")] = 100


class SideReport(Struct, frozen=True, kw_only=True):
    """Hold the figures of one side; `null`: not measured. Latency is of lone requests, CPU of the throughput rounds."""

    tokens_s: float | None
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    itl_p50_ms: float | None  # (end of the stream - first token) / (tokens - 1)
    itl_p90_ms: float | None
    cpu_us_per_token: dict[str, float]  # by process; "engine": all that vLLM has started below


class EngineBenchReport(Struct, frozen=True, kw_only=True):
    throughput_ratio: float | None  # kvmesh / bare, the median of the rounds
    added_ttft_p50_ms: float | None  # the median of the differences, request by request
    added_itl_p50_ms: float | None
    errors: int  # answers that were not 200, not complete, or not of the length asked for
    kvmesh: SideReport
    bare: SideReport
    throughput_ratios: list[float]  # of each round
    concurrency: int
    isl_tokens: int
    osl_tokens: int
    engine_args: str
    machine: str
    others_cores: float | None  # that other programs used meanwhile: latency means little above a few tenths


GOALS = {
    "throughput_ratio": ("throughput, kvmesh / bare", "", ">= 0.98"),
    "added_ttft_p50_ms": ("time to first token, added, p50", "ms", "<= 3 ms"),
    "added_itl_p50_ms": ("time per further token, added, p50", "ms", "<= 0.2 ms"),
    "errors": ("answers that failed", "", "0"),
}


def main(argv: list[str]) -> int:
    if argv[:1] == ["steps"]:
        return engine_steps.main(argv[1:])
    if argv[:1] == ["versus"]:
        return engine_versus.main(argv[1:])
    config = load_config(
        EngineBenchConfig,
        argv,
        os.environ,
        prefix="KVMESH_BENCH_",
        prog="kvmesh lab bench engine",
        description="Compare a mesh of one vLLM worker with the bare `vllm serve`. Both get the same flags and "
        "the same requests in turn; needs vLLM. `kvmesh lab bench engine steps` measures the torch engine "
        "beside the roofline of its device.",
        section="bench",
    )
    python = other_python(os.environ, importlib.util.find_spec("vllm") is not None)
    if python:
        return in_other_python(python, argv)
    for name, value in environment(config.engine_args, len(os.sched_getaffinity(0))).items():
        os.environ.setdefault(name, value)  # both sides inherit it
    report = asyncio.run(measure(config, Console(stderr=True)))
    Console().print(table_of(report))
    if config.json:
        print(json.dumps(msgspec.to_builtins(report)))
    return 0 if report.errors == 0 else 1


def other_python(environ: Mapping[str, str], has_vllm: bool) -> str:
    """The Python to run in; "": this one. Raises ConfigError if none has vLLM."""
    if has_vllm:
        return ""
    if python := environ.get(PYTHON, ""):
        return python
    raise ConfigError(
        "there is no vLLM to compare with in this Python",
        hint=f"`make .venv-vllm/.installed` installs it for the CPU (3.5 GB); then {PYTHON}=.venv-vllm/bin/python "
        "kvmesh lab bench engine. For a GPU: pip install vllm beside kvmesh. `kvmesh lab bench engine steps` needs "
        "none",
    )


def in_other_python(python: str, argv: Sequence[str]) -> int:
    """Run the benchmark in the Python that has vLLM. That Python looks for no other one."""
    environ = {name: value for name, value in os.environ.items() if name != PYTHON}
    try:
        return subprocess.run(
            [python, "-P", "-m", "kvmesh", "bench", "engine", *argv], env=environ, check=False
        ).returncode
    except OSError as error:
        raise ConfigError(f"{PYTHON} is {python!r}: {error.strerror}", hint="name a Python that has vLLM") from error


def environment(engine_args: str, num_cpus: int) -> dict[str, str]:
    """Return the environment that our worker sets for vLLM, so that the bare server gets the same.

    And 1 GiB of KV cache each on a CPU, where vLLM would take what it finds.
    """
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": str(max(1, num_cpus // 2)),
    }
    if "--enforce-eager" in shlex.split(engine_args):
        environ["TORCHDYNAMO_DISABLE"] = "1"
    return environ


# --- the two sides ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """Hold one side. `pids` names its processes; the processes that vLLM started below them are the engine."""

    url: str
    pids: Mapping[str, int]


@asynccontextmanager
async def running_mesh(config: EngineBenchConfig, console: Console) -> AsyncIterator[Side]:
    def tell(line: str) -> None:
        console.print(line, highlight=False)

    mesh = ClusterConfig(
        UpConfig(engine="vllm", port=0, prefill=0, decode=0, aggregated=1, model_path=config.model_path),
        worker={"engine_args": config.engine_args},
    )
    async with running_cluster(mesh, tell) as cluster:
        await cluster.until_ready(tell)
        [worker] = cluster.cards.values()
        yield Side(cluster.url, {"frontend": frontend_pid(cluster), "worker": worker.pid})


def frontend_pid(cluster: Cluster) -> int:
    pid = cluster.supervisor.pid("frontend")
    if pid is None:
        raise EngineError("the frontend has died", hint=f"see {cluster.run_dir}/logs")
    return pid


def executor_flags(engine_args: str) -> list[str]:
    """Return the flags of the bare server. On a CPU it uses the executor in its own process, as our worker does."""
    from vllm.platforms import current_platform

    has_ranks = re.search(r"--(distributed-executor-backend|[a-z-]*parallel-size)\b", engine_args)
    return [] if has_ranks or not current_platform.is_cpu() else ["--distributed-executor-backend", ONE_PROCESS]


@asynccontextmanager
async def running_bare(config: EngineBenchConfig, console: Console) -> AsyncIterator[Side]:
    """Run `vllm serve` on a free port until the block ends. Raises EngineError, and keeps the log, if it fails."""
    port = free_port()
    argv = ["-m", API_SERVER, "--model", config.model_path, "--served-model-name", model_name(config)]
    argv += ["--host", "127.0.0.1", "--port", str(port), *executor_flags(config.engine_args)]
    argv += shlex.split(config.engine_args)
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-bench-"))
    with (folder / "vllm.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(sys.executable, "-P", *argv, stdout=output, stderr=output)
    try:
        await until_healthy(process, f"http://127.0.0.1:{port}", folder / "vllm.log")
        console.print(f"vllm serve listens on port {port}", highlight=False)
        yield Side(f"http://127.0.0.1:{port}", {"server": process.pid})
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        await end(process)


async def until_healthy(process: asyncio.subprocess.Process, url: str, log_file: Path) -> None:
    deadline = asyncio.get_running_loop().time() + START_S
    async with aiohttp.ClientSession() as http:
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                raise EngineError(f"vllm serve ended with {process.returncode}", hint=f"see {log_file}")
            with suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(POLL_S)
    raise EngineError(f"vllm serve is not ready after {START_S:.0f} s", hint=f"see {log_file}")


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process and the processes below it, which may outlive it."""
    if process.returncode is not None:
        return
    below = trees([process.pid]) - {psutil.Process(process.pid)}
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    for left in below:
        with suppress(psutil.NoSuchProcess):
            left.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def model_name(config: EngineBenchConfig) -> str:
    return served_name("", config.model_path)


# --- measuring --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineRounds:
    """Hold, by side, the outcome of each round and the waits of the lone requests."""

    rounds: dict[str, list[LoadOutcome]] = field(default_factory=lambda: {KVMESH: [], BARE: []})
    waits: dict[str, ClientWaits] = field(default_factory=dict)


async def measure(config: EngineBenchConfig, console: Console) -> EngineBenchReport:
    measured = EngineRounds()
    async with AsyncExitStack() as running:
        console.print("starting both; vLLM takes its time")
        bare = await running.enter_async_context(running_bare(config, console))
        sides = {KVMESH: await running.enter_async_context(running_mesh(config, console)), BARE: bare}
        for number in range(config.rounds):
            for name in (KVMESH, BARE) if number % 2 == 0 else (BARE, KVMESH):
                outcome = await apart(throughput_of, config, sides[name], number)
                measured.rounds[name].append(outcome)
                console.print(f"round {number + 1}, {name}: {said(config, outcome)}", highlight=False)
        console.print("one request at a time", highlight=False)
        waits = await apart(latency_of, config, list(sides.values()), config.rounds)
        measured.waits = dict(zip(sides, waits, strict=True))
        for name, of_side in measured.waits.items():
            for failure in of_side.failures[:SHOWN_FAILURES]:
                console.print(f"{name} failed: {failure}", highlight=False)
    return report_of(config, measured)


def throughput_of(config: EngineBenchConfig, side: Side, seed: int) -> LoadOutcome:
    return run_load(load_on(config, side, seed, config.requests, config.concurrency))


def latency_of(config: EngineBenchConfig, sides: Sequence[Side], seed: int) -> list[ClientWaits]:
    return run_in_turn([load_on(config, side, seed, config.pairs, 1) for side in sides])


def load_on(config: EngineBenchConfig, side: Side, seed: int, requests: int, concurrency: int) -> ClientLoad:
    """Equal for equal seeds, whichever side it is for: no prompt is met twice on one side."""
    prompts = make_prompts(load_tokenizer(config.model_path), seed, concurrency + requests, config.isl_tokens)
    return ClientLoad(
        url=f"{side.url}/v1/chat/completions",
        bodies=[body_of(config, prompt) for prompt in prompts],
        warmup=concurrency,
        concurrency=concurrency,
        stream=True,
        output_tokens=config.osl_tokens,
        more_pids=tuple(side.pids.values()),
        alone=side.pids,
        with_pids=(os.getppid(),),  # this benchmark, and all it has started
    )


def body_of(config: EngineBenchConfig, prompt: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": model_name(config),
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": config.osl_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


# --- what it gave -----------------------------------------------------------------------------------------


def report_of(config: EngineBenchConfig, measured: EngineRounds) -> EngineBenchReport:
    rounds = zip(measured.rounds[KVMESH], measured.rounds[BARE], strict=True)
    ratios = [round(tokens_s(config, ours) / tokens_s(config, bare), 4) for ours, bare in rounds]
    outcomes = [outcome for of_side in measured.rounds.values() for outcome in of_side]
    failed = [len(outcome.failures) for outcome in outcomes] + [len(of.failures) for of in measured.waits.values()]
    others = [outcome.others_s / outcome.wall_s for outcome in outcomes]
    return EngineBenchReport(
        throughput_ratio=round(statistics.median(ratios), 4) if ratios else None,
        added_ttft_p50_ms=added_ms(measured.waits, lambda waits: waits.ttft_s),
        added_itl_p50_ms=added_ms(measured.waits, lambda waits: waits.itl_s),
        errors=sum(failed),
        kvmesh=side_report(config, measured.rounds[KVMESH], measured.waits[KVMESH]),
        bare=side_report(config, measured.rounds[BARE], measured.waits[BARE]),
        throughput_ratios=ratios,
        concurrency=config.concurrency,
        isl_tokens=config.isl_tokens,
        osl_tokens=config.osl_tokens,
        engine_args=config.engine_args,
        machine=f"{os.cpu_count()} x {cpu_name()}",
        others_cores=round(statistics.median(others), 2) if others else None,
    )


def side_report(config: EngineBenchConfig, rounds: Sequence[LoadOutcome], waits: ClientWaits) -> SideReport:
    ttft_s = [value for value in waits.ttft_s if value is not None]
    itl_s = [value for value in waits.itl_s if value is not None]
    return SideReport(
        tokens_s=round(statistics.median(tokens_s(config, outcome) for outcome in rounds), 1) if rounds else None,
        ttft_p50_ms=rounded(quantile_ms(ttft_s, 0.5)),
        ttft_p90_ms=rounded(quantile_ms(ttft_s, 0.9)),
        itl_p50_ms=rounded(quantile_ms(itl_s, 0.5)),
        itl_p90_ms=rounded(quantile_ms(itl_s, 0.9)),
        cpu_us_per_token=cpu_us_per_token(config, rounds),
    )


def cpu_us_per_token(config: EngineBenchConfig, rounds: Sequence[LoadOutcome]) -> dict[str, float]:
    """Over all rounds; what a prompt costs is spread over the tokens of its answer."""
    num_tokens = sum(outcome.requests for outcome in rounds) * config.osl_tokens
    seconds: dict[str, float] = {}
    for outcome in rounds:
        for name, value in outcome.alone_s.items():
            seconds[name] = seconds.get(name, 0.0) + value
    if rounds:
        seconds["engine"] = sum(outcome.cpu_s for outcome in rounds) - sum(seconds.values())
    return {name: round(1e6 * value / num_tokens, 1) for name, value in seconds.items()}


def added_ms(waits: Mapping[str, ClientWaits], figure: Callable[[ClientWaits], Sequence[float | None]]) -> float | None:
    """Compare the waits of the requests that both sides have answered."""
    pairs = zip(figure(waits[KVMESH]), figure(waits[BARE]), strict=True)
    added_s = [ours - bare for ours, bare in pairs if ours is not None and bare is not None]
    return round(1000 * statistics.median(added_s), 4) if added_s else None


def tokens_s(config: EngineBenchConfig, outcome: LoadOutcome) -> float:
    return outcome.requests * config.osl_tokens / outcome.wall_s


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def said(config: EngineBenchConfig, outcome: LoadOutcome) -> str:
    failures = [f"\n  failed: {failure}" for failure in outcome.failures[:SHOWN_FAILURES]]
    others = f"{outcome.others_s / outcome.wall_s:.2f} cores busy with other programs"
    return f"{tokens_s(config, outcome):,.1f} tokens/s, {others}" + "".join(failures)


def table_of(report: EngineBenchReport) -> Table:
    title = f"{report.machine}, {report.others_cores} cores busy with other programs; vLLM {report.engine_args}"
    table = Table(title=title, title_justify="left")
    for column in ("", "measured", "goal"):
        table.add_column(column)
    for name, (text, unit, goal) in GOALS.items():
        value = getattr(report, name)
        table.add_row(text, "" if value is None else f"{value:g} {unit}".strip(), goal)
    for side, figures in ((KVMESH, report.kvmesh), (BARE, report.bare)):
        cpu = ", ".join(f"{name} {value:g}" for name, value in figures.cpu_us_per_token.items())
        table.add_row(f"{side}: {report.concurrency} at once", f"{figures.tokens_s} tokens/s", "")
        table.add_row(f"{side}: alone", f"TTFT {figures.ttft_p50_ms} ms, ITL {figures.itl_p50_ms} ms (p50)", "")
        table.add_row(f"{side}: CPU per token", f"{cpu} µs", "")
    return table
