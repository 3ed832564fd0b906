"""A storm of short connections: every complete request gets its whole answer, whoever hangs up beside it."""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.mesh import Mesh, running_mesh

pytestmark = pytest.mark.e2e

REQUESTS, AT_ONCE = 1000, 200
KINDS = ("plain", "in two parts", "half-closed", "aborted")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    flags = ("--engine=mock", "--mock-speedup=0", "--kv-transfer=shm", "--prefill=0", "--decode=0", "--aggregated=2")
    with running_mesh(tmp_path, *flags, "--no-admission") as mesh:  # no answer is to be a 429
        yield mesh


def message(host: str, number: int) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": [1 + number, *range(20)], "max_tokens": 4, "ignore_eos": True})
    head = ("POST /v1/completions HTTP/1.1", f"host: {host}", "content-type: application/json", "connection: close")
    return "\r\n".join((*head, f"content-length: {len(body)}", "", body)).encode()


async def ask(address: tuple[str, int], number: int, kind: str) -> str:
    """Return what a client sees, "200" for a whole answer."""
    loop, sent = asyncio.get_running_loop(), message(f"{address[0]}:{address[1]}", number)
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, address)
        first = sent[:-10] if kind == "in two parts" else sent
        await loop.sock_sendall(client, first)
        if kind == "aborted":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            return kind
        if kind == "half-closed":
            client.shutdown(socket.SHUT_WR)
        elif first != sent:
            await asyncio.sleep(0)
            await loop.sock_sendall(client, sent[len(first) :])
        received = b""
        while chunk := await loop.sock_recv(client, 65536):
            received += chunk
    if received.startswith(b"HTTP/1.1 100 "):  # a half-closed client is asked whether it still reads
        received = received.partition(b"\r\n\r\n")[2]
    head, _, body = received.partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] == [b"200"]:
        assert json.loads(body)["usage"]["completion_tokens"] == 4
        return "200"
    return f"{kind}: {received[:300]!r}"


async def storm(url: str) -> Counter[str]:
    place, free = urlsplit(url), asyncio.Semaphore(AT_ONCE)
    address = (str(place.hostname), int(place.port or 0))

    async def one(number: int) -> str:
        async with free:
            return await asyncio.wait_for(ask(address, number, KINDS[number % len(KINDS)]), 60)

    return Counter(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


def test_every_complete_request_gets_its_answer(mesh: Mesh) -> None:
    quarter = REQUESTS // len(KINDS)
    assert asyncio.run(storm(mesh.url)) == {"200": REQUESTS - quarter, "aborted": quarter}
