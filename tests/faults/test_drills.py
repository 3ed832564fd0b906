"""Without any one safeguard a mesh fails its drill, and with it the mesh does not: `make test-faults`."""

import os

import pytest

from faults.drills import DRILLS
from mesh.safeguards import SAFEGUARDS
from tests.faults.machine import MUST_BE_ZERO, counts, run_faults

in_lane = pytest.mark.skipif(not os.environ.get("KVMESH_TEST_FAULTS"), reason="make test-faults runs it: 3 minutes")
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
def test_a_mesh_survives_all_kinds_of_fault_together() -> None:
    report = run_faults("--seed", "1", "--seconds", "60")
    assert counts(report) == dict.fromkeys(MUST_BE_ZERO, 0), report["problems"]
    assert report["requests"] > 100
