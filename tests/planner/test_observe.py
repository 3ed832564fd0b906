"""Frontends and a Prometheus server, asked over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from msgspec import structs

from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.planner.connectors.connector import Fleets
from kvmesh.planner.model import RoleFleet
from kvmesh.planner.observe import FrontendSource, MeshView, Observer, PrometheusSource, read_answer
from kvmesh.planner.traffic import SloLimits, Totals
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import FrontendCard, Role, encode
from tests.support.routing import card


def answer(value: str | None) -> str:
    result = [] if value is None else [{"metric": {}, "value": [1.0, value]}]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})


class Server:
    """/metrics of a frontend, and Prometheus' query API, on one port."""

    def __init__(self) -> None:
        self.ended = 0.0
        self.waiting = 0
        self.is_up = True
        self.url = ""
        self.values: dict[str, str | None] = {}  # by a part of the query
        self.asked: list[str] = []

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.is_up:
            return web.Response(status=500)
        lines = [f'kvmesh_frontend_requests_total{{endpoint="chat",outcome="ok"}} {self.ended}']
        lines += ["kvmesh_frontend_inflight 0", "process_start_time_seconds 5"]
        lines += [f"kvmesh_router_waiting {self.waiting}"]
        return web.Response(text="\n".join(lines) + "\n")

    async def query(self, request: web.Request) -> web.Response:
        query = request.query["query"]
        self.asked.append(query)
        if not self.is_up:
            return web.Response(status=503, text="starting")
        value = next((value for part, value in self.values.items() if part in query), None)
        return web.Response(text=answer(value), content_type="application/json")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.add_routes([web.get("/metrics", server.metrics), web.get("/api/v1/query", server.query)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def turns() -> None:
    """Let others run."""
    for _ in range(10):
        await asyncio.sleep(0)


# --- frontends ----------------------------------------------------------------------------------------


async def test_frontends_are_found_by_their_cards_once_for_each_port() -> None:
    discovery, view = MemoryDiscovery(), MeshView()
    for name, url in (("a-0", "http://x:1"), ("a-1", "http://x:1"), ("b", "http://y:1")):
        await discovery.put(f"frontends/{name}", encode(FrontendCard(name=name, url=url)))
    gone = await discovery.put("frontends/c", encode(FrontendCard(name="c", url="http://z:1")))
    await discovery.put("frontends/broken", b"\xc1")
    await discovery.put("routers/x", b"whatever")
    following = asyncio.create_task(view.follow(discovery))
    await turns()
    assert view.frontends() == {"http://x:1": 2, "http://y:1": 1, "http://z:1": 1}
    await gone.withdraw()
    await turns()
    assert view.frontends() == {"http://x:1": 2, "http://y:1": 1}
    await discovery.close()
    await following


async def test_the_mode_decides_which_workers_count_and_others_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    discovery, split, pool = MemoryDiscovery(), MeshView(), MeshView(Role.AGGREGATED)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("a", Role.AGGREGATED), ("b", Role.AGGREGATED)):
        await discovery.put(f"workers/{name}", encode(card(name, role)))
    following = [asyncio.create_task(view.follow(discovery)) for view in (split, pool)]
    await turns()
    assert ([c.name for c in split.prefilling()], [c.name for c in split.decoding()]) == (["p"], ["d"])
    assert ([c.name for c in pool.prefilling()], [c.name for c in pool.decoding()]) == ([], ["a", "b"])
    assert "a is an aggregated worker, this planner counts prefill and decode workers alone; see --mode" in caplog.text
    assert "b is an" not in caplog.text, "one of a kind is enough"
    await discovery.close()
    await asyncio.gather(*following)


async def test_a_worker_that_an_operator_has_drained_does_not_count() -> None:
    discovery, view = MemoryDiscovery(), MeshView()
    await discovery.put("workers/d", encode(card("d", Role.DECODE)))
    await discovery.put("workers/e", encode(structs.replace(card("e", Role.DECODE), resting="drained")))
    following = asyncio.create_task(view.follow(discovery))
    await turns()
    assert [c.name for c in view.decoding()] == ["d"]
    await discovery.close()
    await following


async def test_a_worker_that_runs_counts_when_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the planner would start another in its place. One that does not answer, or has a successor, is gone."""
    monkeypatch.setattr("kvmesh.mesh.lapsed.ASK_AGAIN_S", 0.0)
    up = {"http://runs:1", "http://again:1"}

    async def answers(url: str) -> bool:
        return url in up

    discovery, view = MemoryDiscovery(), MeshView(answers=answers)
    for name in ("runs", "dead", "again"):
        await discovery.put(f"workers/{name}-1", encode(card(name, metrics_url=f"http://{name}:1")))
    await discovery.put("workers/again-2", encode(card("again", metrics_url="http://again:1")))
    following = asyncio.create_task(view.follow(discovery))
    await turns()
    assert len(view.decoding()) == 4
    for name in ("runs", "dead", "again"):
        discovery.remove(f"workers/{name}-1", has_lapsed=True)
    await turns()
    assert sorted(c.name for c in view.decoding()) == ["again", "runs"]
    up.clear()
    await turns()
    assert [c.name for c in view.decoding()] == ["again"], "it has ended meanwhile"
    await discovery.close()
    await following


async def test_pieces_follow_each_other(server: Server, http: aiohttp.ClientSession) -> None:
    source = FrontendSource(http, lambda: {server.url: 1}, 60.0)
    assert await source.piece(100.0) is None, "counting has just begun"
    server.ended = 8
    first = await source.piece(105.0)
    server.ended = 9
    second = await source.piece(107.0)
    assert first is not None
    assert second is not None
    assert [(t.start_s, t.end_s, t.requests) for t in (first, second)] == [(100.0, 105.0, 8.0), (105.0, 107.0, 1.0)]


async def test_waiting_requests_of_routers_are_current(server: Server, http: aiohttp.ClientSession) -> None:
    source = FrontendSource(http, lambda: {server.url: 1}, 60.0)
    told = []
    for server.waiting in (0, 7, 2):
        await source.piece(100.0)
        told.append(source.waiting)
    assert told == [0.0, 7.0, 2.0]


async def test_a_silent_frontend_makes_traffic_unknown_with_a_reason(
    server: Server, http: aiohttp.ClientSession
) -> None:
    source = FrontendSource(http, lambda: {server.url: 1}, 60.0)
    await source.piece(100.0)
    server.is_up = False
    assert await source.piece(105.0) is None
    assert server.url in source.problem
    server.is_up, server.ended = True, 4
    back = await source.piece(110.0)
    assert back is not None
    assert (back.start_s, back.requests) == (100.0, 4.0)
    assert source.problem == ""


async def test_counts_of_a_long_pause_are_discarded(server: Server, http: aiohttp.ClientSession) -> None:
    source = FrontendSource(http, lambda: {server.url: 1}, 60.0)
    await source.piece(100.0)
    server.ended = 1_000_000
    assert await source.piece(5000.0) is None
    server.ended += 2
    traffic = await source.piece(5005.0)
    assert traffic is not None
    assert (traffic.start_s, traffic.requests) == (5000.0, 2.0)


async def test_an_observation_has_fleets_traffic_and_loads(server: Server, http: aiohttp.ClientSession) -> None:
    observer = Observer(http, MeshView(), FrontendSource(http, lambda: {server.url: 1}, 60.0))
    fleets = Fleets(prefill=RoleFleet(ready=1), decode=RoleFleet(ready=2, starting=1))
    await observer.observe(0.0, fleets)
    server.ended = 3
    seen = await observer.observe(5.0, fleets)
    assert (seen.at_s, seen.prefill, seen.decode) == (5.0, fleets.prefill, fleets.decode)
    assert seen.traffic is not None
    assert seen.traffic.requests == 3
    assert seen.decode_loads == ()


# --- Prometheus ---------------------------------------------------------------------------------------


async def test_prometheus_is_asked_once_per_window(server: Server, http: aiohttp.ClientSession) -> None:
    server.values = {"timestamp": "3", "requests_total": "120", "delta": "-4"}
    server.values |= {"input_sequence_tokens_sum": "900", "input_sequence_tokens_count": "9"}
    source = PrometheusSource(http, server.url + "/", 'job="fe"', 60.0, SloLimits(0.5, 0.05))
    traffic = await source.piece(1000.0)
    assert traffic is not None
    assert (traffic.start_s, traffic.end_s, traffic.requests, traffic.isl_tokens) == (940.0, 1000.0, 116.0, 100.0)
    assert len(server.asked) == 1 + len(Totals.__dataclass_fields__)
    assert await source.piece(1030.0) is None
    assert source.problem == ""
    assert await source.piece(1060.0) is not None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"timestamp": "61", "requests_total": "120", "delta": "0"}, "since 61 s"),  # late
        ({"timestamp": None, "requests_total": "120", "delta": "0"}, "no sample"),
        ({"timestamp": "NaN", "requests_total": "120", "delta": "0"}, "no sample"),
        ({"timestamp": "1", "requests_total": "120", "delta": None}, "how many"),
    ],
)
async def test_missing_or_old_samples_of_prometheus_are_unknown(
    server: Server, http: aiohttp.ClientSession, values: dict[str, str | None], says: str
) -> None:
    server.values = values
    source = PrometheusSource(http, server.url, "", 60.0)
    assert await source.piece(1000.0) is None
    assert says in source.problem


async def test_an_unreachable_prometheus_is_asked_again_in_the_next_step(
    server: Server, http: aiohttp.ClientSession
) -> None:
    server.values, server.is_up = {"timestamp": "1", "requests_total": "6", "delta": "0"}, False
    source = PrometheusSource(http, server.url, "", 60.0)
    assert await source.piece(1000.0) is None
    assert "503" in source.problem
    server.is_up = True
    assert await source.piece(1005.0) is not None


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"status":"error","error":"bad"}', answer("1")[:-3], answer("x")])
def test_an_unreadable_answer_of_prometheus_is_refused(body: str) -> None:
    with pytest.raises(WireError):
        read_answer(body)


def test_more_than_one_series_is_refused() -> None:
    two: Any = json.loads(answer("1"))
    two["data"]["result"] *= 2
    with pytest.raises(WireError, match="2 series"):
        read_answer(json.dumps(two))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_nan_is_unknown(value: str) -> None:
    assert read_answer(answer(value)) is None
