"""Run `kvmesh demo`: start a mesh of processes, send real requests over HTTP, show what happened to them."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from kvmesh.cluster.config import ClusterConfig, ClusterTls, UpConfig
from kvmesh.cluster.running import Cluster, running_cluster
from kvmesh.mesh.config import load
from kvmesh.mesh.lifecycle import run, unless_stopped
from kvmesh.protocol.errors import EngineError

GUIDE = (
    "You are a friendly guide. You explain how things work in simple words, one step after the other, so that a "
    "child can follow you. You never hurry, and you always end with a full sentence."
)
QUESTION = "What does the router do?"
FOLLOW_UP = "Thank you! And what does the planner do?"


class DemoConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_DEMO_<NAME>`, that over the TOML file of `--config`, that over the default."""

    json: Annotated[bool, Meta(description="the last line is one JSON object; progress goes to stderr")] = False
    max_tokens: Annotated[int, Meta(ge=2, description="length of an answer, at most")] = 120
    engine: Annotated[Literal["torch", "mock"], Meta(description="what computes")] = "torch"
    kv_transfer: Annotated[Literal["auto", "nixl", "shm"], Meta(description="how KV moves between workers")] = "auto"
    mesh_tls: ClusterTls = ""
    device: Annotated[str, Meta(description="torch: cpu, cuda, cuda:<n> or auto")] = "auto"


@dataclass(slots=True)
class DemoAnswer:
    """Hold one chat completion as the client saw it."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    trace: dict[str, Any] = field(default_factory=dict)


class DemoReport(Struct, frozen=True, kw_only=True):
    """The last line of `kvmesh demo --json`."""

    ok: bool
    problems: list[str]
    model: str
    prefill_worker: str | None
    decode_worker: str | None
    transfer: str | None
    kv_bytes_pulled: int
    matches_aggregated: bool
    cached_tokens_second_turn: int
    second_turn_worker: str | None
    ttft_ms: float
    itl_ms: float
    prompt_tokens: int
    completion_tokens: int
    startup_s: float
    text: str


def main(argv: list[str]) -> int:
    config = load(
        DemoConfig,
        argv,
        os.environ,
        prefix="KVMESH_DEMO_",
        prog="kvmesh demo",
        description="Start a mesh on this host, send it real requests, show what happened, stop it.",
        section="demo",
    )
    console = Console(stderr=config.json, highlight=False)
    return run(lambda stop: demo(config, stop, console))


async def demo(config: DemoConfig, stop: asyncio.Event, console: Console) -> int:
    """Return 0 if every check of the demo holds, else 1."""
    report = await unless_stopped(show(config, console), stop, lambda: console.print("stopping"))
    if report is None:
        return 130
    if config.json:
        print(msgspec.json.encode(report).decode(), flush=True)
    return 0 if report.ok else 1


async def show(config: DemoConfig, console: Console) -> DemoReport:
    started = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {line}", soft_wrap=True)

    tell("starting a frontend with a router inside, 1 prefill worker and 2 decode workers, each a process of its own")
    up = ClusterConfig(
        UpConfig(engine=config.engine, port=0, mesh_tls=config.mesh_tls),
        worker={"kv_transfer": config.kv_transfer, "device": config.device},
    )
    async with running_cluster(up, tell) as cluster:
        await cluster.until_ready(tell)
        startup_s = time.monotonic() - started
        report = await converse(config, cluster, console, startup_s)
        tell("stopping")
    tell("stopped: no process and no file is left")
    return report


async def converse(config: DemoConfig, cluster: Cluster, console: Console, startup_s: float) -> DemoReport:
    async with aiohttp.ClientSession(base_url=cluster.url) as http:
        question = [{"role": "system", "content": GUIDE}, {"role": "user", "content": QUESTION}]
        console.print("\n[bold]1. A chat completion[/bold], its prompt computed on one worker, its answer on another\n")
        console.print(f"[dim]system:[/dim] {GUIDE}\n[dim]user:[/dim] {QUESTION}\n[dim]assistant:[/dim] ", end="")
        first = await ask(http, config, cluster.model, question, {}, lambda text: console.out(text, end=""))
        console.print("\n")
        console.print("[bold]2. The same, computed plainly by one worker[/bold], nothing cached, nothing transferred")
        alone = {"kvmesh": {"disaggregate": False, "trace": True}, "cache_salt": f"plain-{os.getpid()}"}
        plain = await ask(http, config, cluster.model, question, alone, lambda text: None)
        same = plain.tokens == first.tokens
        console.print(f"   {len(plain.tokens)} tokens, {'all equal' if same else '[red]NOT equal[/red]'}\n")
        console.print("[bold]3. The second turn[/bold] of the conversation\n")
        console.print(f"[dim]user:[/dim] {FOLLOW_UP}\n[dim]assistant:[/dim] ", end="")
        turn = [*question, {"role": "assistant", "content": first.text}, {"role": "user", "content": FOLLOW_UP}]
        second = await ask(http, config, cluster.model, turn, {}, lambda text: console.out(text, end=""))
        console.print("\n")
    report = judge(cluster, first, plain, second, startup_s)
    console.print(table_of(report, first, second))
    for problem in report.problems:
        console.print(f"[red]not as it should be:[/red] {problem}")
    return report


async def ask(
    http: aiohttp.ClientSession,
    config: DemoConfig,
    model: str,
    messages: list[dict[str, str]],
    extra: dict[str, Any],
    on_text: Callable[[str], None],
) -> DemoAnswer:
    """Stream one greedy chat completion."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": config.max_tokens,
        "temperature": 0,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kvmesh": {"trace": True},
        **extra,
    }
    answer = DemoAnswer()
    sent = time.perf_counter()
    arrivals_s: list[float] = []
    async with http.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise EngineError(f"the frontend answered {response.status}: {await response.text()}")
        async for raw in response.content:
            line = raw.decode().strip()
            is_chunk = line.startswith("data: ") and line != "data: [DONE]"
            if is_chunk and take_chunk(answer, json.loads(line[6:]), on_text):
                arrivals_s.append(time.perf_counter() - sent)
    if arrivals_s:
        answer.ttft_ms = 1000 * arrivals_s[0]
        answer.itl_ms = 1000 * (arrivals_s[-1] - arrivals_s[0]) / max(1, len(answer.tokens) - 1)
    return answer


