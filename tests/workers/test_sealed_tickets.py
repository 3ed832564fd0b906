"""A sealed ticket says nothing of memory, and only the worker that it was made for can have it opened."""

import msgspec
import pytest

from kvmesh.mesh.identity.names import Identity, MeshRole
from kvmesh.protocol.errors import IdentityError, TransferError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import KvLayout, Ticket, encode
from kvmesh.workers.sealed_tickets import MAX_SEALED, SECRET_BYTES, SealedTickets

FRONTEND = Identity("prod", MeshRole.FRONTEND, "frontend-0")
OTHER_FRONTEND = Identity("prod", MeshRole.FRONTEND, "frontend-1")
DECODE = Identity("prod", MeshRole.WORKER, "decode")
OTHER = Identity("prod", MeshRole.WORKER, "decoy")
TICKET = Ticket(
    offer_id=7,
    worker_id=WorkerId("prefill-0-1"),
    address="10.0.0.1:7000",
    backend="nixl",
    nonce=1 << 61,
    slot=3,
    peer=b"where memory is",
    layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
    block_ids=(1, 2, 3),
    num_tokens=40,
    opaque=b"and what an engine says",
)


@pytest.fixture
def tickets() -> SealedTickets:
    return SealedTickets()


def test_a_sealed_ticket_says_nothing_of_memory(tickets: SealedTickets) -> None:
    sealed = tickets.seal(TICKET, "decode-0", FRONTEND)
    told = encode(sealed)
    assert b"where memory is" not in told and b"an engine says" not in told
    assert (sealed.nonce, sealed.slot, sealed.block_ids) == (0, -1, ())
    assert (sealed.offer_id, sealed.backend, sealed.num_tokens) == (7, "nixl", 40)


def test_every_secret_has_128_bits_of_its_own(tickets: SealedTickets) -> None:
    found = {tickets.seal(TICKET, "decode-0", FRONTEND).secret for _ in range(1000)}
    assert len(found) == 1000
    assert {len(secret) for secret in found} == {SECRET_BYTES} == {16}


def test_the_worker_it_was_made_for_gets_the_ticket(tickets: SealedTickets) -> None:
    sealed = tickets.seal(TICKET, "decode-0", FRONTEND)
    assert tickets.redeem(sealed.secret, DECODE) == TICKET
    assert tickets.redeem(sealed.secret, DECODE) == TICKET  # an answer may be lost


@pytest.mark.parametrize("meant_for", ["decode-0", ""])
def test_another_worker_gets_nothing(tickets: SealedTickets, meant_for: str) -> None:
    sealed = tickets.seal(TICKET, meant_for, FRONTEND)
    with pytest.raises(IdentityError, match="may not redeem"):
        tickets.redeem(sealed.secret, OTHER)


@pytest.mark.parametrize("secret", [b"", bytes(16), b"x" * 15, b"x" * 64])
def test_a_guess_gets_nothing(tickets: SealedTickets, secret: bytes) -> None:
    tickets.seal(TICKET, "decode-0", FRONTEND)
    with pytest.raises(TransferError, match="no such KV offer"):
        tickets.redeem(secret, DECODE)
    assert tickets.release(secret, FRONTEND) is None


@pytest.mark.parametrize("caller", [FRONTEND, DECODE])
def test_whoever_asked_and_whoever_fetches_may_release(tickets: SealedTickets, caller: Identity) -> None:
    sealed = tickets.seal(TICKET, "decode-0", FRONTEND)
    assert tickets.release(sealed.secret, caller) == TICKET
    assert tickets.release(sealed.secret, caller) is None
    with pytest.raises(TransferError):
        tickets.redeem(sealed.secret, DECODE)


@pytest.mark.parametrize("caller", [OTHER, OTHER_FRONTEND])
def test_nobody_else_may_release(tickets: SealedTickets, caller: Identity) -> None:
    sealed = tickets.seal(TICKET, "decode-0", FRONTEND)
    with pytest.raises(IdentityError, match="may not release"):
        tickets.release(sealed.secret, caller)
    assert tickets.redeem(sealed.secret, DECODE) == TICKET


def test_sealed_tickets_are_bounded() -> None:
    tickets = SealedTickets(max_sealed=3)
    secrets = [tickets.seal(TICKET, "decode-0", FRONTEND).secret for _ in range(5)]
    assert len(tickets) == 3 < MAX_SEALED
    with pytest.raises(TransferError):
        tickets.redeem(secrets[0], DECODE)
    assert tickets.redeem(secrets[4], DECODE) == TICKET


def test_a_release_before_0_3_still_reads() -> None:
    assert msgspec.msgpack.decode(encode(TICKET)).get("secret") is None
