"""Test a rogue publisher of KV events on an open mesh, from outside: garbage, forged blocks and a flood.

A card in discovery names it, as when a stranger takes the port of a worker that has died.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvmesh.kvevents.formats import encode_payload
from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.protocol.events import Cleared, KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash, WorkerId
from kvmesh.protocol.messages import WorkerCard, decode_card, encode_card
from tests.support import mesh_tls
from tests.support.ports import free_port
from tests.support.services import NEW, Services
from tests.support.streams import Stream, check_mock_answer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(mesh_tls.IS_ON, reason="a closed mesh lets no stranger publish"),
]

BLOCK = 16
PROMPT = tuple(range(20, 20 + 8 * BLOCK))
MOST_GROWTH = 150 << 20  # bytes of the frontend, which has the router inside


@contextmanager
def rogue_publisher() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.SNDHWM, 200)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:*")
    try:
        yield socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        context.destroy(linger=0)


async def forge_card(place: str, endpoint: str) -> None:
    """Copy the card of the honest worker to a worker that is not there, and that publishes at `endpoint`."""
    discovery = open_discovery(place)
    async for change in discovery.watch("workers/"):
        if isinstance(change, Put):
            honest = decode_card(change.value, WorkerCard)
            break
    rogue = msgspec.structs.replace(
        honest,
        worker_id=WorkerId("rogue"),
        name="rogue",
        address=f"127.0.0.1:{free_port()}",
        kv_events=endpoint,
        kv_replay="",
    )
    await discovery.put("workers/rogue", encode_card(rogue))
    try:
        await asyncio.Event().wait()
    finally:
        await discovery.close()


def forged(number: int) -> list[KvEvent]:
    """Blocks that the rogue claims to hold: the honest prompt's first, then as many as fit into a message."""
    claimed: list[KvEvent] = [Stored((EngineHash(number),), None, PROMPT[:BLOCK], BLOCK)]
    for index in range(200):
        name = number * 1000 + index
        claimed.append(Stored((EngineHash(name),), EngineHash(name - 1), tuple(range(BLOCK)), BLOCK))
    return [*claimed, Removed((EngineHash(7),)), Cleared()] if number % 50 == 0 else claimed


def lie(socket: "zmq.Socket[bytes]", numbers: range) -> None:
    """Publish blocks that nobody holds, in the right order."""
    for number in numbers:
        socket.send_multipart([b"", number.to_bytes(8, "big"), encode_payload(forged(number + 1), 1.0)])


def babble(socket: "zmq.Socket[bytes]", numbers: range) -> None:
    """Publish what is no event, and jumps of the sequence numbers."""
    for number in numbers:
        for frames in (
            [b"", (number % 7 * 2**60).to_bytes(8, "big"), os.urandom(2000)],
            [os.urandom(20)],
            [b"", b"short", b"\xc1"],
            [b"x" * 100, b"", b"", b""],
            [b"", number.to_bytes(8, "big"), b"\xdd\xff\xff\xff\xff"],  # an array of 4 billion
        ):
            socket.send_multipart(frames)


def test_a_rogue_publisher_costs_no_answer_and_little_memory(tmp_path: Path) -> None:
    place = f"file:{tmp_path / 'discovery'}"
    with ExitStack() as stack, rogue_publisher() as (socket, endpoint):
        mesh = Services(tmp_path, place, stack)
        frontend, worker = mesh.start("frontend", NEW), mesh.start("aggregated", NEW, "--block-size", str(BLOCK))
        mesh.until_ready(frontend, worker)
        mesh.until_joined(frontend, 1)
        url = mesh.url(frontend)
        check_mock_answer(Stream(url, PROMPT, 8).join())
        before = mesh.metric(frontend, "process_resident_memory_bytes")

        async def under_attack() -> None:
            forging = asyncio.create_task(forge_card(place, endpoint))
            await asyncio.to_thread(mesh.until_joined, frontend, 2)
            for start in range(0, 400, 100):
                attack = lie if start < 200 else babble
                await asyncio.to_thread(attack, socket, range(start, start + 100))
                for stream in [Stream(url, (*PROMPT, start, count), 8) for count in range(4)]:
                    check_mock_answer(await asyncio.to_thread(stream.join))
            forging.cancel()
            await asyncio.wait({forging})

        asyncio.run(under_attack())
        grown = mesh.metric(frontend, "process_resident_memory_bytes") - before
        assert grown < MOST_GROWTH, f"{grown / 2**20:.0f} MiB"
        assert mesh.metric(frontend, "kvmesh_router_kv_recoveries_total") > 100, "the attack has arrived"
        assert "Traceback" not in mesh.log(frontend)
