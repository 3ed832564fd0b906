"""A listener that leaves: who has connected is answered, who comes later goes elsewhere at once."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from kvmesh.mesh.http import server as server_module
from kvmesh.mesh.http.server import App, Leaving, listening
from tests.mesh.http.raw import CLOSE, Handlers, get, post, read_replies
from tests.support.patience import PATIENCE_S


class Site(NamedTuple):
    port: int
    handlers: Handlers
    leaving: Leaving

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer


@asynccontextmanager
async def served() -> AsyncIterator[Site]:
    handlers, leaving = Handlers(), Leaving()
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(App(handlers.routes()), "127.0.0.1", 0, leaving=leaving) as url,
    ):
        yield Site(int(url.rpartition(":")[2]), handlers, leaving)


async def test_clients_that_wait_in_the_kernel_are_answered() -> None:
    async with served() as site:
        clients = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(100)]
        for client in clients:
            client.sendall(get("/echo"))
        await site.leaving.leave()
        for client in clients:
            [reply] = read_replies(await asyncio.to_thread(received, client))
            assert (reply.status, reply.headers["connection"]) == (200, "close")


def received(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


async def test_who_comes_later_is_refused_while_others_are_answered() -> None:
    async with served() as site:
        reader, _ = await site.open(post("/wait", b"body"))
        await site.handlers.began.wait()
        await site.leaving.leave()
        with pytest.raises(ConnectionRefusedError):
            await site.open()
        site.handlers.gate.set()
        [reply] = read_replies(await reader.read())
        assert (reply.status, reply.headers["connection"]) == (200, "close")


async def test_idle_connections_end() -> None:
    async with served() as site:
        reader, _ = await site.open(get("/echo"))
        await reader.readuntil(b"\r\n\r\n")
        await site.leaving.leave()
        assert b"HTTP" not in await reader.read()


async def test_a_request_that_crosses_the_goodbye_is_answered() -> None:
    """Its bytes lie in the socket, and the event loop has not brought them yet."""
    async with served() as site:
        reader, writer = await site.open(get("/echo"))
        await reader.readuntil(b"\r\n\r\n")
        await reader.read(1 << 16)
        os.write(writer.get_extra_info("socket").fileno(), get("/echo", "X-Again: yes"))
        await site.leaving.leave()
        [reply] = read_replies(await reader.read())
        assert (reply.status, reply.headers["connection"]) == (200, "close")


async def test_a_new_connection_has_time_for_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_ASK_S", PATIENCE_S)
    async with served() as site:
        reader, writer = await site.open()
        leaving = asyncio.create_task(site.leaving.leave())
        await asyncio.sleep(0.1)
        writer.write(get("/echo"))
        [reply] = read_replies(await reader.read())
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        await leaving


async def test_a_new_connection_that_asks_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_ASK_S", 0.05)
    async with served() as site:
        reader, _ = await site.open()
        await asyncio.sleep(0)
        await site.leaving.leave()
        assert await reader.read() == b""


async def test_a_request_whose_body_is_on_its_way_is_answered() -> None:
    async with served() as site:
        request = post("/echo", b"a long body", CLOSE)
        reader, writer = await site.open(request[:-5])
        await asyncio.sleep(0.05)
        leaving = asyncio.create_task(site.leaving.leave())
        await asyncio.sleep(0.05)
        writer.write(request[-5:])
        [reply] = read_replies(await reader.read())
        assert reply.status == 200
        await leaving
