"""Without any one safeguard a mesh fails its drill, and with it the mesh does not: `make test-faults`."""

import os
from pathlib import Path

import pytest

from kvmesh.lab.faults.drills import DRILLS
from kvmesh.lab.faults.kinds import DECODE, PREFILL, ROUTER
from kvmesh.lab.faults.schedule import MeshShape, PlannedFault, Schedule, TrafficMix, written
from kvmesh.mesh.safeguards import SAFEGUARDS
from tests.faults.machine import MUST_BE_ZERO, counts, run_faults

in_lane = pytest.mark.skipif(not os.environ.get("KVMESH_TEST_FAULTS"), reason="make test-faults runs it: 10 minutes")
# What the loss of a safeguard shows as.
SHOWS = {
    "nonce": "wrong_tokens",
    "lease_expiry": "leaked",
    "replay": "diverged",
    "migration": "truncated",
    "avoidance": "truncated",
    "deadline": "hung",
    "credit": "truncated",
    "progress_watch": "truncated",
}
ALONE = ("other_weights", "weights_in_place", "orders", "guide_bombs", "run_dir_twice", "events_forged")


def test_every_safeguard_has_a_drill() -> None:
    assert DRILLS.keys() == set(SAFEGUARDS) == SHOWS.keys()


@in_lane
@pytest.mark.e2e
@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_a_drill_is_clean_with_its_safeguard(safeguard: str) -> None:
    report = run_faults("--drill", safeguard)
    assert counts(report) == dict.fromkeys(MUST_BE_ZERO, 0), report["problems"]


@in_lane
@pytest.mark.e2e
@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_a_drill_fails_without_its_safeguard(safeguard: str) -> None:
    report = run_faults("--without", safeguard)
    assert not report["ok"]
    assert report[SHOWS[safeguard]] > 0, report


@in_lane
@pytest.mark.e2e
@pytest.mark.parametrize("kind", ALONE)
def test_a_mesh_survives_a_kind_of_fault_by_itself(kind: str) -> None:
    report = run_faults("--seed", "2", "--seconds", "20", "--only", kind)
    assert counts(report) == dict.fromkeys(MUST_BE_ZERO, 0), report["problems"]
    assert report["faults"][kind] > 0


@in_lane
@pytest.mark.e2e
def test_a_mesh_heals_after_all_its_certificates_have_expired(tmp_path: Path) -> None:
    roles = {DECODE: 2, PREFILL: 1, ROUTER: 1}
    faults = tuple(
        PlannedFault(at_s=2.0, kind="expired", role=role, index=index, for_s=5.0)
        for role, count in roles.items()
        for index in range(count)
    )
    mesh = MeshShape(frontends=1, routers=1, prefill=1, decode=2, etcd=False, nats=False, tls=True)
    traffic = TrafficMix(clients=6, deadline_s=10.0)
    (tmp_path / "schedule").write_bytes(
        written(Schedule(seed=1, seconds=20.0, faults=faults, mesh=mesh, traffic=traffic))
    )
    report = run_faults("--schedule", str(tmp_path / "schedule"))
    assert counts(report) == dict.fromkeys(MUST_BE_ZERO, 0), report["problems"]
    assert report["errors_reported"] < report["requests"] / 2


@in_lane
@pytest.mark.e2e
def test_a_mesh_survives_all_kinds_of_fault_together() -> None:
    report = run_faults("--seed", "1", "--seconds", "60")
    assert counts(report) == dict.fromkeys(MUST_BE_ZERO, 0), report["problems"]
    assert report["requests"] > 100
