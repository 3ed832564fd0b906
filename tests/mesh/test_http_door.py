"""Check the HTTP ports within a mesh: who is answered, and what a stranger gets."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kvmesh.mesh.http.door import Door
from kvmesh.mesh.http.request import Reply, Request
from kvmesh.mesh.http.server import App, Route, listening
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.member_session import member_session
from kvmesh.mesh.telemetry import serve_metrics
from tests.support.certificates import TestCa

WORKER, ROUTER, GATEWAY, OPERATOR = MeshRole.WORKER, MeshRole.ROUTER, MeshRole.GATEWAY, MeshRole.OPERATOR
NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
NOBODY.check_hostname, NOBODY.verify_mode = False, ssl.CERT_NONE


async def answer(request: Request) -> Reply:
    assert request.member is None or request.member.identity.namespace == "test"
    return Reply(b"secret", content_type="text/plain")


APP = App([Route("POST", "/place", answer), Route("GET", "/health", answer), Route("GET", "/metrics", answer)])


@pytest.fixture
def ca(tmp_path: Path) -> TestCa:
    return TestCa(tmp_path / "ca")


@pytest.fixture
async def url(ca: TestCa) -> AsyncIterator[str]:
    async with listening(APP, "127.0.0.1", 0, door=Door(ca.member(ROUTER))) as found:
        yield found


@pytest.fixture
async def probed(ca: TestCa) -> AsyncIterator[str]:
    async with listening(APP, "127.0.0.1", 0, door=Door(ca.member(ROUTER), answers_probes=True)) as found:
        yield found


async def ask(credentials: Credentials, method: str, url: str) -> tuple[int, str]:
    async with member_session(credentials) as http, http.request(method, url) as response:
        return response.status, await response.text()


async def ask_as_stranger(method: str, url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.request(method, url, ssl=NOBODY) as response:
        return response.status, await response.text()


async def test_a_gateway_asks_a_router_for_placements(ca: TestCa, url: str) -> None:
    assert url.startswith("https://")
    assert await ask(ca.member(GATEWAY), "POST", f"{url}/place") == (200, "secret")


@pytest.mark.parametrize(("role", "method", "path"), [(WORKER, "POST", "/place"), (GATEWAY, "GET", "/metrics")])
async def test_a_route_of_another_role_is_refused_by_name(
    ca: TestCa, url: str, role: MeshRole, method: str, path: str
) -> None:
    status, text = await ask(ca.member(role), method, url + path)
    assert status == 403
    assert f"{role} {role} of test may not call {method} {path} of router router of test" in text


async def test_a_path_without_a_route_is_refused(ca: TestCa, url: str) -> None:
    status, _ = await ask(ca.member(OPERATOR), "GET", f"{url}/secrets")
    assert status == 403


async def test_a_stranger_gets_no_answer(url: str) -> None:
    for path in ("/health", "/metrics", "/place", "/"):
        with pytest.raises(aiohttp.ClientError):
            await ask_as_stranger("GET", url + path)


async def test_a_client_without_tls_is_told_what_to_use(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.get(url.replace("https", "http") + "/metrics") as response:
        assert response.status == 400
        assert "use https and a certificate" in await response.text()


async def test_a_probe_learns_whether_all_is_well_and_no_more(ca: TestCa, probed: str) -> None:
    assert await ask_as_stranger("GET", f"{probed}/health") == (200, "ok\n")
    for method, path in (("GET", "/metrics"), ("POST", "/place"), ("GET", "/other"), ("POST", "/health")):
        status, text = await ask_as_stranger(method, probed + path)
        assert (status, "secret" in text) == (403, False)
    assert await ask(ca.member(GATEWAY), "POST", f"{probed}/place") == (200, "secret")


async def test_a_probe_with_a_foreign_certificate_is_refused(probed: str, tmp_path: Path) -> None:
    foreign = TestCa(tmp_path / "other").member(OPERATOR)
    context = foreign.client_context()
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(f"{probed}/health", ssl=context):
            pass


async def test_an_expired_client_is_answered_no_more(ca: TestCa, url: str) -> None:
    late = ca.member(GATEWAY, life_s=2)
    async with member_session(late) as http:
        async with http.post(f"{url}/place") as response:
            assert response.status == 200
        ca.until_expired(late.folder)
        await asyncio.sleep(1)
        async with http.post(f"{url}/place") as response:
            assert response.status == 403
            assert "expired during this connection" in await response.text()


async def test_a_session_uses_a_renewed_certificate(ca: TestCa, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.mesh.watched_files.LOOK_S", 0.0)
    gateway = ca.member(GATEWAY, life_s=2)
    async with member_session(gateway, headers={"connection": "close"}) as http:
        async with http.post(f"{url}/place") as response:
            assert response.status == 200
        ca.until_expired(gateway.folder)
        await asyncio.sleep(1)
        ca.issue(GATEWAY)
        async with http.post(f"{url}/place") as response:
            assert response.status == 200


# --- pages on a thread --------------------------------------------------------------------------------


async def pages_of(ca: TestCa, answers_probes: bool, asked: Credentials | None) -> list[tuple[int, str]]:
    """Return what /health and /metrics of a worker answer; (0, "") for none."""
    door = Door(ca.member(WORKER), answers_probes=answers_probes)
    url, close = serve_metrics("127.0.0.1", 0, registry=CollectorRegistry(), problem=lambda: "why", door=door)
    found = []
    try:
        for path in ("/health", "/metrics"):
            page = url.replace("/metrics", path)
            try:
                found.append(await (ask_as_stranger("GET", page) if asked is None else ask(asked, "GET", page)))
            except aiohttp.ClientError:
                found.append((0, ""))
    finally:
        await asyncio.to_thread(close)
    return found


async def test_pages_of_a_worker_are_for_members(ca: TestCa) -> None:
    assert await pages_of(ca, False, ca.member(MeshRole.OBSERVER)) == [(503, "why\n"), (200, "")]
    [(status, _), (refused, text)] = await pages_of(ca, False, ca.member(WORKER, "x"))
    assert (status, refused) == (503, 403)
    assert "worker x of test may not call GET /metrics" in text


async def test_pages_of_a_worker_tell_a_stranger_nothing(ca: TestCa) -> None:
    assert await pages_of(ca, False, None) == [(0, ""), (0, "")]
    assert await pages_of(ca, True, None) == [(503, "not ok\n"), (403, "this is for members of the mesh\n")]


async def test_a_page_without_tls_says_what_to_use(ca: TestCa) -> None:
    url, close = serve_metrics("127.0.0.1", 0, registry=CollectorRegistry(), door=Door(ca.member(WORKER)))
    try:
        async with aiohttp.ClientSession() as http, http.get(url.replace("https", "http")) as response:
            assert response.status == 400
    finally:
        await asyncio.to_thread(close)
