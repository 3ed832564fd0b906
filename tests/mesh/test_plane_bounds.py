"""The memory and the connections that peers take from the request plane have limits, which harm no honest peer."""

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.mesh.plane.bounds import SERVER_LIMITS, PlaneLimits
from kvmesh.mesh.plane.client import WAITING_BYTES, PlaneClient
from kvmesh.mesh.plane.frames import MAX_CALL_BYTES, Batch, FrameReader, Hello, Open, encode_frame
from kvmesh.mesh.plane.metrics import ASSEMBLING_BYTES, CONNECTIONS, HANGUPS, UNSENT_BYTES
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import OverloadedError, PeerLostError, WireError
from tests.support.patience import PATIENCE_S

MIB = 1 << 20
REPLACE = msgspec.structs.replace
SERVER = """
import asyncio
from kvmesh.mesh.lifecycle import run
from kvmesh.mesh.plane.server import Call, PlaneServer
async def size(call: Call):
    await call.send(len(call.body))
async def large(call: Call):
    while True:
        await call.send(bytes(1 << 20))
async def main(stop):
    print(await PlaneServer({"size": size, "large": large}).start("127.0.0.1"), flush=True)
    await stop.wait()
run(main)
"""


class ServerProcess:
    """A server of the request plane in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.pid = process.pid
        self.address = process.stdout.readline().strip()
        host, _, port = self.address.rpartition(":")
        self.place = (host, int(port))

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096 / MIB

    async def most_rss_mib(self, for_s: float) -> float:
        """Return the most memory that the process has in a while."""
        most, end = 0.0, time.monotonic() + for_s
        while time.monotonic() < end:
            most = max(most, self.rss_mib())
            await asyncio.sleep(0.02)
        return most


@pytest.fixture
def server_process() -> Iterator[ServerProcess]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield ServerProcess(process)
        process.kill()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[PlaneClient]:
    client = PlaneClient()
    yield client
    await client.close()


async def hoard(place: tuple[str, int], announced_bytes: int, sent_bytes: int, host: str = "") -> bytes:
    """Announce a frame after a Hello, send a part of it, and wait. Return what the server says at the end."""
    reader, writer = await asyncio.open_connection(*place, local_addr=(host, 0) if host else None)
    writer.write(encode_frame(Hello()) + struct.pack("<I", announced_bytes))
    with contextlib.suppress(ConnectionError):
        for _ in range(sent_bytes // 65536):
            writer.write(bytes(65536))
            await writer.drain()
    words = b""
    with contextlib.suppress(ConnectionError):
        words = await reader.read()
    writer.transport.abort()
    return words


@contextlib.asynccontextmanager
async def hoarders(*hoarding: "asyncio.Task[bytes]") -> AsyncIterator[None]:
    """End the hoarders with the block."""
    try:
        yield
    finally:
        for one in hoarding:
            one.cancel()
        await asyncio.gather(*hoarding, return_exceptions=True)


def reason_of(words: bytes) -> str:
    """Return why a server has hung up, by its last frame."""
    [frame] = FrameReader().feed(words)
    assert isinstance(frame, Batch)
    [(_stream, failure)] = frame.ends
    assert failure is not None
    return failure.message


@pytest.mark.parametrize("announced_bytes", [60 * MIB, MAX_CALL_BYTES])
async def test_24_hoarders_leave_a_servers_memory_within_30_mib(
    server_process: ServerProcess, client: PlaneClient, announced_bytes: int
) -> None:
    assert await client.ask(server_process.address, "size", bytes(4 * MIB), int, PATIENCE_S) > 4 * MIB
    before = server_process.rss_mib()
    hoarding = [asyncio.create_task(hoard(server_process.place, announced_bytes, 60 * MIB)) for _ in range(24)]
    async with hoarders(*hoarding):
        assert await server_process.most_rss_mib(2.5) - before <= 30
        for _ in range(20):  # an honest caller is answered meanwhile, over the connection that it has
            assert await client.ask(server_process.address, "size", bytes(MIB), int, PATIENCE_S) > MIB


async def test_who_announces_too_much_is_told_so(server_process: ServerProcess) -> None:
    words = await hoard(server_process.place, 60 * MIB, 0)
    assert reason_of(words) == f"a frame of {60 * MIB} bytes is announced, the limit is {MAX_CALL_BYTES}"


async def test_a_stranger_may_not_send_more_than_a_hello(server_process: ServerProcess) -> None:
    reader, writer = await asyncio.open_connection(*server_process.place)
    writer.write(struct.pack("<I", 5000) + bytes(100))
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()


async def test_an_honest_host_keeps_its_frame_beside_a_host_that_hoards(server_process: ServerProcess) -> None:
    """The frame of the honest host comes slowly: it is held for as long as those of the hoarders."""
    reader, writer = await asyncio.open_connection(*server_process.place, local_addr=("127.0.0.3", 0))
    body = msgspec.msgpack.encode(bytes(6 * MIB))
    frame = encode_frame(Hello()) + encode_frame(Open(1, "size", 60.0, 8, msgspec.Raw(body)))
    writer.write(frame[: 5 * MIB])
    hoarding = [
        asyncio.create_task(hoard(server_process.place, 16 * MIB, 15 * MIB, host="127.0.0.2")) for _ in range(12)
    ]
    async with hoarders(*hoarding):
        await asyncio.sleep(1.0)
        assert any(one.done() for one in hoarding)
        writer.write(frame[5 * MIB :])
        async with asyncio.timeout(PATIENCE_S):
            [answer] = FrameReader().feed(await reader.read(65536))
    assert isinstance(answer, Batch) and msgspec.msgpack.decode(answer.messages[0][1]) == len(body)
    writer.close()


async def test_callers_that_never_read_cost_a_bounded_amount(server_process: ServerProcess) -> None:
    """Each would leave some 2 MiB unread: 200 of them more than a peer may."""
    before = server_process.rss_mib()
    callers = []
    for _ in range(200):
        caller = socket.create_connection(server_process.place)
        caller.sendall(encode_frame(Hello()) + encode_frame(Open(1, "large", 60.0, 256, msgspec.Raw(b"\xc0"))))
        callers.append(caller)
    assert await server_process.most_rss_mib(3.0) - before <= 200  # without limits: 400
    for caller in callers:
        caller.close()


# --- in this process -----------------------------------------------------------------------------------------


async def size(call: Call) -> None:
    await call.send(len(call.body))


async def hold(call: Call) -> None:
    await call.send("begun")
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def serving(**limits: object) -> AsyncIterator[PlaneServer]:
    server = PlaneServer({"size": size, "hold": hold}, limits=limits_with(**limits))
    await server.start("127.0.0.1")
    yield server
    await server.close()


def limits_with(**limits: object) -> PlaneLimits:
    values = {name: getattr(SERVER_LIMITS, name) for name in PlaneLimits.__slots__}
    return PlaneLimits(**(values | limits))


def place_of(server: PlaneServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


async def test_a_frame_that_does_not_arrive_in_time_ends_its_connection() -> None:
    async with serving(frame_s=0.2) as server:
        words = await asyncio.wait_for(hoard(place_of(server), MIB, 65536), PATIENCE_S)
        assert reason_of(words) == "a frame was not complete after 0.2 s"


async def test_a_connection_without_a_hello_ends(client: PlaneClient) -> None:
    async with serving(hello_s=0.2) as server:
        assert await client.ask(server.address, "size", None, int, PATIENCE_S) == 1
        reader, writer = await asyncio.open_connection(*place_of(server))
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
        assert client.standing(server.address) is not None, "whoever has said Hello may be idle"


async def test_beyond_the_limit_an_idle_connection_ends(client: PlaneClient) -> None:
    async with serving(links=4) as server, client.open(server.address, "hold", None, 60) as stream:
        assert await stream.next() is not None
        others = [await asyncio.open_connection(*place_of(server)) for _ in range(6)]
        for reader, _ in others[:3]:  # strangers, the oldest first
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert not stream._ended, "a busy connection stays"
        assert len(server._links) == 4
        for _, writer in others:
            writer.close()


async def test_bodies_of_running_calls_are_bounded_in_sum(client: PlaneClient) -> None:
    async with serving(peer_calls_bytes=5 * MIB) as server:
        async with client.open(server.address, "hold", bytes(3 * MIB), 60) as stream:
            assert await stream.next() is not None
            with pytest.raises(OverloadedError, match="hold 3 MiB already") as refused:
                await client.ask(server.address, "size", bytes(3 * MIB), int, PATIENCE_S)
            assert refused.value.retry_after_s == 1
            assert await client.ask(server.address, "size", bytes(1000), int, PATIENCE_S) > 1000
        async with asyncio.timeout(PATIENCE_S):
            while server.tasks:
                await asyncio.sleep(0.01)
        assert await client.ask(server.address, "size", bytes(3 * MIB), int, PATIENCE_S) > 3 * MIB


async def test_a_call_too_large_for_a_server_is_not_sent(client: PlaneClient) -> None:
    async with serving() as server:
        with pytest.raises(WireError, match="over the limit"):
            await client.ask(server.address, "size", bytes(MAX_CALL_BYTES), int, PATIENCE_S)
        assert await client.ask(server.address, "size", bytes(MAX_CALL_BYTES - 2000), int, PATIENCE_S) > 15 * MIB


# --- answers ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def worker_that_sends(data: bytes) -> AsyncIterator[str]:
    """Yield the address of a peer that sends `data` to a caller, and then stands still."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            frames = FrameReader()
            while not any(isinstance(frame, Open) for frame in frames.feed(await reader.read(65536))):
                pass
            writer.write(data)
            while await reader.read(65536):
                pass
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_worker_that_announces_too_much_is_hung_up_on(client: PlaneClient) -> None:
    async with worker_that_sends(struct.pack("<I", 60 * MIB) + bytes(MIB)) as address:
        with pytest.raises(PeerLostError, match="the limit is 33554432"):
            await client.ask(address, "size", None, int, PATIENCE_S)


