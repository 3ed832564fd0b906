"""Run `kvmesh up`: a mesh on this host until Ctrl-C."""

import asyncio
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from kvmesh.cluster.config import ENV_PREFIX, ClusterConfig, UpConfig, load_cluster
from kvmesh.cluster.processes import own_profile
from kvmesh.cluster.running import Cluster, running_cluster
from kvmesh.commands.welcome import RunningMesh, welcome
from kvmesh.mesh.config import config_path, load
from kvmesh.mesh.lifecycle import run
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.profiles import open_profiles
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import with_engine_args
from kvmesh.workers.weights_service import weights_service

PLANNER_FLAG = "--planner-"


def main(argv: list[str]) -> int:
    own, for_planner = split_flags(with_engine_args(argv))
    config = load_cluster(own, os.environ)
    console = Console(highlight=False)
    config_file = config_path(own, os.environ, ENV_PREFIX)
    planner = planner_config(config.up, for_planner, config_file)
    if planner is not None:
        check_profile(config, planner)
    return run(lambda stop: up(config, stop, console, config_file, planner))


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the flags: those of `up`, and those of its planner, where `--planner-max-gpus` becomes `--max-gpus`."""
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
    """Return the planner's settings, None without a planner. Raises ConfigError."""
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
    with in_flags_of_up():
        planner = load(
            ServiceConfig,
            [*file_flags, *argv],
            {"KVMESH_PLANNER_CONNECTOR": "local", "KVMESH_PLANNER_MODE": mode, **os.environ},
            prefix="KVMESH_PLANNER_",
            prog="kvmesh planner",
            section="planner",
            foreign=("KVMESH_PLANNER_EXPLAIN_",),
        )
    if planner.mode != mode:
        raise ConfigError(
            f"the planner is to size {planner.mode} workers, the mesh has {mode} ones", hint="leave --planner-mode out"
        )
    return planner


@contextmanager
def in_flags_of_up() -> Iterator[None]:
    """Let an error of the planner's settings name the flags of `up`: `--max-gpus` is `--planner-max-gpus` there."""
    try:
        yield
    except ConfigError as error:
        text = re.sub(r"(?<![\w-])--(no-)?(?!help\b|config\b)(?=\w)", r"--\1planner-", str(error))
        raise ConfigError(text) from error


def check_profile(config: ClusterConfig, planner: ServiceConfig) -> None:
    """Raise ConfigError if the planner has no usable profile of the workers."""
    if planner.prefill_profile:
        with in_flags_of_up():
            open_profiles(planner)
    elif own_profile(config, planner.start_s) is None:
        raise ConfigError(
            f"how many requests a worker of {config.model} takes is not known to the planner",
            hint=f"measure it with `kvmesh profile measure`, and give the file with {PLANNER_FLAG}prefill-profile",
        )


async def up(
    config: ClusterConfig,
    stop: asyncio.Event,
    console: Console,
    config_file: str = "",
    planner: ServiceConfig | None = None,
) -> None:
    started = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/dim]  {line}", soft_wrap=True)

    asked = config.up
    check_counts(asked)
    check_memory(config)
    check_model(config.up)
    parts = {"prefill": asked.prefill, "decode": asked.decode, "aggregated": asked.aggregated}
    async with running_cluster(config, tell, config_file, planner) as cluster:
        tell("starting a frontend and " + ", ".join(f"{n} {role}" for role, n in parts.items() if n) + " workers")
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
        tell(f"draining: requests in progress have {asked.drain_timeout_s:g} s; Ctrl-C again stops at once")
    tell("stopped")


def check_counts(config: UpConfig) -> None:
    """Raise ConfigError if no worker could ever answer."""
    if config.decode + config.aggregated == 0:
        raise ConfigError("no worker would decode", hint="set --decode or --aggregated to 1 or more")


def check_model(config: UpConfig) -> None:
    """Raise ConfigError if the folder of the model has no tokenizer: neither frontend nor workers would start."""
    if config.engine in ("torch", "mock") and not (file := Path(config.model_path) / "tokenizer.json").is_file():
        raise ConfigError(f"there is no {file}", hint="give --model-path a folder with a tokenizer.json")


def check_memory(config: ClusterConfig) -> None:
    """Raise ConfigError for a memory service that no worker would use."""
    if not config.up.memory_gib:
        return
    if config.up.engine != "torch":
        raise ConfigError(f"--memory-gib is for --engine torch, not for {config.up.engine}", hint="leave it out")
    weights_service()  # raises without the extension
    if config.worker.get("weights_service"):
        raise ConfigError("--memory-gib starts a memory service, --weights-service names another", hint="leave one out")


def program_name() -> str:
    """Return how a shell in this folder starts this kvmesh."""
    own = Path(sys.executable).parent / "kvmesh"
    if shutil.which("kvmesh") == str(own):
        return "kvmesh"
    if not own.exists():
        return f"{shlex.quote(sys.executable)} -m kvmesh"
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)


def show_how_to_use(cluster: Cluster, console: Console) -> None:
    mesh = RunningMesh(
        url=cluster.url,
        model=cluster.model,
        run_dir=cluster.run_dir,
        control=cluster.control.removeprefix("unix:"),
        frontend=cluster.frontend,
        pids={card.name: card.pid for card in cluster.cards.values()},
        mesh_url=cluster.mesh_url,
        operator_tls=str(cluster.credentials.folder) if cluster.credentials is not None else "",
        planner_record=cluster.planner_record,
        program=program_name(),
    )
    console.print("\n[bold green]The mesh is up.[/bold green]  Ctrl-C stops it.\n", soft_wrap=True)
    console.print(welcome(mesh) + "\n", soft_wrap=True, markup=False)
