"""Test how much memory, connections and time a client can take, and that nothing is left when the client leaves."""

import asyncio
import json
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from kvmesh.mesh.http import server as server_module
from kvmesh.mesh.http.connection import (
    KEEPALIVE,
    MAX_AHEAD_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    WRITE_BUFFER_BYTES,
    Connection,
)
from kvmesh.mesh.http.half_close import AT_ONCE_S
from kvmesh.mesh.http.request import Reply, Request
from kvmesh.mesh.http.server import SPARE_FILES, App, HttpLimits, Route, listening
from tests.mesh.http.raw import (
    CLOSE,
    HOST,
    Handlers,
    MemoryTransport,
    Site,
    chunked,
    get,
    post,
    read_replies,
    serving,
)
from tests.support.patience import PATIENCE_S
from tests.support.recovery import RECOVERED_S

CANCEL_S = 0.1  # from a client's leaving to its handler's end
SMALL = HttpLimits(
    max_body_bytes=1000,
    max_bodies_bytes=1500,
    max_connections=3,
    receive_timeout_s=0.05,
    keep_alive_s=0.1,
    sweep_s=0.01,
)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


@pytest.fixture
async def small() -> AsyncIterator[Site]:
    async with serving(SMALL) as site:
        yield site


def code(body: bytes) -> Any:
    return json.loads(body)["error"]["code"]


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset the connection."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# --- size ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + HOST + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * (MAX_HEADERS + 1),
        chunked("/echo", [b"a"])[:-2] + b"X: " + b"a" * 2 * MAX_HEAD_BYTES,
        chunked("/echo", [])[:-5] + b"1;" + b"a" * 2 * MAX_HEAD_BYTES,
    ],
    ids=["target", "value", "name", "count", "trailer", "chunk extension"],
)
async def test_heads_are_bounded(site: Site, head: bytes) -> None:
    for segments in ([head], [head[:5000], head[5000:9000], head[9000:]]):
        [reply] = await site.ask(*segments)
        assert (reply.status, code(reply.body)) == (431, "headers_too_large")


async def test_a_head_within_the_limits_is_read(site: Site) -> None:
    [reply] = await site.ask(get("/echo", *["X: " + "a" * 200] * (MAX_HEADERS - 2), CLOSE))
    assert reply.status == 200


async def test_a_body_is_refused_by_its_length_before_it_comes(small: Site) -> None:
    head = b"POST /echo HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n"
    [reply] = await small.ask(head)
    assert (reply.status, code(reply.body), reply.headers["connection"]) == (413, "body_too_large", "close")


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


async def memory_reply(*segments: bytes) -> bytes:
    """Return what a server writes for these segments of input, without a socket."""
    server = server_module.Server(App(Handlers().routes(), SMALL))
    connection, transport = server.connect(), MemoryTransport()
    connection.connection_made(transport)
    for segment in segments:
        connection.data_received(segment)
    async with asyncio.timeout(PATIENCE_S):
        while not transport.written:
            await asyncio.sleep(0)
    connection.connection_lost(None)
    await server.close()
    return bytes(transport.written)


@pytest.mark.parametrize("size", [b"3e9", b"003e9;ext=1", b"7fffffffffffffff", b"8000000000000000", b"f" * 16])
@pytest.mark.parametrize("before", [[], [b"a" * 10]], ids=["first", "second"])
async def test_a_chunk_is_refused_by_its_size_before_it_arrives(small: Site, size: bytes, before: list[bytes]) -> None:
    data = chunked("/echo", before)[:-5] + size + b"\r\n"
    for input_ in (data, data + b"a"):
        [reply] = await small.ask(input_)
        assert (reply.status, code(reply.body), reply.headers["connection"]) == (413, "body_too_large", "close")
    for step in (1, 2, 7):
        assert (await memory_reply(*pieces(data, step))).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("size", [b"-1", b"+5", b"0x5", b"zz", b"", b" 5", b"5 ", b"f" * 17, b"1" * 300])
