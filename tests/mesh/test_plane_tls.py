"""Check the request plane between members of a mesh: who connects, who may call what, what goes wrong and how."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.mesh.identity import issuing
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.listening import MOST_HANDSHAKES
from kvmesh.mesh.identity.metrics import HANDSHAKES
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.mesh.watched_files import LOOK_S
from kvmesh.protocol.errors import IdentityError, MeshError, PeerLostError
from tests.support.certificates import TestCa
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S

WORKER, FRONTEND, ROUTER = MeshRole.WORKER, MeshRole.FRONTEND, MeshRole.ROUTER


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def count(call: Call) -> None:
    for number in range(3):
        await call.send(number)


async def hold(call: Call) -> None:
    await call.send("holds")
    await asyncio.sleep(2)
    await call.send("held")


@pytest.fixture
def ca(tmp_path: Path) -> TestCa:
    return TestCa(tmp_path / "ca")


class Plane:
    """Servers and clients that are closed at the end."""

    def __init__(self) -> None:
        self._ends: list[PlaneServer | PlaneClient] = []

    async def server(self, credentials: Credentials | None) -> str:
        server = PlaneServer({"generate": count, "load": hold, "control": count}, credentials=credentials)
        self._ends.append(server)
        return await server.start("127.0.0.1")

    def client(self, credentials: Credentials | None) -> PlaneClient:
        client = PlaneClient(credentials)
        self._ends.append(client)
        return client

    async def close(self) -> None:
        for end in reversed(self._ends):
            await end.close()


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    made = Plane()
    yield made
    await made.close()


async def numbers(client: PlaneClient, address: str, method: str = "generate") -> list[int]:
    async with client.open(address, method, None, PATIENCE_S) as stream:
        return [number async for number in stream.messages(int)]


async def refused(client: PlaneClient, address: str, method: str = "generate") -> str:
    """Return the error of a call, which comes soon."""
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as found:
        await numbers(client, address, method)
    assert time.monotonic() - began_s < RECOVERED_S
    return str(found.value)


async def test_a_frontend_gets_the_answer_of_a_worker(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER, "decode"))
    client = plane.client(ca.member(FRONTEND))
    client.expect(address, {"decode-3"})
    assert await numbers(client, address) == [0, 1, 2]


@pytest.mark.parametrize(("role", "method"), [(WORKER, "generate"), (ROUTER, "generate"), (ROUTER, "control")])
async def test_a_method_of_another_role_is_refused_by_name(
    ca: TestCa, plane: Plane, role: MeshRole, method: str
) -> None:
    address = await plane.server(ca.member(WORKER, "decode"))
    told = await refused(plane.client(ca.member(role, "x")), address, method)
    assert f"{role} x of test may not call {method} of worker decode of test" in told


async def test_a_caller_wants_the_worker_that_the_card_names(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER, "prefill"))
    client = plane.client(ca.member(FRONTEND))
    client.expect(address, {"decode-3"})
    assert "is worker prefill of test, not decode-3" in await refused(client, address)


async def test_a_worker_cannot_answer_for_a_router(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    assert "does not answer place" in await refused(plane.client(ca.member(FRONTEND)), address, "place")


async def test_a_caller_without_tls_is_told_what_to_do(
    ca: TestCa, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = await plane.server(ca.member(WORKER))
    client = plane.client(None)
    for _ in range(3):
        assert "start the caller with --mesh-tls" in await refused(client, address)
        await asyncio.sleep(0.05)
    assert caplog.text.count("it does not use TLS; start it with --mesh-tls") == 1


async def test_a_service_without_tls_is_told_what_to_do(
    ca: TestCa, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = await plane.server(None)
    client = plane.client(ca.member(FRONTEND))
    for _ in range(3):
        assert "--mesh-tls" in await refused(client, address)
    assert caplog.text.count("the peer uses TLS and this process does not") == 1


async def test_a_certificate_of_another_ca_is_refused_on_both_sides(
    ca: TestCa, plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = await plane.server(ca.member(WORKER))
    stranger = TestCa(tmp_path / "other").member(FRONTEND)
    assert "issue both with one CA" in await refused(plane.client(stranger), address)
    await asyncio.sleep(0.1)
    assert "or trusts another CA" in caplog.text


async def test_a_client_without_a_certificate_gets_nothing(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(b"\x05\0\0\0\x92\0\2\0\0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        assert await reader.read(100) == b""
        raise ConnectionResetError
    writer.transport.abort()


async def test_an_expired_caller_is_told_so(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    late = ca.member(FRONTEND, life_s=1.5)
    ca.until_expired(late.folder)
    await asyncio.sleep(1)
    told = await refused(plane.client(late), address)
    assert "this process's certificate has expired" in told, told


async def test_a_certificate_that_expires_during_a_connection_makes_no_calls(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    late = ca.member(FRONTEND, life_s=2)
    client = plane.client(late)
    assert await numbers(client, address) == [0, 1, 2]
    ca.until_expired(late.folder)
    await asyncio.sleep(1)
    assert "has expired during this connection" in await refused(client, address)


async def test_a_renewed_certificate_loses_no_call(ca: TestCa, plane: Plane) -> None:
    clock = Clock()
    server, caller = Credentials(ca.issue(WORKER), clock), Credentials(ca.issue(FRONTEND), clock)
    address, client = await plane.server(server), plane.client(caller)
    async with client.open(address, "load", None, 10.0) as stream:
        assert await anext(messages := stream.messages(str)) == "holds"
        first = client.standing(address)
        folders = issuing.members_of(ca.folder)
        issuing.begin_roll(ca.folder, folders)
        issuing.rotate(ca.folder, folders, 0, time.time())
        issuing.end_roll(ca.folder, folders)
        clock.now_s += LOOK_S
        assert await numbers(client, address) == [0, 1, 2]
        assert client.standing(address) is not first
        assert await anext(messages) == "held"  # the old connection goes on for it
    await asyncio.sleep(0.1)
    assert first is not None and first.closed.is_set()


async def test_handshakes_that_do_not_end_are_bounded(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    host, _, port = address.rpartition(":")
    crowded = HANDSHAKES.labels("crowded")._value.get()
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_HANDSHAKES + 20)]
    assert await numbers(plane.client(ca.member(FRONTEND)), address) == [0, 1, 2]
    assert HANDSHAKES.labels("crowded")._value.get() - crowded >= 20
    for _, writer in idle:
        writer.transport.abort()


@pytest.mark.long
async def test_a_handshake_that_stops_is_hung_up_on(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    host, _, port = address.rpartition(":")
    for first in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        async with asyncio.timeout(RECOVERED_S):
            try:
                await reader.read()
            except ConnectionError:
                pass
        writer.transport.abort()


async def test_an_identity_error_keeps_its_class_over_the_wire(ca: TestCa, plane: Plane) -> None:
    address = await plane.server(ca.member(WORKER))
    with pytest.raises(IdentityError) as found:
        await numbers(plane.client(ca.member(ROUTER)), address)
    assert isinstance(found.value, MeshError)
