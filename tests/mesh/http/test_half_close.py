"""Test clients that end their sending side: who still reads gets the whole answer, who has left is noticed."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvmesh.mesh.http.half_close import AT_ONCE_S, has_hung_up
from kvmesh.mesh.http.request import ReplyStream, Request
from kvmesh.mesh.http.server import App, Route, listening, listening_unix
from tests.mesh.http.raw import Site, chunked, get, post, read_replies, serving
from tests.support.patience import PATIENCE_S

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


async def all_after_eof(site: Site, request: bytes, wait_s: float = 0.0, open_gate: bool = True) -> bytes:
    """Send a request, end the sending side, then open the gate; return all that comes."""
    reader, writer = await site.open(request)
    async with asyncio.timeout(PATIENCE_S):
        if wait_s:
            await site.handlers.began.wait()
            await asyncio.sleep(wait_s)
        writer.write_eof()
        if open_gate:
            await site.handlers.began.wait()
            await asyncio.sleep(0.02)
            site.handlers.gate.set()
        data = await reader.read()
    writer.close()
    return data


# --- who still reads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_half_closes_at_once_gets_its_answer(site: Site, version: str) -> None:
    request = post("/wait", b"body").replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    data = await all_after_eof(site, request)
    assert data.startswith(b"HTTP/1.1 200 OK"), "no other reply comes before"
    assert read_replies(data)[0].body == b"4"
    await site.until_clean()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_half_closing_client_gets_its_whole_stream(site: Site, version: str) -> None:
    data = await all_after_eof(site, get("/slow", version=version))
    assert read_replies(data)[0].body == b"firstlast"


async def test_a_client_that_half_closes_late_gets_its_answer_after_a_probe(site: Site) -> None:
    """The standard library's client, like any other, skips the interim reply."""
    data = await all_after_eof(site, post("/wait", b"body"), wait_s=2 * AT_ONCE_S)
    assert data.startswith(CONTINUE)
    assert data.count(CONTINUE) == 1
    assert read_replies(data)[0].body == b"4"


async def test_all_pipelined_requests_of_a_half_closing_client_are_answered(site: Site) -> None:
    requests = post("/wait", b"1234") + get("/stream") + chunked("/echo", [b"x"]) + get("/echo") * 3000
    replies = read_replies(await all_after_eof(site, requests))
    assert [reply.status for reply in replies] == [200] * 3003


async def test_what_follows_unreadably_is_refused_after_the_answers(site: Site) -> None:
    replies = read_replies(await all_after_eof(site, post("/wait", b"1") + b"garbage\r\n\r\n"))
    assert [reply.status for reply in replies] == [200, 400]


@pytest.mark.parametrize("part", [b"GET /echo HT", post("/echo", b"body")[:-1], chunked("/echo", [b"body"])[:-2]])
@pytest.mark.parametrize("before", [0, 1])
async def test_half_a_request_and_the_end_is_a_400(site: Site, part: bytes, before: int) -> None:
    replies = read_replies(await all_after_eof(site, get("/echo") * before + part, open_gate=False))
    assert [reply.status for reply in replies] == [200] * before + [400]
    assert b"ends too early" in replies[-1].body
    await site.until_clean()


async def test_the_end_without_a_request_is_no_request(site: Site) -> None:
    assert await all_after_eof(site, b"", open_gate=False) == b""
    assert len(read_replies(await all_after_eof(site, get("/echo"), open_gate=False))) == 1


async def test_a_half_closing_client_of_a_unix_socket_gets_its_answer(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def answer(request: Request) -> ReplyStream:
        await gate.wait()
        stream = request.open_stream({})
        stream.end(b"all")
        return stream

    async with listening_unix(App([Route("GET", "/", answer)]), tmp_path / "s"):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(get("/"))
        writer.write_eof()
        await asyncio.sleep(0.02)
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            assert read_replies(await reader.read())[0].body == b"all"
        writer.close()


# --- who has left -------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [post("/wait", b"body"), post("/wait", b"body") * 2])
async def test_a_client_that_closes_at_once_is_noticed_by_a_probe(
    site: Site, monkeypatch: pytest.MonkeyPatch, request_: bytes
) -> None:
    monkeypatch.setattr("kvmesh.mesh.http.connection.PROBE_AFTER_S", 0.2)
    _, writer = await site.open(request_)
    sent = time.monotonic()
    writer.close()
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.cancelled.wait()
    assert time.monotonic() - sent > 0.15
    await site.until_clean()


async def events(request: Request, cancelled: asyncio.Event, began: asyncio.Event) -> ReplyStream:
    """A stream of events that stops after the first one."""
    stream = request.open_stream({"content-type": "text/event-stream"})
    stream.write(b"data: 1\n\n")
    began.set()
    try:
        await asyncio.sleep(PATIENCE_S)
    except asyncio.CancelledError:
        cancelled.set()
        raise
    return stream


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_silent_stream_of_events_is_probed_by_a_comment(leaves: bool) -> None:
    cancelled, began = asyncio.Event(), asyncio.Event()
    app = App([Route("GET", "/", lambda request: events(request, cancelled, began))])
    async with listening(app, "127.0.0.1", 0) as url, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(get("/"))
        await reader.readuntil(b"data: 1\n\n\r\n")
        await asyncio.sleep(2 * AT_ONCE_S)
        if leaves:
            writer.close()
            await cancelled.wait()
        else:
            writer.write_eof()
            assert await reader.readexactly(8) == b"3\r\n:\n\n\r\n"
            await asyncio.sleep(0.05)
            assert not cancelled.is_set()
            writer.transport.abort()


async def test_an_old_client_that_ends_late_has_left(site: Site) -> None:
    """HTTP/1.0 has no interim replies, and proxies that speak it close the connection when their client leaves."""
    _, writer = await site.open(post("/wait", b"body").replace(b"HTTP/1.1", b"HTTP/1.0"))
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.began.wait()
        await asyncio.sleep(2 * AT_ONCE_S)
        writer.write_eof()
        await site.handlers.cancelled.wait()
    writer.close()


async def test_a_half_closing_client_that_resets_later_is_noticed(site: Site) -> None:
    _, writer = await site.open(post("/wait", b"body"))
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.began.wait()
        await asyncio.sleep(0.05)
        raw: Any = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        await site.handlers.cancelled.wait()
    await site.until_clean()


def test_the_system_tells_a_half_close_from_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        with closing(served), closing(client):
            assert not has_hung_up(served.fileno())
            client.shutdown(socket.SHUT_WR)
            assert not has_hung_up(served.fileno())
            served.send(b"x")
            client.close()  # with unread data: a reset
            deadline = time.monotonic() + PATIENCE_S
            while not has_hung_up(served.fileno()):
                assert time.monotonic() < deadline
