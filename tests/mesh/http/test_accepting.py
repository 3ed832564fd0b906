"""Clients that come together are accepted together, however busy the event loop is."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from kvmesh.mesh.http.request import Reply, Request
from kvmesh.mesh.http.server import App, Route, listening

CLIENTS = 300
MOST_TURNS = 40  # uvloop alone takes one turn per client


async def hello(request: Request) -> Reply:
    return Reply(b"hello", content_type="text/plain")


def waiting_client(port: int) -> socket.socket:
    """Return a client whose connection and request lie in the kernel."""
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    client.setblocking(False)
    return client


async def turns_until_answered(clients: int) -> int:
    async with listening(App([Route("GET", "/", hello)]), "127.0.0.1", 0) as url:
        waiting = [waiting_client(int(url.rpartition(":")[2])) for _ in range(clients)]
        try:
            turns = 0
            while waiting:
                turns += 1
                await asyncio.sleep(0)  # one turn, as a stream with a token for its client would take
                waiting = [client for client in waiting if not has_answer(client)]
            return turns
        finally:
            for client in waiting:
                client.close()


def has_answer(client: socket.socket) -> bool:
    try:
        answer = client.recv(4096)
    except BlockingIOError:
        return False
    assert answer.endswith(b"hello")
    client.close()
    return True


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_burst_of_clients_is_accepted_within_a_few_turns(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(turns_until_answered(CLIENTS)) <= MOST_TURNS
