"""Tests of docker-compose.planner.yml: the services that a planner scales, and their workers' flags."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.config import load
from planner.config import ServiceConfig
from workers.config import WorkerConfig

ROOT = Path(__file__).parent.parent.parent
FIXED: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
SCALED: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.planner.yml").read_text())["services"]


def worker(service: str) -> WorkerConfig:
    """The settings that a container of this service reads."""
    shell, flag, line = SCALED[service]["command"]
    assert (shell, flag) == ("sh", "-c")
    words = shlex.split(line.replace("$$(hostname -i)", "10.0.0.7").replace("$$(hostname)", "c0ffee"))
    assert words[:4] == ["exec", "python", "-m", "workers"]
    return load(WorkerConfig, words[4:], {}, prefix="KVMESH_WORKER_", prog="worker")


def test_a_planner_finds_its_services_without_being_told() -> None:
    config = ServiceConfig()
    assert {config.compose_prefill, config.compose_decode} == set(SCALED) - set(FIXED)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_container_has_its_own_worker_name_and_address(role: str) -> None:
    config = worker(role)
    assert (config.role, config.name, config.advertise_host) == (role, f"{role}-c0ffee", "10.0.0.7")
    fixed = load(WorkerConfig, FIXED[f"{role}-0"]["command"][3:], {}, prefix="KVMESH_WORKER_", prog="worker")
    for name in ("model_path", "model", "host", "discovery", "metrics_port"):
        assert getattr(config, name) == getattr(fixed, name)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_healthy_while_its_card_is_there(role: str) -> None:
    kind, line = SCALED[role]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    assert f"workers%2F{role}-$$(hostname)-*" in line


def test_workers_of_fixed_names_are_not_started() -> None:
    assert all(SCALED[name]["profiles"] == ["fixed"] for name in FIXED if name != "frontend")


def test_a_planner_on_this_host_reads_the_meeting_folder() -> None:
    places = {tuple(SCALED[name]["volumes"]) for name in ("frontend", "prefill", "decode")}
    assert places == {("./.run/compose:/run/kvmesh",)}
