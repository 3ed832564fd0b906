"""Test the server behind TLS, where each event loop has a transport of its own."""

import asyncio
import os
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvmesh.mesh.http import server
from kvmesh.mesh.http.server import App, HttpLimits, listening
from tests.mesh.http.raw import CLOSE, Site, get, post, read_replies, serving
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S

LIMITS = HttpLimits(receive_timeout_s=0.05, keep_alive_s=0.1, sweep_s=0.01)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder = tmp_path_factory.mktemp("tls")
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x"]
    subprocess.run(["openssl", "req", "-x509", *kind, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(folder / "cert"), Path(folder / "key"))
    return context


@pytest.fixture
async def site(tls: ssl.SSLContext) -> AsyncIterator[Site]:
    async with serving(LIMITS, tls) as site:
        yield site


async def open_tls(site: Site, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=trusting)
    writer.write(data)
    return reader, writer


async def ask(site: Site, data: bytes) -> list[int]:
    reader, writer = await open_tls(site, data)
    async with asyncio.timeout(PATIENCE_S):
        replies = read_replies(await reader.read())
    writer.close()
    return [reply.status for reply in replies]


async def test_replies_streams_and_refusals(site: Site) -> None:
    requests = get("/stream") + post("/echo", b"x" * 50_000) + get("/large") + get("/echo", CLOSE)
    assert await ask(site, requests) == [200] * 4
    assert await ask(site, get("/echo") + b"garbage") == [200, 400]
    assert await ask(site, b"GET /") == [408]
    assert await ask(site, b"") == []


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02"], ids=["nothing", "a part"])
async def test_an_unfinished_handshake_is_hung_up_on(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "TLS_HANDSHAKE_S", 0.05)
    async with listening(App([]), "127.0.0.1", 0, tls=tls) as url, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_either_version_of_tls_is_answered(site: Site, version: ssl.TLSVersion) -> None:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.minimum_version = trusting.maximum_version = version
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=trusting)
    writer.write(get("/echo", CLOSE))
    async with asyncio.timeout(PATIENCE_S):
        assert [reply.status for reply in read_replies(await reader.read())] == [200]
    writer.close()


@pytest.mark.parametrize("goodbye", ["close", "abort"])
@pytest.mark.parametrize("path", ["/slow", "/endless"])
async def test_a_client_that_leaves_cancels_its_handler(site: Site, path: str, goodbye: str) -> None:
    _, writer = await open_tls(site, get(path))
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.began.wait()
        left = time.monotonic()
        getattr(writer.transport, goodbye)()
        await site.handlers.cancelled.wait()
    assert time.monotonic() - left < RECOVERED_S
    writer.transport.abort()
    await site.until_clean()


async def test_a_client_that_ends_its_sending_side_has_left(tls: ssl.SSLContext) -> None:
    """The TLS of both event loops sends nothing more once the client's side has ended."""
    async with serving(tls=tls) as site, asyncio.timeout(PATIENCE_S):
        _, writer = await open_tls(site, get("/slow"))
        await site.handlers.began.wait()
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as same:
            same.shutdown(socket.SHUT_WR)
        await site.handlers.cancelled.wait()
        writer.transport.abort()
        await site.until_clean()