def take_chunk(answer: DemoAnswer, chunk: dict[str, Any], on_text: Callable[[str], None]) -> bool:
    """Add a chunk to the answer. Return whether the chunk has tokens."""
    if "error" in chunk:
        raise EngineError(f"the stream ended with an error: {chunk['error']}")
    answer.trace |= chunk.get("kvmesh") or {}
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    brought = False
    for choice in chunk.get("choices", []):
        if text := choice["delta"].get("content"):
            answer.text += text
            on_text(text)
        if logprobs := (choice.get("logprobs") or {}).get("content"):
            answer.tokens += [entry["token"] for entry in logprobs]
            brought = True
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return brought


def judge(cluster: Cluster, first: DemoAnswer, plain: DemoAnswer, second: DemoAnswer, startup_s: float) -> DemoReport:
    """Check what happened against what a mesh promises."""
    trace, problems = first.trace, []
    if not trace.get("prefill_worker"):
        problems.append(f"the first prompt was not computed on a prefill worker: {trace.get('route_reason')}")
    if not trace.get("kv_bytes_pulled"):
        problems.append(f"no KV was pulled: {trace.get('pull_error') or 'no reason given'}")
    if not first.text:
        problems.append("the answer is empty")
    if plain.trace.get("prefill_worker"):
        problems.append("the plain run was not plain")
    if plain.tokens != first.tokens:
        problems.append("disaggregated and aggregated tokens differ")
    if not second.cached_tokens:
        problems.append("the second turn found nothing cached")
    return DemoReport(
        ok=not problems,
        problems=problems,
        model=cluster.model,
        prefill_worker=trace.get("prefill_worker"),
        decode_worker=trace.get("decode_worker"),
        transfer=trace.get("transfer"),
        kv_bytes_pulled=trace.get("kv_bytes_pulled", 0),
        matches_aggregated=plain.tokens == first.tokens,
        cached_tokens_second_turn=second.cached_tokens,
        second_turn_worker=second.trace.get("decode_worker"),
        ttft_ms=round(first.ttft_ms, 2),
        itl_ms=round(first.itl_ms, 3),
        prompt_tokens=first.prompt_tokens,
        completion_tokens=len(first.tokens),
        startup_s=round(startup_s, 1),
        text=first.text,
    )


def table_of(report: DemoReport, first: DemoAnswer, second: DemoAnswer) -> Table:
    table = Table(title="What happened", show_header=True, title_justify="left")
    table.add_column("")
    table.add_column("first request")
    table.add_column("second turn")
    rows: list[tuple[str, object, object]] = [
        ("prompt computed by", report.prefill_worker, second.trace.get("prefill_worker") or report.second_turn_worker),
        ("answer computed by", report.decode_worker, report.second_turn_worker),
        ("KV moved", moved(first), moved(second)),
        ("prompt tokens", first.prompt_tokens, second.prompt_tokens),
        ("cached prompt tokens", first.cached_tokens, second.cached_tokens),
        ("tokens out", len(first.tokens), len(second.tokens)),
        ("TTFT", f"{first.ttft_ms:.1f} ms", f"{second.ttft_ms:.1f} ms"),
        ("ITL", f"{first.itl_ms:.2f} ms", f"{second.itl_ms:.2f} ms"),
        ("why there", first.trace.get("route_reason"), second.trace.get("route_reason")),
        ("equals the plain run", "yes, every token" if report.matches_aggregated else "NO", ""),
    ]
    for name, one, two in rows:
        table.add_row(name, str(one), str(two))
    return table


def moved(answer: DemoAnswer) -> str:
    num_bytes = answer.trace.get("kv_bytes_pulled", 0)
    return f"{num_bytes:,} bytes over {answer.trace.get('transfer')}" if num_bytes else "nothing"
