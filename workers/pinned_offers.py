"""Keep the KV offers of an engine: their blocks stay pinned until an offer is released, or its lease ends."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.tiers.peers import PeerPrefixes
from kvmesh.kvcache.transfer.backend import TransferBackend
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.hashing import unpack_hashes
from kvmesh.protocol.ids import SequenceHash
from kvmesh.protocol.messages import OfferedPrefix, OfferPrefix, Ticket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PinnedOffer:
    block_ids: Sequence[int]
    let_go: Callable[[Sequence[int]], None]
    expiry: asyncio.TimerHandle


class PinnedOffers:
    def __init__(self, transfer: TransferBackend, lease_s: float, wake: Callable[[], None]) -> None:
        """Call `wake` when blocks have been let go."""
        self._transfer = transfer
        self._lease_s = lease_s
        self._wake = wake
        self._offers: dict[int, _PinnedOffer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def open(self, block_ids: Sequence[int], num_tokens: int, let_go: Callable[[Sequence[int]], None]) -> Ticket:
        """Offer pinned blocks; `let_go` gets them at the end. Raises MeshError, and then they stay the caller's."""
        ticket = self._transfer.offer(block_ids, num_tokens)
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._lease_s, self._expire, ticket.offer_id, ticket.nonce)
        self._offers[ticket.offer_id] = _PinnedOffer(block_ids, let_go, expiry)
        return ticket

    def open_prefix(self, peers: PeerPrefixes, asked: OfferPrefix) -> OfferedPrefix:
        """Pin and offer what a peer wants, as far as it is here. Raises MeshError."""
        taken = peers.take([SequenceHash(name) for name in unpack_hashes(asked.names)], asked.first)
        if taken is None:
            return OfferedPrefix()
        try:
            ticket = self.open(taken.block_ids, len(taken.block_ids) * peers.pool.block_size, peers.give_back)
        except MeshError:
            peers.give_back(taken.block_ids)
            raise
        return OfferedPrefix(ticket=ticket, address=taken.address)

    def release(self, offer_id: int, nonce: int) -> None:
        """End an offer. Unknown offers are no error."""
        offer = self._offers.get(offer_id)
        if offer is None or not self._transfer.release(offer_id, nonce):
            return
        del self._offers[offer_id]
        offer.expiry.cancel()
        offer.let_go(offer.block_ids)
        self._wake()

    def close(self) -> None:
        """End no offer, but let none expire any more: the engine ends."""
        for offer in self._offers.values():
            offer.expiry.cancel()

    def _expire(self, offer_id: int, nonce: int) -> None:
        log.warning("KV offer %d was neither fetched nor released in time", offer_id)
        self.release(offer_id, nonce)
