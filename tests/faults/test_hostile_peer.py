"""Test that input of a broken or hostile peer is refused by a worker, and harms nobody else."""

import os
import random
import socket
import struct
from collections.abc import Callable

import msgspec
import pytest

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.frames import Hello, encode_frame
from kvmesh.protocol.errors import InvalidRequestError, WireError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import (
    Delta,
    GenerateRequest,
    ReleaseOffer,
    SamplingParams,
    StopConditions,
    Ticket,
    pack_tokens,
)
from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, until
from tests.support.streams import Stream, check_mock_answer

PROMPT = prompt_of(40)
REPLACE = msgspec.structs.replace


def generate(name: str, **fields: object) -> GenerateRequest:
    values = {
        "request_id": RequestId(name),
        "model": "tiny",
        "prompt": pack_tokens(PROMPT),
        "sampling": SamplingParams(temperature=0),
        "stop": StopConditions(max_tokens=8, ignore_eos=True),
    }
    return GenerateRequest(**(values | fields))  # type: ignore[arg-type]


async def ask(plane: PlaneClient, address: str, body: object) -> list[Delta]:
    async with plane.open(address, "generate", body, 15) as stream:
        return [delta async for delta in stream.messages(Delta)]


REFUSED = {
    "no prompt": {"prompt": b""},
    "half a token": {"prompt": b"\x01\x02\x03"},
    "a token beyond the vocabulary": {"prompt": pack_tokens([5, 2**32 - 1])},
    "a generated token beyond the vocabulary": {"generated": (2**40,)},
    "a negative token": {"generated": (-1,)},
    "more generated than wanted": {"generated": tuple(range(100, 108))},
    "nothing wanted": {"stop": StopConditions(max_tokens=-1)},
    "another model": {"model": "other"},
    "KV offered by a decode worker": {"offer_kv": True},
}


async def test_what_cannot_be_done_is_refused(mesh: Mesh) -> None:
    plane, worker = PlaneClient(), mesh.workers()["decode-0"]
    for name, fields in REFUSED.items():
        with pytest.raises((InvalidRequestError, WireError)):
            pytest.fail(f"{name}: {await ask(plane, worker.address, generate(name, **fields))}")
    for body in (None, 7, [], {"request_id": 1}, b"x", {"request_id": "r", "model": "tiny", "prompt": "text"}):
        with pytest.raises(WireError):
            await ask(plane, worker.address, body)
    await plane.close()
    assert mesh.pid("decode-0") == worker.pid
    check_mock_answer(Stream(mesh.url, PROMPT, 5, kvmesh={"worker": "decode-0"}).join())


LIES: dict[str, Callable[[Ticket], Ticket]] = {
    "no peer": lambda t: REPLACE(t, peer=b""),
    "a cut peer": lambda t: REPLACE(t, peer=t.peer[: len(t.peer) // 2]),
    "a garbled peer": lambda t: REPLACE(t, peer=bytes(byte ^ 0x55 for byte in t.peer)),
    "another nonce": lambda t: REPLACE(t, nonce=t.nonce ^ 1),
    "no nonce": lambda t: REPLACE(t, nonce=0),
    "no nonce, as in a slot that nobody uses": lambda t: REPLACE(t, nonce=0, slot=t.slot + 7),
    "a slot before the first": lambda t: REPLACE(t, slot=-1),
    "a slot after the last": lambda t: REPLACE(t, slot=2**40),
    "blocks before the first": lambda t: REPLACE(t, block_ids=(-1, -2, -3)),
    "blocks after the last": lambda t: REPLACE(t, block_ids=(2047, 2048, 2**40)),
    "blocks missing": lambda t: REPLACE(t, block_ids=t.block_ids[:-1]),
    "blocks too many": lambda t: REPLACE(t, block_ids=(*t.block_ids, 0)),
    "fewer tokens": lambda t: REPLACE(t, num_tokens=3),
    "no tokens": lambda t: REPLACE(t, num_tokens=-5),
    "another layout": lambda t: REPLACE(t, layout=REPLACE(t.layout, num_layers=10**9)),
    "another backend": lambda t: REPLACE(t, backend="carrier pigeon"),
}


@pytest.mark.parametrize("transfer", ["nixl", "shm"])
async def test_a_ticket_that_lies_costs_the_pull_and_no_more(transfer: str, request: pytest.FixtureRequest) -> None:
    mesh: Mesh = request.getfixturevalue("nixl_mesh" if transfer == "nixl" else "mesh")
    cards = mesh.workers()
    plane = PlaneClient()
    expected = await ask(plane, cards["decode-1"].address, generate("plain", cache_salt="plain"))
    answer = [token for delta in expected for token in delta.token_ids]

    async def release(offer_id: int, nonce: int) -> None:
        await plane.tell(cards["prefill-0"].address, "release", ReleaseOffer(offer_id=offer_id, nonce=nonce), 5)

    async def offered(name: str) -> tuple[Delta, Ticket]:
        """Forged tickets have one offer each, so that no offer expires while others are tried."""
        [first] = await ask(plane, cards["prefill-0"].address, generate(f"{name}, offered", offer_kv=True))
        assert first.ticket is not None
        return first, first.ticket

    for name, lie in LIES.items():
        first, ticket = await offered(name)
        leg = generate(name, generated=first.token_ids, ticket=lie(ticket), cache_salt=name)
        deltas = await ask(plane, cards["decode-0"].address, leg)
        tokens = [*first.token_ids, *(token for delta in deltas for token in delta.token_ids)]
        assert tokens == answer, name
        assert deltas[0].pull is None or deltas[0].pull.error, name
        await release(ticket.offer_id, ticket.nonce)
    _, ticket = await offered("what is released")
    await release(ticket.offer_id, ticket.nonce ^ 1)
    assert mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == 1, "who does not know the nonce cannot release"
    await release(ticket.offer_id, ticket.nonce)
    until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == 0, what="the release")
    await plane.close()
    assert {name: card.pid for name, card in mesh.workers().items()} == {name: c.pid for name, c in cards.items()}


def test_noise_on_the_request_plane_ends_no_worker(mesh: Mesh) -> None:
    worker = mesh.workers()["decode-0"]
    host, _, port = worker.address.rpartition(":")
    rng = random.Random(3)
    stream = Stream(mesh.url, prompt_of(20), 100, kvmesh={"worker": "decode-0"})
    for i in range(60):
        with socket.create_connection((host, int(port))) as noisy:
            if i % 3:
                noisy.sendall(encode_frame(Hello()))
            length = rng.choice([0, 1, 8, 40, 2**20, 2**32 - 1])
            noisy.sendall(struct.pack("<I", length) + os.urandom(rng.choice([0, 1, 8, 40])))
    check_mock_answer(stream.join())
    assert mesh.pid("decode-0") == worker.pid
    until(lambda: mesh.metric("kvmesh_worker_running_requests", "decode-0") == 0)
