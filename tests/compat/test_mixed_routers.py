"""Routers that run by themselves and frontends that ask them may be of neighbouring releases."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.mesh import until
from tests.support.services import NEW, Release, Services
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.long


def test_frontends_ask_routers_of_the_other_release(place: str, old: Release, tmp_path: Path) -> None:
    with ExitStack() as stack:
        mesh = Services(tmp_path, place, stack)
        mesh.start("aggregated", NEW)
        frontends = [mesh.start("frontend", release, "--router", "remote") for release in (old, NEW)]
        routers = [mesh.start("router", release) for release in (old, NEW)]  # router-new is asked first, by its name
        mesh.until_ready("aggregated-new", *frontends, *routers)
        for router in routers:
            until(lambda router=router: mesh.metric(router, "kvmesh_router_peers") == 1, what=f"the peer of {router}")
            until(lambda router=router: mesh.metric(router, "kvmesh_router_workers") == 1, what=f"a worker at {router}")
        for frontend in frontends:
            mesh.until_joined(frontend, 1)
        placed = "kvmesh_router_placements_total"

        def streams(first: int) -> list[Stream]:
            prompts = [[first + number + i for i in range(40)] for number in range(4)]
            pairs = zip(frontends * 2, prompts, strict=True)
            return [Stream(mesh.url(frontend), prompt, 100) for frontend, prompt in pairs]

        running = [stream.until_tokens(5) for stream in streams(100)]
        assert (mesh.metric("router-new", placed), mesh.metric("router-old", placed)) == (4, 0)
        until(lambda: mesh.metric("router-old", "kvmesh_router_gossip_received_total") > 0, what="gossip")
        mesh.kill("router-new")
        until(lambda: mesh.metric("router-old", "kvmesh_router_in_flight") == 4, what="the bookings at the old router")
        for stream in running + streams(200):
            check_mock_answer(stream.join())
        assert mesh.metric("router-old", placed) == 4
