"""Answer peers that ask for prefixes. An offer stands as long as its call, and no longer than its lease."""

import asyncio

from kvmesh.mesh.plane.server import Call
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError
from kvmesh.protocol.messages import OfferedPrefix, OfferPrefix
from kvmesh.workers.engine import Engine, SharesPrefixes
from kvmesh.workers.metrics import PREFIX_OFFERS

MOST_OFFERS = 64  # at a time
LEASE_S = 30.0  # a peer that takes longer has lost the offer


class PrefixOffers:
    """Offers prefixes of one worker's cache to its peers."""

    def __init__(self, engine: Engine, lease_s: float = LEASE_S) -> None:
        self._engine = engine
        self._lease_s = lease_s
        self._standing = 0

    async def answer(self, call: Call, asked: OfferPrefix) -> None:
        """Offer a prefix until the caller has left. Raises MeshError if nothing can be offered now."""
        try:
            offered = self._offer(asked)
        except MeshError as error:
            PREFIX_OFFERS.labels(error.code).inc()
            raise
        PREFIX_OFFERS.labels("empty" if offered.ticket is None else "ok").inc()
        if offered.ticket is None:
            await call.send(offered)
            return
        self._standing += 1
        try:
            await call.send(offered)
            await asyncio.sleep(self._lease_s)
        finally:
            self._standing -= 1
            self._engine.release(offered.ticket.offer_id, offered.ticket.nonce)

    def _offer(self, asked: OfferPrefix) -> OfferedPrefix:
        if not isinstance(self._engine, SharesPrefixes):
            raise InvalidRequestError("this worker offers no prefixes", hint="its engine moves KV itself")
        if len(asked.names) % 8:
            raise InvalidRequestError(f"{len(asked.names)} bytes are not whole names of blocks")
        if self._standing >= MOST_OFFERS:
            raise OverloadedError(f"{self._standing} prefixes are offered already")
        return self._engine.offer_prefix(asked)
