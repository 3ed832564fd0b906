"""Generated flags: `kvmesh profile plan` writes flags that their parsers read with the intended values."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.profiler.deployment.chart import chart_values
from kvmesh.profiler.deployment.compose import compose_override
from kvmesh.profiler.deployment.deployment import Deployment, sizing_flags, warnings_of
from kvmesh.profiler.deployment.planner_settings import planner_toml
from kvmesh.profiler.picks import Goal, Option
from kvmesh.protocol.messages import Role
from kvmesh.protocol.profile import Profile
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig, with_engine_args
from kvmesh.workers.engines.registry import STARTED
from kvmesh.workers.engines.sglang.arguments import EventEndpoints, argv_of, read_flags
from kvmesh.workers.engines.trtllm.arguments import prune, read_arguments
from kvmesh.workers.engines.vllm.arguments import Surroundings, plan_start
from tests.support.chart import container_of, find_tool, in_a_pod, rendered

ENGINES = ("torch", "mock", "vllm", "sglang", "trtllm")
MAPPINGS = ("tp1", "tp4", "tep4", "dep4")
BATCH = 100
PREFIX = "KVMESH_WORKER_"
# Fields of TensorRT-LLM's TorchLlmArgs that our worker or the generated flags set.
TRTLLM_FIELDS = frozenset(
    [
        *("model", "backend", "kv_cache_config", "enable_iter_perf_stats", "cache_transceiver_config"),
        *("tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp", "max_batch_size"),
    ]
)


def profile_of(engine: str, mapping: str) -> Profile:
    gpus = int("".join(char for char in mapping if char.isdigit()))
    return Profile(model="m", engine=engine, device="H100", mapping=mapping, gpus=gpus, total_kv_tokens=100_000)


def deployment_of(engine: str, mapping: str) -> Deployment:
    goal = Goal(ttft_slo_s=0.5, itl_slo_s=0.02, isl_tokens=3000, osl_tokens=300, gpus=16)
    option = Option(
        prefill_mapping=mapping,
        decode_mapping=mapping,
        prefill_workers=1,
        decode_workers=2,
        gpus=12,
        batch=BATCH,
        rps=1.0,
        ttft_s=0.2,
        itl_s=0.01,
        tokens_s_gpu=1.0,
        tokens_s_user=1.0,
        meets_ttft=True,
        meets_itl=True,
    )
    profile = profile_of(engine, mapping)
    return Deployment(
        option=option, prefill=profile, decode=profile, goal=goal, image="registry/engine:1", model_path="/models/m"
    )


def compose_commands(deployment: Deployment) -> dict[str, list[str]]:
    """Return the worker flags of each role in the compose override."""
    services = yaml.safe_load(compose_override(deployment))["services"]
    commands = {}
    for role in ("prefill", "decode"):
        line = services[role]["command"][2].replace("$$(hostname -i)", "10.0.0.7").replace("$$(hostname)", "abc")
        words = shlex.split(line)
        assert words[:3] == ["exec", "kvmesh", "worker"]
        commands[role] = words[3:]
    return commands


def chart_commands(deployment: Deployment, folder: Path) -> dict[str, list[str]]:
    """Return the worker flags of each role that the chart makes of the values. Its settings are flags here, too."""
    file = folder / "values.yaml"
    file.write_text(chart_values(deployment))
    objects = rendered(str(file))
    found = {}
    for role in ("prefill", "decode"):
        container = container_of(objects, f"demo-{role}")
        argv, environ = in_a_pod(container)
        own = {key: text for key, text in environ.items() if key.startswith(PREFIX)}
        settings = [f"--{key.removeprefix(PREFIX).lower().replace('_', '-')}={text}" for key, text in own.items()]
        found[role] = [*settings, *with_engine_args(argv)]
    return found


def read_worker(flags: Sequence[str]) -> WorkerConfig:
    return load(WorkerConfig, flags, {}, prefix="KVMESH_WORKER_", prog="test")


def started_with(config: WorkerConfig) -> dict[str, Any]:
    """Return what the engine itself is started with, by the name of the setting that all engines share."""
    match config.engine:
        case "vllm":
            given = flags_by_name(plan_start(config, "m", [], Surroundings(5600, num_cpus=8)).flags)
            return {
                "tensor parallel": int(given["--tensor-parallel-size"]),
                "ranks": int(given.get("--data-parallel-size", "1")),
                "experts apart": "--enable-expert-parallel" in given,
                "batch of a rank": int(given.get("--max-num-seqs", "0")),
            }
        case "sglang":
            endpoints = EventEndpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
            given = flags_by_name(argv_of(config, read_flags(config), "m", endpoints))
            ranks = int(given.get("--dp-size", "1"))
            assert ("--enable-dp-attention" in given) == (ranks > 1)
            return {
                "tensor parallel": int(given["--tp-size"]) // ranks,  # SGLang counts the GPUs of all ranks
                "ranks": read_flags(config).dp_size,
                "experts apart": int(given.get("--ep-size", "1")) > 1,
                "batch of a rank": int(given.get("--max-running-requests", "0")) // ranks,
            }
        case "trtllm":
            arguments = read_arguments(config)
            kwargs, removed = prune(arguments, TRTLLM_FIELDS)
            assert removed == []
            return {
                "tensor parallel": kwargs["tensor_parallel_size"] // arguments.ranks,
                "ranks": arguments.ranks,
                "experts apart": kwargs.get("moe_expert_parallel_size", 1) > 1,
                "batch of a rank": kwargs.get("max_batch_size", 0),
            }
    assert config.engine_args == ""
    return {}


def flags_by_name(flags: Sequence[str]) -> dict[str, str]:
    """Return the values of flags written as `--name value`, `--name=value` or `--name`."""
    found: dict[str, str] = {}
    for number, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            continue
        assert name not in found, f"{name} is given twice"
        following = flags[number + 1] if number + 1 < len(flags) else "--"
        found[name] = value if equals else "" if following.startswith("--") else following
    return found


MEANT = {
    "tp1": {"tensor parallel": 1, "ranks": 1, "experts apart": False},
    "tp4": {"tensor parallel": 4, "ranks": 1, "experts apart": False},
    "tep4": {"tensor parallel": 4, "ranks": 1, "experts apart": True},
    "dep4": {"tensor parallel": 1, "ranks": 4, "experts apart": True},
}


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_generated_worker_starts_its_engine_as_the_mapping_says(
    engine: str, mapping: str, tmp_path: Path
) -> None:
    deployment = deployment_of(engine, mapping)
    generated = [compose_commands(deployment)]
    generated += [chart_commands(deployment, tmp_path)] if find_tool("helm") else []
    for commands in generated:
        for role in ("prefill", "decode"):
            config = read_worker(commands[role])
            assert (config.engine, config.role, config.model_path) == (engine, Role(role), "/models/m")
            started = started_with(config)
            if started:
                batch = BATCH // MEANT[mapping]["ranks"] if role == "decode" else 0
                assert started == MEANT[mapping] | {"batch of a rank": batch}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_generated_planner_files_are_read(engine: str, tmp_path: Path) -> None:
    deployment = deployment_of(engine, "tp4")
    for connector in ("compose", "kubernetes"):
        file = tmp_path / f"{connector}.toml"
        file.write_text(planner_toml(deployment, "/etc/profiles", connector))
        flags = ["--config", str(file)]
        read = load(ServiceConfig, flags, {}, prefix="KVMESH_PLANNER_", prog="test", section="planner")
        kind = {"compose": "virtual"}.get(connector, connector)
        assert (read.connector, read.max_gpus, read.ttft_slo_s) == (kind, 16, 0.5)


def test_the_generated_compose_file_has_one_slo_for_all_parts() -> None:
    services = yaml.safe_load(compose_override(deployment_of("vllm", "tp4")))["services"]
    frontend, router = (services[part]["environment"] for part in ("frontend", "router"))
    read = load(FrontendConfig, [], frontend, prefix="KVMESH_FRONTEND_", prog="test")
    assert (read.slo_ttft_s, read.slo_itl_s) == (0.5, 0.02)
    assert load(RouterConfig, [], router, prefix="KVMESH_ROUTER_", prog="test").slo_itl_s == 0.02


def test_more_vllm_ranks_than_a_worker_takes_are_warned_of() -> None:
    assert [reason.code for reason in warnings_of(deployment_of("vllm", "dep64"))] == []
    assert [reason.code for reason in warnings_of(deployment_of("vllm", "dep128"))] == ["dep", "dep"]


@pytest.mark.parametrize(("batch", "most"), [(8, "8"), (1000, "256"), (0, "256")])
def test_our_own_engines_run_at_most_the_planned_batch(batch: int, most: str) -> None:
    for engine in ("torch", "mock"):
        flags = sizing_flags(profile_of(engine, "tp1"), batch)
        assert flags == ["--max-num-seqs", most, "--max-step-tokens", "8192"]


def test_every_started_engine_is_deployed() -> None:
    assert set(ENGINES) == set(STARTED)
