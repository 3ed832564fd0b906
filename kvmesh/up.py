"""`kvmesh up`: a mesh on this host until Ctrl-C."""

import asyncio
import json
import os
import time
from collections.abc import Sequence

from rich.console import Console

from cluster.local import Cluster, UpConfig, running_cluster
from mesh.config import config_path, load
from mesh.lifecycle import run
from planner.config import ServiceConfig
from protocol.errors import ConfigError

PLANNER_FLAG = "--planner-"


def main(argv: list[str]) -> int:
    own, for_planner = split_flags(argv)
    config = load(
        UpConfig,
        own,
        os.environ,
        prefix="KVMESH_UP_",
        prog="kvmesh up",
        description="Run a mesh on this host until Ctrl-C. The router reads KVMESH_ROUTER_* and [router] of --config.",
        section="up",
    )
    console = Console(highlight=False)
    config_file = config_path(own, os.environ, "KVMESH_UP_")
    planner = planner_config(config, for_planner, config_file)
    return run(lambda stop: up(config, stop, console, config_file, planner))


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of `up`, and those of its planner: `--planner-ttft-slo-s 1` is that one's `--ttft-slo-s 1`."""
    own: list[str] = []
    others: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        no, flag = ("--no-", word.replace("--no-", "--", 1)) if word.startswith("--no-planner-") else ("--", word)
        if not flag.startswith(PLANNER_FLAG):
            own.append(word)
            continue
        others.append(no + flag.removeprefix(PLANNER_FLAG))
        if "=" not in word and words and not words[0].startswith("--"):
            others.append(words.pop(0))
    return own, others


def planner_config(config: UpConfig, argv: Sequence[str], config_file: str) -> ServiceConfig | None:
    """None if there is to be no planner. Raises ConfigError."""
    if not config.planner:
        if argv:
            raise ConfigError(f"{PLANNER_FLAG}{argv[0].removeprefix('--')} without a planner", hint="add --planner")
        return None
    if config.aggregated and config.prefill + config.decode:
        raise ConfigError(
            f"a planner scales prefill and decode workers, or aggregated ones: there are {config.prefill}, "
            f"{config.decode} and {config.aggregated}",
            hint="leave --aggregated out, or add --prefill 0 --decode 0",
        )
    file_flags = ["--config", config_file] if config_file else []
    mode = "aggregated" if config.aggregated else "disaggregated"
    planner = load(
        ServiceConfig,
        [*file_flags, *argv],
        {"KVMESH_PLANNER_CONNECTOR": "local", "KVMESH_PLANNER_MODE": mode, **os.environ},
        prefix="KVMESH_PLANNER_",
        prog="kvmesh up --planner",
        section="planner",
        foreign=("KVMESH_PLANNER_EXPLAIN_",),
    )
    if planner.mode != mode:
        raise ConfigError(
            f"the planner is to size {planner.mode} workers, the mesh has {mode} ones", hint="leave --planner-mode out"
        )
    return planner


async def up(
    config: UpConfig,
    stop: asyncio.Event,
    console: Console,
    config_file: str = "",
    planner: ServiceConfig | None = None,
) -> None:
    started = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {line}", soft_wrap=True)

    check_counts(config)
    parts = {"prefill": config.prefill, "decode": config.decode, "aggregated": config.aggregated}
    tell("starting a frontend and " + ", ".join(f"{n} {role}" for role, n in parts.items() if n) + " workers")
    async with running_cluster(config, tell, config_file, planner) as cluster:
        ready = asyncio.create_task(cluster.until_ready(tell), name="wait until ready")
        stopping = asyncio.create_task(stop.wait(), name="wait for Ctrl-C")
        failing = asyncio.create_task(cluster.supervisor.failed.wait(), name="wait for a failure")
        try:
            await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                show_how_to_use(cluster, console)
                await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ready, stopping, failing):
                task.cancel()
            await asyncio.wait({ready, stopping, failing})
        if cluster.supervisor.failure is not None and not stop.is_set():
            raise cluster.supervisor.failure
        tell(f"draining: requests in progress have {config.drain_timeout_s:g} s; Ctrl-C again stops at once")
    tell("stopped")


def check_counts(config: UpConfig) -> None:
    """Raises ConfigError if nobody could ever answer."""
    if config.decode + config.aggregated == 0:
        raise ConfigError("no worker would decode", hint="set --decode or --aggregated to 1 or more")


def show_how_to_use(cluster: Cluster, console: Console) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": cluster.model, "stream": True, "max_tokens": 200, "messages": messages}
    explain = f"\n  planner  kvmesh planner explain --changes --record-file {cluster.planner_record}"
    console.print(
        f"""
[bold green]The mesh is up.[/bold green]  Ctrl-C stops it.

  curl -N {cluster.url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{json.dumps(body)}'

  from openai import OpenAI
  client = OpenAI(base_url="{cluster.url}/v1", api_key="none")
  answer = client.chat.completions.create(
      model="{cluster.model}", max_tokens=200, messages=[{{"role": "user", "content": "Tell me a story."}}])

  logs     {cluster.run_dir}/logs
  workers  join it with --discovery file:{cluster.run_dir}/discovery
  control  curl --unix-socket {cluster.control.removeprefix("unix:")} http://localhost/workers
  metrics  {cluster.url}/metrics{explain if cluster.planner_record else ""}
""",
        soft_wrap=True,
        markup=True,
    )
