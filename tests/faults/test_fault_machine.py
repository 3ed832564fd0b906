"""The short lane of the fault machine: a small mesh under some faults of all kinds."""

import os
from pathlib import Path

import pytest

from kvmesh.lab.faults.schedule import MeshShape, TrafficMix, plan, written
from tests.faults.machine import MUST_BE_ZERO, counts, run_faults

SMALL = MeshShape(frontends=2, routers=1, prefill=1, decode=2, etcd=False, nats=False)
SECONDS = 6.0


@pytest.mark.e2e
@pytest.mark.long
def test_a_small_mesh_survives_a_short_schedule(tmp_path: Path) -> None:
    seed = int(os.environ.get("KVMESH_FAULT_SEED", 1))
    print(f"seed {seed}")
    schedule = plan(seed, SECONDS, mesh=SMALL, traffic=TrafficMix(clients=6))
    (tmp_path / "schedule.json").write_bytes(written(schedule))
    report = run_faults("--schedule", str(tmp_path / "schedule.json"))
    assert counts(report) == dict.fromkeys(MUST_BE_ZERO, 0), report["problems"]
    assert report["seed"] == seed
    assert report["requests"] > 20
    assert sum(report["faults"].values()) + len(report["skipped"]) > 0
