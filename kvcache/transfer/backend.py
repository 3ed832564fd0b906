"""The transfer seam, and what its backends share: offers, their slots, and the plan of a copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.memory import KvRegion
from protocol.errors import ConfigError, OverloadedError, TransferError
from protocol.ids import WorkerId, new_generation
from protocol.messages import KvLayout, Ticket

NUM_SLOTS = 4096  # standing offers of one worker; each costs 8 bytes that peers can read


class TransferBackend(Protocol):
    """Moves KV blocks between workers. Every backend passes tests/contracts/test_transfer_backend.py.

    Safety against reuse: an offer writes its nonce into a slot that peers can read; releasing it zeroes the
    slot *before* the blocks may be reused. A reader copies the blocks, then reads the slot: if the nonce still
    stands there, the blocks were not reused while it copied. Otherwise `fetch` fails, and nothing is shared.
    """

    name: str

    def allocate(self, num_bytes: int) -> memoryview | None:
        """Memory that peers can read for a KV cache on the CPU; None: any memory will do."""

    async def register(self, region: KvRegion, worker_id: WorkerId, address: str) -> None:
        """Make `region` readable for peers. `address` is the request plane, where offers are released."""

    def offer(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        """Let peers fetch local blocks until `release`; the caller keeps them pinned until then."""

    def release(self, offer_id: int, nonce: int) -> bool:
        """End an offer; True if it stood. After that its blocks may be reused."""

    async def fetch(self, ticket: Ticket, skip: int, into: Sequence[int], timeout_s: float) -> int:
        """Copy the offered blocks from number `skip` on into local `into`, in order; returns bytes.

        Raises TransferError if the peer is gone, the offer has ended or the layouts differ. When it returns
        or raises, CancelledError included, nothing writes to `into` any more.
        """

    async def forget(self, worker_id: WorkerId) -> None:
        """Drop what is kept about a peer that has left."""

    async def close(self) -> None:
        """Let go of all memory and threads. A second call does nothing."""


def open_backend(name: str) -> TransferBackend:
    match name:
        case "shm":
            from kvcache.transfer.shm import ShmBackend

            return ShmBackend()
        case "nixl":
            from kvcache.transfer.nixl import NixlBackend  # needs the nixl package, so imported here

            return NixlBackend()
    raise ConfigError(f"no KV transfer backend {name!r}", hint="set --kv-transfer to nixl or shm")


def choose_backend(name: str) -> str:
    """Resolve "auto": nixl where it loads, else shm. Raises ConfigError if `name` cannot work here."""
    if name == "shm":
        return name
    from kvcache.transfer.nixl import why_unavailable

    reason = why_unavailable()
    if name == "auto":
        return "shm" if reason else "nixl"
    if name == "nixl" and reason:
        raise ConfigError(f"NIXL does not load: {reason}", hint="see `kvmesh doctor`, or set --kv-transfer shm")
    if name != "nixl":
        raise ConfigError(f"no KV transfer backend {name!r}", hint="set --kv-transfer to auto, nixl or shm")
    return name


class OfferSlots:
    """The standing offers of one worker: who has which slot. Pure but for the slot memory it writes."""

    def __init__(self, memory: memoryview) -> None:
        """`memory`: u64 [num_slots], readable by peers, all zero."""
        self._memory = memory
        self._free = list(range(len(memory) - 1, -1, -1))
        self._standing: dict[int, tuple[int, int]] = {}  # offer id -> (slot, nonce)
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._standing)

    def open(self) -> tuple[int, int, int]:
        """Returns (offer id, slot, nonce)."""
        if not self._free:
            raise OverloadedError(f"{len(self._memory)} KV offers stand, none was fetched", hint="add decode workers")
        slot, nonce = self._free.pop(), new_generation()
        offer_id, self._next_id = self._next_id, self._next_id + 1
        self._standing[offer_id] = (slot, nonce)
        self._memory[slot] = nonce
        return offer_id, slot, nonce

    def close(self, offer_id: int, nonce: int) -> bool:
        slot, expected = self._standing.get(offer_id, (0, 0))
        if expected == 0 or expected != nonce:
            return False
        del self._standing[offer_id]
        self._memory[slot] = 0
        self._free.append(slot)
        return True


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that lie side by side at both ends, so that one copy moves them."""

    remote: int
    local: int
    count: int


def plan_copy(remote: Sequence[int], local: Sequence[int]) -> list[Run]:
    """Join neighbours: the fewest copies that move remote[i] to local[i] in order."""
    runs: list[Run] = []
    start = 0
    for i in range(1, len(remote) + 1):
        together = i < len(remote) and remote[i] == remote[i - 1] + 1 and local[i] == local[i - 1] + 1
        if not together:
            runs.append(Run(remote[start], local[start], i - start))
            start = i
    return runs if remote else []


def check_fetch(ticket: Ticket, skip: int, into: Sequence[int], backend: str, layout: KvLayout) -> list[int]:
    """The peer's block ids to copy. Raises TransferError if ticket and local cache do not fit together."""
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
    wanted = list(ticket.block_ids[skip:])
    if len(wanted) != len(into):
        raise TransferError(f"{len(wanted)} blocks are offered for {len(into)} places")
    return wanted
