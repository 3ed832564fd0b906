"""Keep the tickets of a closed mesh from everybody but the worker that each was asked for.

A ticket says how to read a worker's memory, and the memory asks nobody. So the prefill worker hands out a sealed
ticket, with 128 random bits in place of that. The decode worker brings it back over the request plane, whose TLS says
who asks, and gets the ticket itself (docs/security.md, "KV transfer").
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from kvmesh.mesh.identity.names import Identity
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import IdentityError, MeshError, TransferError
from kvmesh.protocol.messages import Delta, GenerateRequest, OpenedTicket, RedeemTicket, Ticket
from kvmesh.workers.metrics import REDEMPTIONS

log = logging.getLogger(__name__)

SECRET_BYTES = 16
MAX_SEALED = 8192
REDEEM_S = 1.0  # then the prompt is computed here: a longer wait would cost more than most prompts


@dataclass(frozen=True, slots=True)
class _Sealed:
    ticket: Ticket
    meant_for: str  # name of the worker that may redeem it
    asker: Identity  # who asked for it, and may release it


class SealedTickets:
    """The tickets that a worker has sealed. Pure; the oldest make room, and are left to the lease of their blocks."""

    def __init__(self, max_sealed: int = MAX_SEALED) -> None:
        self._max_sealed = max_sealed
        self._sealed: OrderedDict[bytes, _Sealed] = OrderedDict()  # by secret

    def __len__(self) -> int:
        return len(self._sealed)

    def seal(self, ticket: Ticket, meant_for: str, asker: Identity) -> Ticket:
        """Keep a ticket, and return what may leave this worker: nothing of it says where memory is."""
        secret = secrets.token_bytes(SECRET_BYTES)
        self._sealed[secret] = _Sealed(ticket, meant_for, asker)
        if len(self._sealed) > self._max_sealed:
            self._sealed.popitem(last=False)
        return Ticket(
            offer_id=ticket.offer_id,
            worker_id=ticket.worker_id,
            address=ticket.address,
            backend=ticket.backend,
            nonce=0,
            num_tokens=ticket.num_tokens,
            secret=secret,
        )

    def redeem(self, secret: bytes, caller: Identity) -> Ticket:
        """Return the ticket. Raises TransferError for one that is not here, IdentityError for a wrong caller."""
        sealed = self._find(secret)
        if sealed is None:
            raise TransferError("no such KV offer stands here", hint="the prompt can be computed again")
        if not caller.stands_for(sealed.meant_for):
            raise IdentityError(f"{caller} may not redeem this ticket", hint="it was made for another worker")
        return sealed.ticket

    def release(self, secret: bytes, caller: Identity) -> Ticket | None:
        """Forget a ticket and return it, None if it is not here. Raises IdentityError for a wrong caller."""
        sealed = self._find(secret)
        if sealed is None:
            return None
        if caller != sealed.asker and not caller.stands_for(sealed.meant_for):
            raise IdentityError(f"{caller} may not release this offer", hint="whoever asked for it may")
        del self._sealed[secret]
        return sealed.ticket

    def _find(self, secret: bytes) -> _Sealed | None:
        found = self._sealed.get(secret)
        return found if found is not None and len(secret) == SECRET_BYTES else None


class TicketOffice:
    """Seals the tickets that a worker gives, and has those opened that it gets. Without a mesh TLS it is not made."""

    def __init__(self, plane: PlaneClient, redeem_s: float = REDEEM_S) -> None:
        self.sealed = SealedTickets()
        self._plane = plane
        self._redeem_s = redeem_s

    def sealed_in(self, delta: Delta, meant_for: str, asker: Identity) -> Delta:
        """Return a part of an answer whose ticket, if it has one, is sealed."""
        if delta.ticket is None:
            return delta
        return msgspec.structs.replace(delta, ticket=self.sealed.seal(delta.ticket, meant_for, asker))

    async def opened(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the ticket that its sealed one stands for, or with none: then the prompt is computed
        here."""
        sealed = request.ticket
        if sealed is None:
            return request
        try:
            ticket = await self._redeem(sealed)
        except (MeshError, TimeoutError) as error:
            REDEMPTIONS.labels("refused" if isinstance(error, IdentityError) else "failed").inc()
            log.warning("request %s computes its prompt itself: %s", request.request_id, error)
            return msgspec.structs.replace(request, ticket=None)
        REDEMPTIONS.labels("ok").inc()
        return msgspec.structs.replace(request, ticket=ticket)

    async def _redeem(self, sealed: Ticket) -> Ticket:
        """Raises MeshError, TimeoutError."""
        if not sealed.secret:
            raise IdentityError("its ticket is not sealed", hint="only a worker of this mesh may say where memory is")
        asked = RedeemTicket(secret=sealed.secret)
        async with asyncio.timeout(self._redeem_s):
            answer = await self._plane.ask(sealed.address, "redeem", asked, OpenedTicket, self._redeem_s)
        if (answer.ticket.worker_id, answer.ticket.address) != (sealed.worker_id, sealed.address):
            raise TransferError(f"{sealed.address} gave a ticket of another worker")
        return answer.ticket
