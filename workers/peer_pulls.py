"""Pull a prompt's beginning from a peer: ask for the blocks, check what it offers, copy them piece by piece."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from kvmesh.kvcache.tiers.peers import PeerPrefixes
from kvmesh.kvcache.transfer.backend import TransferBackend
from kvmesh.kvcache.transfer.offers import NUM_SLOTS
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import TransferError
from kvmesh.protocol.hashing import pack_hashes
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import OfferedPrefix, OfferPrefix, PrefixSource, Ticket, decode
from kvmesh.workers.engine import AskPrefix
from kvmesh.workers.scheduler import PeerLoad

PIECE_BYTES = 16 << 20  # of blocks that are copied, and proven to be whole, together
MOST_ID_CHARS = 256


def asking(plane: PlaneClient, timeout_s: float) -> AskPrefix:
    """Return how workers are asked for prefixes over a request plane."""
    return partial(_ask, plane, timeout_s)


@asynccontextmanager
async def _ask(
    plane: PlaneClient, timeout_s: float, source: PrefixSource, asked: OfferPrefix
) -> AsyncIterator[OfferedPrefix]:
    async with plane.open(source.address, "offer_prefix", asked, timeout_s, hasty=True) as stream:
        if (raw := await stream.next()) is None:
            raise TransferError(f"{source.name} offered nothing")
        yield decode(raw, OfferedPrefix)


class PrefixFetcher:
    """Fetches what peers offer, for one engine."""

    def __init__(
        self, transfer: TransferBackend, peers: PeerPrefixes, ask: AskPrefix, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._transfer = transfer
        self._peers = peers
        self._ask = ask
        self._piece_blocks = max(1, piece_bytes // peers.rates.block_bytes)

    async def fetch(self, load: PeerLoad, note: Callable[[int], bool]) -> int:
        """Copy the offered blocks of a load into its places, in order; return the bytes copied.

        `note` is told how many blocks have come, after each piece, and returns whether to continue. Raises MeshError,
        and as `TransferBackend.fetch` does.
        """
        asked = OfferPrefix(
            model=load.sequence.request.model,
            worker_id=load.source.worker_id,
            names=pack_hashes(load.prefix.names[: load.skip + len(load.into)]),
            first=load.skip,
            dp_rank=load.source.dp_rank,
        )
        num_bytes = arrived = 0
        async with self._ask(load.source, asked) as offered:
            if offered.ticket is None:
                return 0
            ticket = checked(offered.ticket, load, self._peers.pool.block_size)
            if offered.address != self._peers.address_of(load.prefix, load.skip + len(ticket.block_ids)):
                raise TransferError(f"{load.source.name} offers KV of another prompt, model or weights")
            for block_ids in pieces(ticket.block_ids, self._piece_blocks):
                part = msgspec.structs.replace(ticket, block_ids=block_ids)
                into = load.into[arrived : arrived + len(block_ids)]
                num_bytes += await self._transfer.fetch(part, 0, into)
                arrived += len(block_ids)
                if not note(arrived):
                    break
        return num_bytes


def fetcher_of(
    transfer: TransferBackend | None, peers: PeerPrefixes | None, ask: AskPrefix | None
) -> PrefixFetcher | None:
    """Return what fetches prefixes for an engine, None if it pulls none."""
    if transfer is None or peers is None or ask is None:
        return None
    return PrefixFetcher(transfer, peers, ask)


def pieces(block_ids: tuple[int, ...], size: int) -> Sequence[tuple[int, ...]]:
    return [block_ids[start : start + size] for start in range(0, len(block_ids), size)]


def checked(ticket: Ticket, load: PeerLoad, block_size: int) -> Ticket:
    """Return a peer's ticket as it may be used. Raises TransferError if it does not fit what was asked for.

    The transfer backend checks that the kind of transfer and the layout are its own.
    """
    count = len(ticket.block_ids)
    if not 0 < count <= len(load.into) or len(set(ticket.block_ids)) < count or min(ticket.block_ids) < 0:
        raise TransferError(f"{load.source.name} offers {count} blocks where {len(load.into)} were asked for")
    if ticket.num_tokens != count * block_size:
        raise TransferError(f"{load.source.name} offers {ticket.num_tokens} tokens in {count} blocks of {block_size}")
    if not 0 <= ticket.slot < NUM_SLOTS:
        raise TransferError(f"{load.source.name} names slot {ticket.slot}, expected one of {NUM_SLOTS}")
    if not 0 < len(ticket.worker_id) <= MOST_ID_CHARS:
        raise TransferError(f"{load.source.name} has an id of {len(ticket.worker_id)} characters")
    # The ticket's address is where the peer is looked for when it is silent.
    return msgspec.structs.replace(ticket, address=load.source.address, worker_id=WorkerId(ticket.worker_id))
