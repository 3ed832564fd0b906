"""Two workers of a closed mesh, over TLS: who gets tickets opened, and that nothing else says where memory is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import PlaneServer
from kvmesh.protocol.errors import DrainingError, IdentityError, TransferError
from kvmesh.protocol.hashing import pack_hashes, sequence_hashes
from kvmesh.protocol.ids import RequestId, WorkerId, new_worker_id
from kvmesh.protocol.messages import (
    Delta,
    GenerateRequest,
    OfferedPrefix,
    OfferPrefix,
    OpenedTicket,
    PrefixSource,
    RedeemTicket,
    ReleaseOffer,
    Role,
    SamplingParams,
    StopConditions,
    Ticket,
    encode,
    pack_tokens,
)
from kvmesh.workers.engines.mock.executor import MockExecutor, mock_token
from kvmesh.workers.metrics import REDEMPTIONS
from kvmesh.workers.sealed_tickets import TicketOffice
from kvmesh.workers.service import Worker, asking_peers
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.certificates import TestCa
from tests.support.patience import PATIENCE_S
from tests.support.place import FakePlace

PROMPT = list(range(10, 60))
ANSWER = [mock_token(PROMPT, i, 2048) for i in range(6)]


@dataclass
class Member:
    engine: StepEngine
    server: PlaneServer
    plane: PlaneClient
    address: str
    worker_id: WorkerId


class Mesh:
    """A prefill worker, decode workers, and clients with whatever role a test wants."""

    def __init__(self, folder: Path) -> None:
        self.ca = TestCa(folder / "ca")
        self.members: list[Member] = []
        self.planes: list[PlaneClient] = []

    async def worker(self, role: Role, name: str, redeem_s: float = PATIENCE_S) -> Member:
        credentials = self.ca.member(MeshRole.WORKER, name)
        config = StepEngineConfig(
            "m", "", 64, 8, 512, offer_lease_s=PATIENCE_S, pull_timeout_s=PATIENCE_S, shares_prefixes=True
        )
        engine = StepEngine(MockExecutor(block_size=16, speedup=0), ShmBackend(), config)
        place, plane = FakePlace(role), PlaneClient(credentials)
        asking_peers(engine, plane)
        place.worker_id = new_worker_id(name)
        worker = Worker(engine, place, office=TicketOffice(plane, redeem_s))
        server = PlaneServer(worker.handlers(), always={"release", "redeem"}, credentials=credentials)
        address = await server.start("127.0.0.1")
        worker.info = await engine.start(place.worker_id, address)
        self.members.append(Member(engine, server, plane, address, place.worker_id))
        return self.members[-1]

    def client(self, role: MeshRole, name: str = "") -> PlaneClient:
        self.planes.append(PlaneClient(self.ca.member(role, name)))
        return self.planes[-1]

    async def close(self) -> None:
        for plane in self.planes:
            await plane.close()
        for member in self.members:
            await member.plane.close()
            await member.server.close()
            await member.engine.stop()


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path)
    yield mesh
    await mesh.close()


def request(**fields: Any) -> GenerateRequest:
    values: dict[str, Any] = {
        "request_id": RequestId("r"),
        "model": "m",
        "prompt": pack_tokens(PROMPT),
        "sampling": SamplingParams(temperature=0),
        "stop": StopConditions(max_tokens=6, ignore_eos=True),
    }
    return GenerateRequest(**(values | fields))


async def ask(plane: PlaneClient, member: Member, one: GenerateRequest) -> list[Delta]:
    async with plane.open(member.address, "generate", one, PATIENCE_S) as stream:
        return [delta async for delta in stream.messages(Delta)]


async def offered(plane: PlaneClient, prefill: Member, kv_for: str = "decode-0") -> tuple[Delta, Ticket]:
    [first] = await ask(plane, prefill, request(offer_kv=True, kv_for=kv_for))
    assert first.ticket is not None
    return first, first.ticket


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_meant_worker_pulls_with_a_sealed_ticket(mesh: Mesh) -> None:
    prefill, decode = await mesh.worker(Role.PREFILL, "prefill-0"), await mesh.worker(Role.DECODE, "decode-0")
    frontend = mesh.client(MeshRole.FRONTEND)
    first, ticket = await offered(frontend, prefill)
    assert len(ticket.secret) == 16
    assert (ticket.peer, ticket.block_ids, ticket.nonce) == (b"", (), 0)
    deltas = await ask(frontend, decode, request(generated=first.token_ids, ticket=ticket))
    assert [*first.token_ids, *tokens(deltas)] == ANSWER
    assert deltas[0].pull is not None
    assert (deltas[0].pull.error, deltas[0].pull.num_blocks) == ("", 4)


async def test_another_decode_worker_computes_the_prompt_itself(mesh: Mesh) -> None:
    prefill, thief = await mesh.worker(Role.PREFILL, "prefill-0"), await mesh.worker(Role.DECODE, "decode-1")
    frontend = mesh.client(MeshRole.FRONTEND)
    refused = REDEMPTIONS.labels("refused")._value.get()
    first, ticket = await offered(frontend, prefill, "decode-0")
    deltas = await ask(frontend, thief, request(generated=first.token_ids, ticket=ticket))
    assert [*first.token_ids, *tokens(deltas)] == ANSWER
    assert deltas[0].pull is None
    assert REDEMPTIONS.labels("refused")._value.get() == refused + 1


@pytest.mark.parametrize("role", [role for role in MeshRole if role is not MeshRole.WORKER])
async def test_no_other_role_may_redeem(mesh: Mesh, role: MeshRole) -> None:
    prefill = await mesh.worker(Role.PREFILL, "prefill-0")
    _, ticket = await offered(mesh.client(MeshRole.FRONTEND), prefill)
    with pytest.raises(IdentityError):
        await mesh.client(role, "decode-0").ask(
            prefill.address, "redeem", RedeemTicket(secret=ticket.secret), OpenedTicket, PATIENCE_S
        )


async def test_a_guessed_secret_opens_nothing(mesh: Mesh) -> None:
    prefill, decode = await mesh.worker(Role.PREFILL, "prefill-0"), await mesh.worker(Role.DECODE, "decode-0")
    await offered(mesh.client(MeshRole.FRONTEND), prefill)
    for secret in (b"", bytes(16), bytes(15)):
        with pytest.raises(TransferError, match="no such KV offer"):
            await decode.plane.ask(prefill.address, "redeem", RedeemTicket(secret=secret), OpenedTicket, PATIENCE_S)


async def test_a_ticket_that_a_frontend_wrote_itself_is_not_believed(mesh: Mesh) -> None:
    """A frontend could otherwise have a worker read any memory that the frontend names."""
    decode = await mesh.worker(Role.DECODE, "decode-0")
    forged = Ticket(offer_id=1, worker_id=WorkerId("x"), address="127.0.0.1:1", backend="shm", nonce=5, peer=b"x")
    deltas = await ask(mesh.client(MeshRole.FRONTEND), decode, request(generated=(ANSWER[0],), ticket=forged))
    assert tokens(deltas) == ANSWER[1:]
    assert deltas[0].pull is None


async def test_only_the_frontend_that_asked_may_release(mesh: Mesh) -> None:
    prefill = await mesh.worker(Role.PREFILL, "prefill-0")
    frontend, other = mesh.client(MeshRole.FRONTEND), mesh.client(MeshRole.FRONTEND, "other")
    _, ticket = await offered(frontend, prefill)
    guesses = [ReleaseOffer(offer_id=ticket.offer_id, nonce=0), ReleaseOffer(offer_id=1, nonce=0, secret=bytes(16))]
    for guess in guesses:
        await frontend.tell(prefill.address, "release", guess, PATIENCE_S)
    release = ReleaseOffer(offer_id=ticket.offer_id, nonce=0, secret=ticket.secret)
    with pytest.raises(IdentityError, match="may not release"):
        await other.tell(prefill.address, "release", release, PATIENCE_S)
    assert prefill.engine.load().offers == 1
    await frontend.tell(prefill.address, "release", release, PATIENCE_S)
    await until(lambda: prefill.engine.load().offers == 0)


async def test_a_prompt_is_computed_if_its_ticket_is_not_opened_in_time(mesh: Mesh) -> None:
    prefill = await mesh.worker(Role.PREFILL, "prefill-0")
    decode = await mesh.worker(Role.DECODE, "decode-0", redeem_s=0.2)
    failed = REDEMPTIONS.labels("failed")._value.get()
    frontend = mesh.client(MeshRole.FRONTEND)
    first, ticket = await offered(frontend, prefill)

    async def hang(call: object) -> None:
        await asyncio.Event().wait()

    prefill.server.handlers["redeem"] = hang
    deltas = await ask(frontend, decode, request(generated=first.token_ids, ticket=ticket))
    assert [*first.token_ids, *tokens(deltas)] == ANSWER
    assert deltas[0].pull is None
    assert REDEMPTIONS.labels("failed")._value.get() == failed + 1


async def test_what_a_frontend_sees_has_no_address_of_memory(mesh: Mesh) -> None:
    prefill = await mesh.worker(Role.PREFILL, "prefill-0")
    first, ticket = await offered(mesh.client(MeshRole.FRONTEND), prefill)
    told = msgspec.msgpack.decode(encode(ticket))
    assert set(told) == {"offer_id", "worker_id", "address", "backend", "nonce", "num_tokens", "secret"}
    assert first.pull is None


def prefix_of(member: Member) -> OfferPrefix:
    return OfferPrefix(model="m", worker_id=member.worker_id, names=pack_hashes(sequence_hashes(PROMPT, 16)))


async def test_a_worker_pulls_a_prefix_from_another_one(mesh: Mesh) -> None:
    has, lacks = await mesh.worker(Role.AGGREGATED, "w-0"), await mesh.worker(Role.AGGREGATED, "w-1")
    frontend = mesh.client(MeshRole.FRONTEND)
    assert tokens(await ask(frontend, has, request())) == ANSWER
    source = PrefixSource(worker_id=has.worker_id, name="w-0", address=has.address, blocks=3)
    deltas = await ask(frontend, lacks, request(source=source))
    assert tokens(deltas) == ANSWER
    assert deltas[0].pull is not None
    assert (deltas[0].pull.error, deltas[0].pull.num_blocks, deltas[0].cached_tokens) == ("", 3, 48)
    await until(lambda: has.engine.load().offers == 0)


@pytest.mark.parametrize("role", [role for role in MeshRole if role is not MeshRole.WORKER])
async def test_prefixes_are_offered_to_workers_alone(mesh: Mesh, role: MeshRole) -> None:
    has = await mesh.worker(Role.AGGREGATED, "w-0")
    with pytest.raises(IdentityError):
        await mesh.client(role).ask(has.address, "offer_prefix", prefix_of(has), OfferedPrefix, PATIENCE_S)


async def test_a_prefix_is_offered_as_long_as_its_call(mesh: Mesh) -> None:
    has, lacks = await mesh.worker(Role.AGGREGATED, "w-0"), await mesh.worker(Role.AGGREGATED, "w-1")
    await ask(mesh.client(MeshRole.FRONTEND), has, request())
    async with lacks.plane.open(has.address, "offer_prefix", prefix_of(has), PATIENCE_S) as stream:
        await stream.next()
        assert (has.engine.load().offers, has.engine.load().used_blocks) == (1, 3)
    await until(lambda: (has.engine.load().offers, has.engine.load().used_blocks) == (0, 0))


async def test_another_worker_at_the_address_offers_nothing(mesh: Mesh) -> None:
    has, lacks = await mesh.worker(Role.AGGREGATED, "w-0"), await mesh.worker(Role.AGGREGATED, "w-1")
    asked = msgspec.structs.replace(prefix_of(has), worker_id="w-0-before")
    with pytest.raises(DrainingError, match="has moved or ended"):
        await lacks.plane.ask(has.address, "offer_prefix", asked, OfferedPrefix, PATIENCE_S)
