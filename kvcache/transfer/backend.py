"""The transfer seam, and the choice of a backend."""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.kvcache.memory import KvRegion
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Ticket


class TransferBackend(Protocol):
    """Moves KV blocks between workers. Every backend passes tests/contracts/test_transfer_backend.py.

    Safety against reuse: an offer writes its nonce into a slot that peers can read; releasing it zeroes the
    slot *before* the blocks may be reused. A reader copies the blocks, then reads the slot: if the nonce still
    stands there, the blocks were not reused while it copied. Otherwise `fetch` fails, and nothing is shared.
    """

    name: str

    def allocate(self, num_bytes: int) -> memoryview | None:
        """Return memory for a KV cache on the CPU that peers can read; None: any memory will do."""

    async def register(self, region: KvRegion, worker_id: WorkerId, address: str) -> None:
        """Make `region` readable for peers. `address` is the request plane, where offers are released."""

    def offer(self, block_ids: Sequence[int], num_tokens: int) -> Ticket:
        """Let peers fetch local blocks until `release`; the caller keeps them pinned until then."""

    def release(self, offer_id: int, nonce: int) -> bool:
        """End an offer, whose blocks may then be reused. Return True if the offer stood."""

    async def fetch(self, ticket: Ticket, skip: int, into: Sequence[int]) -> int:
        """Copy the offered blocks from number `skip` on into local `into`, in order; return the bytes copied.

        Raises TransferError if the peer is gone, the offer has ended or the layouts differ. When `fetch` returns or
        raises, also CancelledError, nothing writes to `into` any more. A running copy cannot be stopped: if the peer
        hangs, `fetch` returns, cancelled or not, when that peer continues or dies.
        """

    async def close(self) -> None:
        """Free all memory and threads. A second call does nothing."""


def open_backend(name: str) -> TransferBackend:
    match name:
        case "shm":
            from kvmesh.kvcache.transfer.shm import ShmBackend

            return ShmBackend()
        case "nixl":
            from kvmesh.kvcache.transfer.nixl import NixlBackend  # needs the nixl package, so imported here

            return NixlBackend()
    raise ConfigError(f"no KV transfer backend {name!r}", hint="set --kv-transfer to nixl or shm")


def choose_backend(name: str) -> str:
    """Resolve "auto": nixl where it loads, else shm. Raises ConfigError if `name` cannot work here."""
    if name == "shm":
        return name
    from kvmesh.kvcache.transfer.nixl import why_unavailable

    reason = why_unavailable()
    if name == "auto":
        return "shm" if reason else "nixl"
    if name == "nixl" and reason:
        raise ConfigError(f"NIXL does not load: {reason}", hint="see `kvmesh doctor`, or set --kv-transfer shm")
    if name != "nixl":
        raise ConfigError(f"no KV transfer backend {name!r}", hint="set --kv-transfer to auto, nixl or shm")
    return name
