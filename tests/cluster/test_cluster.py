"""Which processes `kvmesh up` starts, and with which settings."""

from pathlib import Path

import pytest

from cluster.local import UpConfig, process_specs
from mesh.config import load
from workers.config import WorkerConfig


def workers_of(config: UpConfig) -> list[WorkerConfig]:
    """The settings that the worker processes will read."""
    specs = process_specs(config, Path("/run"))
    commands = [spec.argv for spec in specs if spec.argv[:2] == ["-m", "workers"]]
    return [load(WorkerConfig, argv[2:], {}, prefix="KVMESH_WORKER_", prog="worker") for argv in commands]


def test_there_is_a_process_for_each_worker_behind_one_frontend() -> None:
    names = [spec.name for spec in process_specs(UpConfig(prefill=1, decode=2, aggregated=1), Path("/run"))]
    assert names == ["frontend", "prefill-0", "decode-0", "decode-1", "aggregated-0"]
    remote = [spec.name for spec in process_specs(UpConfig(router="remote", decode=0), Path("/run"))]
    assert remote == ["frontend", "router", "prefill-0"]


@pytest.mark.parametrize("name", ["loras", "tool_parser", "reasoning_parser"])
def test_what_a_model_can_do_is_told_to_every_worker(name: str) -> None:
    config = load(UpConfig, [f"--{name.replace('_', '-')}", "x"], {}, prefix="KVMESH_UP_", prog="up")
    workers = workers_of(config)
    assert len(workers) == 3
    assert {getattr(worker, name) for worker in workers} == {"x"}
    assert {getattr(worker, name) for worker in workers_of(UpConfig())} == {""}