async def test_an_unreadable_chunk_size_is_refused(small: Site, size: bytes) -> None:
    [reply] = await small.ask(chunked("/echo", [])[:-5] + size + b"\r\na")
    assert (reply.status, reply.headers["connection"]) == (400, "close")


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 11, 29, 101])
async def test_chunks_may_arrive_in_any_pieces(step: int) -> None:
    chunks = [b"ffffffff\r\nffffffff", b"\nfffff\r", b"a" * 300, b"fff"]
    data = chunked("/echo", chunks, "ffffffff: ffffffff").replace(b";ext=1", b";ffff=" + b"f" * 100)
    [reply] = read_replies(await memory_reply(*pieces(data, step)), ["POST"])
    assert json.loads(reply.body)["body"] == b"".join(chunks).decode()


@pytest.mark.parametrize("chunk", [1001, 100, 1])
async def test_a_chunked_body_is_refused_once_it_is_too_large(small: Site, chunk: int) -> None:
    data = chunked("/echo", [b"a" * chunk] * (1001 // chunk + 1))
    [reply] = await small.ask(data + get("/echo"))
    assert (reply.status, code(reply.body)) == (413, "body_too_large")
    [reply] = await small.ask(chunked("/echo", [b"a" * 100] * 10).replace(HOST, HOST + b"Connection: close\r\n"))
    assert reply.status == 200


async def test_the_bodies_of_all_requests_share_a_limit(site: Site) -> None:
    async with serving(HttpLimits(max_body_bytes=1000, max_bodies_bytes=1500)) as small:
        _, waiting = await small.open(post("/wait", b"a" * 1000))
        await small.handlers.began.wait()
        _, reading = await small.open(post("/echo", b"a" * 400)[:-1])
        async with asyncio.timeout(PATIENCE_S):
            while small.server.body_bytes < 1399:
                await asyncio.sleep(0)
        [reply] = await small.ask(post("/echo", b"a" * 900))
        assert (reply.status, code(reply.body), reply.headers["retry-after"]) == (429, "overloaded", "1")
        assert small.server.body_bytes == 1399
        small.handlers.gate.set()
        reading.write(b"a")
        async with asyncio.timeout(PATIENCE_S):
            while small.server.body_bytes:
                await asyncio.sleep(0)
        [reply] = await small.ask(post("/echo", b"a" * 900, CLOSE))
        assert reply.status == 200
        waiting.close()
        reading.close()


async def test_a_body_without_room_is_refused_before_it_is_sent(site: Site) -> None:
    async with serving(HttpLimits(max_body_bytes=1000, max_bodies_bytes=1500)) as small:
        _, waiting = await small.open(post("/wait", b"a" * 1000))
        await small.handlers.began.wait()
        [reply] = await small.ask(
            b"POST /echo HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 900\r\n\r\n"
        )
        assert (reply.status, code(reply.body), reply.headers["retry-after"]) == (429, "overloaded", "1")
        small.handlers.gate.set()
        waiting.close()


async def test_bodies_that_come_slowly_give_way_to_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FAIR_S", 0.05)
    async with serving(HttpLimits(max_body_bytes=1000, max_bodies_bytes=1500)) as small:
        slow = [await small.open(post("/echo", b"a" * 800)[:-n]) for n in (100, 150)]
        async with asyncio.timeout(PATIENCE_S):
            while small.server.body_bytes < 1350:
                await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        [reply] = await small.ask(post("/echo", b"a" * 700, CLOSE))
        assert reply.status == 200
        [refused] = read_replies(await asyncio.wait_for(slow[0][0].read(), PATIENCE_S))
        assert (refused.status, code(refused.body)) == (429, "overloaded")
        slow[1][1].write(b"a" * 150)  # only as many gave way as had to
        assert b"200 OK" in await asyncio.wait_for(slow[1][0].readline(), PATIENCE_S)
        for _, writer in slow:
            writer.close()


async def test_too_many_connections_are_told_so(site: Site) -> None:
    async with serving(HttpLimits(max_connections=3)) as small:
        held = [await small.open() for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while len(small.server.connections) < 3:
                await asyncio.sleep(0)
        [reply] = await small.ask()
        assert (reply.status, code(reply.body)) == (429, "overloaded")
        for _, writer in held:
            writer.close()
        await small.until_clean()
        assert [reply.status for reply in await small.ask(get("/echo", CLOSE))] == [200]


@pytest.mark.parametrize(("possible", "takes"), [(50_000, 1000), (1000, 1000 - SPARE_FILES), (10, 1)])
async def test_the_file_limit_bounds_the_number_of_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, possible: int, takes: int
) -> None:
    """Further clients get a 429; without a spare file they would get nothing."""
    caplog.set_level(logging.INFO)
    asked: list[int] = []
    monkeypatch.setattr(server_module, "make_room_for_files", lambda wanted: asked.append(wanted) or possible)
    server = server_module.Server(App([], HttpLimits(max_connections=1000)))
    server.make_room()
    assert (asked, server.max_connections) == ([1000 + SPARE_FILES], takes)
    assert ("raise its hard limit" in caplog.text) is (takes < 1000)
    server.connections = {Connection(server) for _ in range(takes)}
    assert not server.is_crowded()
    server.connections.add(Connection(server))
    assert server.is_crowded()
    server.connections.clear()


async def test_what_comes_ahead_of_its_turn_is_bounded(site: Site) -> None:
    _, writer = await site.open(post("/wait", b""))
    await site.handlers.began.wait()
    flood = get("/echo") * 1000
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            while True:
                writer.write(flood)
                await writer.drain()
    [connection] = site.server.connections
    assert len(connection._ahead) < MAX_AHEAD_BYTES + (256 << 10)  # one read of the event loop's
    assert connection._waiting == []
    reset(writer)
    site.handlers.gate.set()


async def test_a_client_that_does_not_read_gets_no_more_replies(site: Site) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", site.port))
    _, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(get("/large") * 100)
    handled = -1
    while handled != site.handlers.handled:
        handled = site.handlers.handled
        await asyncio.sleep(0.02)
    assert handled == 1
    reset(writer)
    await site.until_clean()


async def test_a_stream_whose_client_does_not_read_is_full(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
    writer.write(get("/endless"))
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.began.wait()
        [connection] = site.server.connections
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < WRITE_BUFFER_BYTES + 8192
        before = site.handlers.handled
        while site.handlers.handled == before:  # it goes on as soon as the client reads
            await reader.read(1 << 20)
        reset(writer)
        await site.handlers.cancelled.wait()
    await site.until_clean()


async def test_small_chunks_take_no_more_memory_than_their_bytes() -> None:
    handlers = Handlers()
    server = server_module.Server(App(handlers.routes(), HttpLimits()))
    connection = server.connect()
    connection.connection_made(MemoryTransport())
    connection.data_received(chunked("/echo", [])[:-5])
    for _ in range(100):
        connection.data_received(b"2\r\nab\r\n" * 500)
    assert (type(connection._body), len(connection._body), server.body_bytes) == (bytearray, 100_000, 100_000)
    connection.connection_lost(None)
    assert server.body_bytes == 0
    await server.close()


# --- time ---------------------------------------------------------------------------------------------


async def drip(site: Site, start: bytes, drop: bytes) -> bytes:
    """Send `drop` again and again until the server hangs up."""
    reader, writer = await site.open(start)

    async def send() -> None:
        while True:
            writer.write(drop)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(send())
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        task.cancel()
        writer.transport.abort()


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"GET /", b"a"),
        (b"GET / HTTP/1.1\r\n", b"X: a\r\n"),
        (b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 999\r\n\r\n", b"a"),
        (chunked("/echo", [])[:-5], b"1\r\na\r\n"),
        (get("/echo") + b"GET", b""),
    ],
    ids=["target", "head", "body", "chunks", "second request"],
)
async def test_an_unfinished_request_times_out(small: Site, start: bytes, drop: bytes) -> None:
    began = time.monotonic()
    reply = read_replies(await drip(small, start, drop))[-1]
    assert (reply.status, code(reply.body), reply.headers["connection"]) == (408, "request_timeout", "close")
    assert time.monotonic() - began < RECOVERED_S


@pytest.mark.parametrize("start", [b"", get("/echo")], ids=["new", "used"])
async def test_an_idle_connection_is_closed_without_a_word(small: Site, start: bytes) -> None:
    assert b"408" not in await drip(small, start, b"")


async def test_empty_lines_keep_no_connection_open(small: Site) -> None:
    await drip(small, b"", b"\r\n")


async def test_a_reply_that_nobody_reads_is_given_up(small: Site) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", small.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.write(get("/large", CLOSE))
    while not small.handlers.handled:
        await asyncio.sleep(0)
    await small.until_clean()  # while the client is still there
    writer.transport.abort()


async def test_an_unread_stream_is_cut_off_and_its_handler_cancelled(small: Site) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", small.port, limit=1024)
    writer.write(get("/endless"))
    async with asyncio.timeout(PATIENCE_S):
        await small.handlers.cancelled.wait()
    await small.until_clean()  # while the client is still there
    writer.transport.abort()


@pytest.mark.parametrize(("request_", "is_handled"), [(get("/slow"), True), (get("/large"), False)])
async def test_a_slow_client_is_waited_for_while_it_reads(request_: bytes, is_handled: bool) -> None:
    handlers = Handlers()
    server = server_module.Server(App(handlers.routes(), SMALL))
    connection, transport = server.connect(), MemoryTransport()
    connection.connection_made(transport)
    connection.data_received(request_)
    while not transport.written:
        await asyncio.sleep(0)
    connection.pause_writing()
    now, step_s = server.now(), 0.9 * SMALL.keep_alive_s
    for unsent_bytes in range(100_000, 0, -10_000):
        transport.unsent_bytes = unsent_bytes
        connection.expire(now := now + step_s, SMALL.receive_timeout_s, SMALL.keep_alive_s)
        assert not transport.is_closed
    assert connection.is_busy is is_handled
    connection.expire(now + 1.2 * SMALL.keep_alive_s, SMALL.receive_timeout_s, SMALL.keep_alive_s)
    assert transport.is_closed
    connection.connection_lost(None)
    await server.close()


async def test_the_system_looks_after_clients_that_vanish_without_a_goodbye(site: Site) -> None:
    _, writer = await site.open(post("/wait", b""))
    await site.handlers.began.wait()
    [connection] = site.server.connections
    assert connection._transport is not None
    raw = connection._transport.get_extra_info("socket")
    asked = [raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name, _ in KEEPALIVE]
    assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert asked == [value for _, value in KEEPALIVE]
    writer.close()


async def test_a_slow_handler_is_nobodys_fault(small: Site) -> None:
    reader, writer = await small.open(post("/wait", b"", CLOSE))
    await small.handlers.began.wait()
    await asyncio.sleep(0.2)
    small.handlers.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        assert b" 200 OK" in await reader.read()
    writer.close()


# --- leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goodbye", ["close", "reset"])
@pytest.mark.parametrize("request_", [post("/wait", b"body"), get("/slow"), post("/wait", b"body") + get("/echo")])
async def test_a_client_that_leaves_cancels_its_handler_at_once(request_: bytes, goodbye: str) -> None:
    """The fastest of some: one that was slow may be the machine's fault."""

    async def cancel_s() -> float:
        async with serving() as site, asyncio.timeout(PATIENCE_S):
            _, writer = await site.open(request_)
            await site.handlers.began.wait()
            await asyncio.sleep(2 * AT_ONCE_S)
            left = time.monotonic()
            {"close": writer.close, "reset": lambda: reset(writer)}[goodbye]()
            await site.handlers.cancelled.wait()
            took_s = time.monotonic() - left
            await site.until_clean()
            assert site.handlers.handled == 0
            writer.close()
            return took_s

    assert any([await cancel_s() < CANCEL_S for _ in range(3)])


async def test_a_client_that_closes_without_reading_cancels_its_stream(site: Site) -> None:
    """Unread data would keep a connection open that is closed politely."""
    _, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
    writer.write(get("/endless"))
    await site.handlers.began.wait()
    writer.close()
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.cancelled.wait()
    await site.until_clean()


async def test_nothing_is_held_for_a_handler_that_never_began() -> None:
    """The client leaves in the very turn in which its request is read."""
    server = server_module.Server(App(Handlers().routes()))
    for request in (post("/wait", b"body"), post("/wait", b"body") * 2, post("/wait", b"body")[:-1]):
        connection = server.connect()
        connection.connection_made(MemoryTransport())
        connection.data_received(request)
        assert server.body_bytes > 0
        connection.connection_lost(None)
    async with asyncio.timeout(PATIENCE_S):
        while server.connections:
            await asyncio.sleep(0)
    assert server.body_bytes == 0
    await server.close()


async def test_nothing_is_held_after_many_requests_of_all_kinds(site: Site) -> None:
    data = post("/echo", b"a" * 100) + get("/stream") + chunked("/echo", [b"a"] * 3) + get("/nowhere")
    ends = [get("/echo", CLOSE), b"garbage", post("/echo", b"body")[:-1], b""]
    writers = [(await site.open(data * 5 + ends[number % 4]))[1] for number in range(40)]
    async with asyncio.timeout(PATIENCE_S):
        while site.handlers.handled < 40 * 10:
            await asyncio.sleep(0)
    for writer in writers:
        writer.close()
    await site.until_clean()


# --- the server's end ---------------------------------------------------------------------------------


async def test_closing_ends_idle_connections_and_lets_streams_finish() -> None:
    handlers = Handlers()
    async with listening(App(handlers.routes()), "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2])
        idle, _ = await asyncio.open_connection("127.0.0.1", port)
        busy, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/slow"))
        await handlers.began.wait()

        async def finish() -> bytes:
            assert await idle.read() == b""
            handlers.gate.set()
            return await busy.read()

        task = asyncio.create_task(finish())
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        data = await task
    assert data.endswith(b"4\r\nlast\r\n0\r\n\r\n")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_closing_cancels_and_awaits_running_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SHUTDOWN_S", 0.05)
    handlers = Handlers()
    async with listening(App(handlers.routes()), "127.0.0.1", 0) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(post("/wait", b""))
        await handlers.began.wait()
    assert handlers.cancelled.is_set()
    writer.close()


async def test_closing_lets_a_slow_client_read_a_complete_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SHUTDOWN_S", 0.01)
    monkeypatch.setattr(server_module, "FLUSH_S", PATIENCE_S)
    handlers = Handlers()
    async with listening(App(handlers.routes()), "127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
        writer.write(get("/large"))
        while not handlers.handled:
            await asyncio.sleep(0)

        async def read_late() -> bytes:
            await asyncio.sleep(0.2)
            return await reader.read()

        reading = asyncio.create_task(read_late())
    [reply] = read_replies(await reading)
    assert len(reply.body) == 1 << 20
    writer.close()


async def test_while_draining_no_connection_outlives_its_reply() -> None:
    draining = False
    async with serving(is_draining=lambda: draining) as site:
        reader, writer = await site.open(get("/echo"))
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"connection" not in head
            draining = True
            for request in (get("/stream"), get("/echo")):
                [reply] = await site.ask(request)
                assert (reply.status, reply.headers["connection"]) == (200, "close")
        writer.close()


async def test_a_connection_that_comes_too_late_is_closed() -> None:
    server = server_module.Server(App([]))
    await server.close()
    connection, transport = Connection(server), MemoryTransport()
    connection.connection_made(transport)
    assert transport.is_closed
    connection.connection_lost(None)
    assert not server.connections


async def test_memory_is_given_back_when_many_clients_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(server_module, "MANY_CONNECTIONS", 6)
    monkeypatch.setattr(server_module, "give_back_free_memory", lambda: given_back.append(1))
    async with serving(HttpLimits(sweep_s=0.02)) as site:
        for many in (5, 8):  # five are not many
            clients = [await site.open() for _ in range(many)]
            await asyncio.sleep(0.2)
            assert given_back == []
            for _, writer in clients:
                writer.close()
            await site.until_clean()
            await asyncio.sleep(0.2)
        assert given_back == [1]


async def test_handlers_of_long_bodies_do_not_begin_in_turns_that_follow_each_other() -> None:
    """Each handler reads its body at once; short requests get their turns between two of them."""
    began_at: list[int] = []
    turn = 0

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def read(request: Request) -> Reply:
        began_at.append(turn)
        return Reply(b"")

    body = bytes(server_module.LONG_BODY_BYTES + 1)
    async with serving(more=[Route("POST", "/read", read)]) as site:
        counting = asyncio.create_task(count_turns())
        replies = await asyncio.gather(*[site.ask(post("/read", body, CLOSE), methods=("POST",)) for _ in range(6)])
        counting.cancel()
    assert [reply.status for [reply] in replies] == [200] * 6
    assert min(later - earlier for earlier, later in pairwise(began_at)) >= 1
