"""Keep the offers of a worker and their slots, and plan copies: all transfer backends share this."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvmesh.mesh.safeguards import is_off
from kvmesh.protocol.errors import OverloadedError, TransferError
from kvmesh.protocol.ids import WorkerId, new_generation
from kvmesh.protocol.kv_content import MAX_CONTENT_CHARS, PENDING, UNKNOWN, mismatch
from kvmesh.protocol.messages import UNREADABLE, KvLayout, Ticket, decode, encode

_CHECKS_NONCES = not is_off("nonce")
NUM_SLOTS = 4096  # standing offers of one worker; each costs 8 bytes that peers can read
_MOST_BLOCKS = 1 << 32  # of a cache

# int64 [copies, 3]: where each begins in the peer's cache and in ours, and how long it is, in bytes
Spans: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Offerer:
    """The worker that offers: the part that all tickets of a worker have in common."""

    worker_id: WorkerId
    address: str  # host:port of the request plane
    backend: str
    peer: bytes  # the backend's description of this worker
    layout: KvLayout


class Offers:
    """The standing offers of one worker. Pure, except that it writes the slots that peers read."""

    def __init__(self, offerer: Offerer, slots: memoryview) -> None:
        """Use `slots`, u64 [num_slots], all zero."""
        self._offerer = offerer
        self._slots = slots
        self._free = list(range(len(slots) - 1, -1, -1))
        self._standing: dict[int, Ticket] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._standing)

    def open(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        """Make an offer. Raises OverloadedError if every slot is taken."""
        if not self._free:
            raise OverloadedError(f"{len(self)} KV offers stand, none was fetched", hint="add decode workers")
        ticket = Ticket(
            offer_id=self._next_id,
            worker_id=self._offerer.worker_id,
            address=self._offerer.address,
            backend=self._offerer.backend,
            nonce=new_generation(),
            slot=self._free.pop(),
            peer=self._offerer.peer,
            layout=self._offerer.layout,
            block_ids=tuple(block_ids),
            num_tokens=num_tokens,
        )
        self._next_id += 1
        self._standing[ticket.offer_id] = ticket
        self._slots[ticket.slot] = ticket.nonce
        return ticket

    def close(self, offer_id: int, nonce: int) -> bool:
        """Zero the slot, so that a reader sees that it came too late. Return True if the offer stood."""
        ticket = self._standing.get(offer_id)
        if ticket is None or ticket.nonce != nonce:
            return False
        del self._standing[offer_id]
        self._slots[ticket.slot] = 0
        self._free.append(ticket.slot)
        return True


def has_ended(ticket: Ticket, found: int) -> bool:
    """Return whether an offer ended before its blocks were read. `found` is what its slot holds after that."""
    return found != ticket.nonce and _CHECKS_NONCES


def plan_spans(remote: Sequence[int], local: Sequence[int], layout: KvLayout) -> Spans:
    """Return the copies that move blocks remote[i] to blocks local[i] of `layout`.

    Neighbours on both sides are one copy. Raise TransferError if a block cannot be.
    """
    there, here = _block_ids(remote), _block_ids(local)
    is_first = np.ones(len(there), bool)
    is_first[1:] = (np.diff(there) != 1) | (np.diff(here) != 1)
    first = np.flatnonzero(is_first)
    return np.stack([there[first], here[first], np.diff(first, append=len(there))], 1) * layout.block_bytes


def _block_ids(blocks: Sequence[int]) -> NDArray[np.int64]:
    """Return block ids as an array. Raise TransferError for what is none: a peer may say anything."""
    try:
        ids = np.array(blocks, np.int64)
    except OverflowError as error:
        raise TransferError("a KV offer names blocks that cannot be") from error
    if ids.size and not 0 <= ids.min() <= ids.max() < _MOST_BLOCKS:
        raise TransferError("a KV offer names blocks that cannot be")
    return ids


class _PeerContent(msgspec.Struct, frozen=True):
    """The part of a peer's description that says what its KV was computed with."""

    content: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] = UNKNOWN


_peer_content = msgspec.msgpack.Decoder(_PeerContent)


def with_content(ticket: Ticket, content: str) -> Ticket:
    """Return a ticket that says what its KV was computed with.

    It says so twice: a frontend of an older release passes a peer's description on, and drops fields that it does not
    know.
    """
    peer = ticket.peer
    if peer:
        peer = encode(decode(peer, dict[str, Any]) | {"content": content})
    return msgspec.structs.replace(ticket, content=content, peer=peer)


def _content_of(ticket: Ticket) -> str:
    if ticket.content or not ticket.peer:
        return ticket.content
    try:
        return _peer_content.decode(ticket.peer).content
    except UNREADABLE:  # the transfer backend refuses it
        return UNKNOWN


def check_content(ticket: Ticket, ours: str) -> None:
    """Raise TransferError for KV of other weights, quantisation, KV dtype or adapter than `ours`.

    The router pairs no such workers; but it may be of an older release, or know an earlier card.
    """
    theirs = _content_of(ticket)
    if not mismatch(ours, theirs):
        return
    if PENDING in (ours, theirs):
        which = "this worker" if ours == PENDING else ticket.worker_id
        raise TransferError(f"the weights of {which} are not hashed yet: it exchanges no KV")
    raise TransferError(
        f"{ticket.worker_id} offers KV of another content ({theirs[:12]}) than is here ({ours[:12]})",
        hint="start all workers of a model with the same weights, adapters, quantisation and KV dtype",
    )


def check_fetch(ticket: Ticket, skip: int, into: Sequence[int], backend: str, layout: KvLayout) -> list[int]:
    """Return the peer's block ids to copy. Raises TransferError if ticket and local cache do not fit together."""
    if ticket.backend != backend:
        raise TransferError(
            f"{ticket.worker_id} offers KV over {ticket.backend!r}, this worker fetches over {backend!r}",
            hint="start all workers with one --kv-transfer",
        )
    if ticket.layout != layout:
        raise TransferError(
            f"KV layout is {layout} here and {ticket.layout} on {ticket.worker_id}",
            hint="start all workers of a model with the same --block-size, dtype and model",
        )
    if ticket.nonce == 0:  # 0 would match every unused slot
        raise TransferError(f"the KV offer of {ticket.worker_id} has no nonce")
    wanted = list(ticket.block_ids[skip:])
    if len(wanted) != len(into):
        raise TransferError(f"{len(wanted)} blocks are offered for {len(into)} places")
    return wanted
