"""The router inside a frontend has a name of its own, and the frontend's SLO unless it is given another."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.service import embedded_config, open_router
from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.local import LocalRouter


async def router_of(
    folder: Path, frontend: FrontendConfig, router: RouterConfig, cleanup: AsyncExitStack
) -> LocalRouter:
    plane, discovery = PlaneClient(None), open_discovery(f"file:{folder}")
    cleanup.push_async_callback(plane.close)
    cleanup.push_async_callback(discovery.close)
    opened = await open_router(frontend, router, plane, WorkerFeed(plane), discovery, cleanup)
    assert isinstance(opened.router, LocalRouter)
    return opened.router


@pytest.mark.parametrize(
    ("frontend", "router", "expected"),
    [
        (FrontendConfig(), RouterConfig(gossip=False), 0.0),
        (FrontendConfig(slo_itl_s=0.03), RouterConfig(gossip=False), 0.03),
        (FrontendConfig(slo_itl_s=0.03), RouterConfig(gossip=False, slo_itl_s=0.2), 0.2),
        (FrontendConfig(slo_itl_s=0.03), RouterConfig(gossip=False, slo_itl_s=0.0), 0.0),
    ],
)
async def test_answers_are_spared_by_the_slo_of_the_frontend(
    frontend: FrontendConfig, router: RouterConfig, expected: float, tmp_path: Path
) -> None:
    async with AsyncExitStack() as cleanup:
        opened = await router_of(tmp_path, frontend, router, cleanup)
        assert opened.state.rules.slo_itl_s == expected


def test_each_embedded_router_has_a_name_of_its_own() -> None:
    names = {embedded_config(FrontendConfig(name="f"), RouterConfig()).name for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("f-") for name in names)
