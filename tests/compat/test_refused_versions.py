"""A release that is too far away is refused by name, with both versions; all others go on."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvmesh.protocol.version import PROTOCOL_VERSION, RELEASE
from tests.support.mesh import until
from tests.support.services import NEW, Release, Services, claiming
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.long
FAR = claiming(99, 98, "9.9.9")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(tmp_path, f"file:{tmp_path / 'discovery'}", stack)


def both_versions(text: str) -> bool:
    theirs, ours = ("protocol 99", "kvmesh 9.9.9"), (f"protocol {PROTOCOL_VERSION}", f"kvmesh {RELEASE}")
    return all(part in text for part in (*theirs, *ours))


def answers(mesh: Services, frontend: str, count: int = 8) -> None:
    streams = [Stream(mesh.url(frontend), [100 * n + i for i in range(1, 30)], 4) for n in range(1, count + 1)]
    for stream in streams:
        check_mock_answer(stream.join())


def test_a_worker_of_a_far_release_is_refused_by_name(mesh: Services) -> None:
    names = [mesh.start("frontend", NEW), mesh.start("aggregated", NEW), mesh.start("aggregated", FAR)]
    mesh.until_ready(*names)
    mesh.until_joined("frontend-new", 1)
    until(lambda: mesh.health("frontend-new")["discovery"]["ignored"], what="the refusal in /health")
    [refused] = mesh.health("frontend-new")["discovery"]["ignored"]
    assert refused["key"].startswith("workers/aggregated-other-")
    assert both_versions(refused["reason"])
    [line] = [line for line in mesh.log("frontend-new").splitlines() if "ignoring workers/aggregated-other" in line]
    assert both_versions(line)
    answers(mesh, "frontend-new")


def test_a_frontend_of_a_far_release_refuses_our_workers(mesh: Services) -> None:
    mesh.until_ready(mesh.start("aggregated", NEW), mesh.start("frontend", FAR))
    until(lambda: "ignoring workers/aggregated-new" in mesh.log("frontend-other"), what="the refusal in its log")
    refused = mesh.health("frontend-other")["discovery"]["ignored"]
    assert [both_versions(found["reason"]) for found in refused] == [True]


def test_the_previous_release_goes_on_beside_a_far_worker(mesh: Services, old: Release) -> None:
    mesh.until_ready(
        *[mesh.start(role, one) for role, one in (("frontend", old), ("aggregated", NEW), ("aggregated", FAR))]
    )
    until(lambda: mesh.health("frontend-old")["discovery"]["ignored"], what="the refusal in its /health")
    mesh.until_joined("frontend-old", 1)
    answers(mesh, "frontend-old")
    [refused] = mesh.health("frontend-old")["discovery"]["ignored"]
    assert refused["key"].startswith("workers/aggregated-other-")


def test_a_router_of_a_far_release_is_not_asked(mesh: Services) -> None:
    mesh.until_ready(
        mesh.start("aggregated", NEW), mesh.start("router", FAR), mesh.start("frontend", NEW, "--router", "remote")
    )
    mesh.until_joined("frontend-new", 1)
    until(lambda: "ignoring routers/router-other" in mesh.log("frontend-new"), what="the refusal in the log")
    answers(mesh, "frontend-new")  # it places them itself
    [line] = [line for line in mesh.log("frontend-new").splitlines() if "ignoring routers/router-other" in line]
    assert both_versions(line)
    assert mesh.metric("router-other", "kvmesh_router_placements_total") == 0
    mesh.until_ready(mesh.start("router", NEW))
    until(lambda: mesh.metric("router-new", "kvmesh_router_workers") == 1, what="the worker at our router")
    until(lambda: httpx.get(f"{mesh.url('frontend-new')}/health").status_code == 200, what="our router at the frontend")
    answers(mesh, "frontend-new")
