"""A real Prometheus server reports the same traffic as the frontends themselves."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvmesh.planner.model import Traffic
from kvmesh.planner.observe import FrontendSource, PrometheusSource
from tests.support.mesh import Mesh, running_mesh
from tests.support.patience import PATIENCE_S
from tests.support.prometheus_server import WHY_NONE, PrometheusProcess
from tests.support.streams import Stream, check_mock_answer

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)]

ISL, OSL = 40, 10
WINDOW_S = 6.0


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with running_mesh(tmp_path / "mesh", "--engine", "mock", "--kv-transfer", "shm") as mesh:
        yield mesh


@pytest.fixture
def prometheus(mesh: Mesh, tmp_path: Path) -> Iterator[PrometheusProcess]:
    (tmp_path / "prometheus").mkdir()
    process = PrometheusProcess(tmp_path / "prometheus", "frontends", mesh.url)
    yield process
    process.stop()


async def ask(mesh: Mesh) -> None:
    """Send the same prompt each time, so that its cached share is the same, too."""
    check_mock_answer(await asyncio.to_thread(lambda: Stream(mesh.url, list(range(100, 100 + ISL)), OSL).join()))


async def steady(mesh: Mesh, for_s: float) -> None:
    """A request at a time, as evenly as it goes: so what Prometheus extrapolates is right."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        await ask(mesh)


async def until_known(source: PrometheusSource, mesh: Mesh) -> None:
    """Prometheus begins to scrape some seconds after its start."""
    async with asyncio.timeout(PATIENCE_S):
        while await source.piece(time.time()) is None:
            await ask(mesh)


@pytest.mark.long
async def test_traffic_through_a_real_prometheus_is_the_same(mesh: Mesh, prometheus: PrometheusProcess) -> None:
    async with aiohttp.ClientSession() as http:
        itself = FrontendSource(http, lambda: {mesh.url: 1}, PATIENCE_S)
        server = PrometheusSource(http, prometheus.url, 'job="frontends"', WINDOW_S)
        await until_known(server, mesh)
        await itself.piece(time.time())
        await steady(mesh, WINDOW_S + 0.5)  # the server is asked once in a window
        own, told = await asyncio.gather(itself.piece(time.time()), server.piece(time.time()))
    assert server.problem == itself.problem == ""
    check_close(own, told)


def check_close(own: Traffic | None, told: Traffic | None) -> None:
    assert own is not None
    assert told is not None
    assert own.requests is not None
    assert told.requests is not None
    rate = own.requests / (own.end_s - own.start_s)
    assert told.requests / (told.end_s - told.start_s) == pytest.approx(rate, rel=0.4)
    for traffic in (own, told):
        assert traffic.isl_tokens == pytest.approx(ISL)
        assert traffic.osl_tokens == pytest.approx(OSL)
    assert told.itl_s == pytest.approx(own.itl_s, rel=0.4)
    assert told.ttft_s == pytest.approx(own.ttft_s, rel=0.4)
    assert told.hit_share is not None
    assert own.hit_share is not None
    assert told.hit_share == pytest.approx(own.hit_share, abs=0.1)


async def test_a_server_without_such_series_says_so(mesh: Mesh, prometheus: PrometheusProcess) -> None:
    async with aiohttp.ClientSession() as http:
        server = PrometheusSource(http, prometheus.url, 'job="nobody"', WINDOW_S)
        assert await server.piece(time.time()) is None
    assert server.problem == "it has no sample of a frontend"


async def test_bad_labels_are_reported_in_the_servers_words(mesh: Mesh, prometheus: PrometheusProcess) -> None:
    async with aiohttp.ClientSession() as http:
        server = PrometheusSource(http, prometheus.url, "job=frontends", WINDOW_S)
        assert await server.piece(time.time()) is None
    assert "400" in server.problem or "parse error" in server.problem
