"""Frames that come again, or not at all: no message is taken twice, and none is missed in silence."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.metrics import REPEATED
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import PeerLostError
from tests.support.patience import PATIENCE_S

Pass = Callable[[int, bytes], list[bytes]]  # the number of a frame of the server, and the frame -> what the caller gets


@contextlib.asynccontextmanager
async def behind(server: str, answers: Pass, calls: Pass = lambda _, frame: [frame]) -> AsyncIterator[str]:
    """Yield the address of a proxy that passes frames on as it is told."""
    host, _, port = server.rpartition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Pass) -> None:
        number = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(4)
                frame = head + await reader.readexactly(struct.unpack("<I", head)[0])
                number += 1
                for one in way(number, frame):
                    writer.write(one)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, far_writer, calls), pump(far_reader, writer, answers))

    proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def counting() -> AsyncIterator[tuple[PlaneServer, list[str], PlaneClient]]:
    """Yield a server that counts slowly, each number in a frame of its own; the calls that it ran; and a client."""
    ran: list[str] = []

    async def count(call: Call) -> None:
        ran.append(call.method)
        for n in range(20):
            await call.send(n)
            await asyncio.sleep(0.001)

    server, client = PlaneServer({"count": count}), PlaneClient()
    await server.start("127.0.0.1")
    yield server, ran, client
    await client.close()
    await server.close()


async def numbers(client: PlaneClient, address: str) -> list[int]:
    async with client.open(address, "count", None, PATIENCE_S) as stream:
        return [n async for n in stream.messages(int)]


async def test_frames_that_come_again_are_dropped() -> None:
    dropped = REPEATED.labels().value
    async with counting() as (server, _, client), behind(server.address, lambda _, frame: [frame] * 2) as proxy:
        assert await numbers(client, proxy) == list(range(20))
    assert REPEATED.labels().value >= dropped + 20


async def test_a_frame_that_is_repeated_later_is_dropped() -> None:
    kept: list[bytes] = []

    def again(number: int, frame: bytes) -> list[bytes]:
        kept.append(frame)
        return [frame, kept[number // 2]]

    async with counting() as (server, _, client), behind(server.address, again) as proxy:
        assert await numbers(client, proxy) == list(range(20))


@pytest.mark.parametrize("order", [[1, 3, 2], [1, 3]], ids=["reordered", "missing"])
async def test_a_gap_ends_the_connection_and_its_calls(order: list[int]) -> None:
    kept: list[bytes] = []

    def mixed(number: int, frame: bytes) -> list[bytes]:
        kept.append(frame)
        return [frame] if number > 3 else [] if number < 3 else [kept[n - 1] for n in order]

    async with counting() as (server, _, client), behind(server.address, mixed) as proxy:
        with pytest.raises(PeerLostError, match=r"batch 2 of .* is missing, batch 3 has come"):
            await numbers(client, proxy)
        assert await numbers(client, server.address) == list(range(20))


async def test_a_call_that_comes_again_does_not_run_again() -> None:
    async with (
        counting() as (server, ran, client),
        behind(server.address, lambda _, frame: [frame], lambda _, frame: [frame] * 2) as proxy,
    ):
        assert await numbers(client, proxy) == list(range(20))
        assert await numbers(client, proxy) == list(range(20))
    assert ran == ["count"] * 2