async def test_answers_that_stay_incomplete_are_bounded_in_sum() -> None:
    client = PlaneClient(limits=limits_with(assembling_bytes=10 * MIB, peer_assembling_bytes=32 * MIB))
    part = struct.pack("<I", 20 * MIB) + bytes(6 * MIB)
    async with worker_that_sends(part) as first, worker_that_sends(part) as second, serving() as honest:
        asking = [asyncio.create_task(client.ask(one, "size", None, int, 60)) for one in (first, second)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        lost, stays = sorted(asking, key=lambda one: not one.done())
        assert lost.done() and not stays.done()
        with pytest.raises(PeerLostError, match="incomplete frames hold more memory"):
            await lost
        assert await client.ask(honest.address, "size", None, int, PATIENCE_S) == 1
        await client.close()
        await asyncio.gather(stays, return_exceptions=True)


async def test_a_worker_is_read_only_as_fast_as_its_answers_are_taken(client: PlaneClient) -> None:
    async def many(call: Call) -> None:
        for _ in range(100):
            await call.send(bytes(MIB))

    async with serving() as server:
        server.handlers["many"] = many
        async with client.open(server.address, "many", None, 60) as stream:
            await asyncio.sleep(1.0)
            link = client.standing(server.address)
            assert link is not None and link._waiting_bytes <= WAITING_BYTES + 8 * MIB
            assert len([part async for part in stream.messages(bytes)]) == 100
        assert link._waiting_bytes == 0


async def test_metrics_say_what_is_held_and_why_peers_were_ended() -> None:
    ended = HANGUPS.labels("no_hello").value
    connections, assembling = CONNECTIONS.labels().value, ASSEMBLING_BYTES.labels().value
    async with serving(hello_s=0.3) as server:
        reader, writer = await asyncio.open_connection(*place_of(server))
        writer.write(struct.pack("<I", 4000) + bytes(1000))
        async with asyncio.timeout(PATIENCE_S):
            while ASSEMBLING_BYTES.labels().value == assembling:
                await asyncio.sleep(0.01)
            assert ASSEMBLING_BYTES.labels().value == assembling + 1004
            assert CONNECTIONS.labels().value == connections + 1
            assert await reader.read() == b""
        writer.close()
        assert HANGUPS.labels("no_hello").value == ended + 1
        assert CONNECTIONS.labels().value == connections
        assert ASSEMBLING_BYTES.labels().value == assembling
        assert UNSENT_BYTES.labels().value == 0
