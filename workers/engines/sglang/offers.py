"""Prefills whose KV a decode engine fetches while, or after, it is computed: one task each, until it ends."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from kvmesh.protocol.messages import Delta, Ticket
from kvmesh.workers.engines.external.life import EngineLife
from kvmesh.workers.engines.sglang.bootstrap import MAX_ROOM, Bootstrap, encode_bootstrap

log = logging.getLogger(__name__)

# SGLang gives a bootstrap that nobody answers up after 300 s, and holds no KV until then.
LEASE_S = 330.0


@dataclass(frozen=True, slots=True)
class PrefillOffer:
    offer_id: int
    nonce: int  # u63, never 0


class PrefillOffers:
    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._running: dict[PrefillOffer, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._running)

    def open(self, prefill: Callable[[], Awaitable[None]]) -> PrefillOffer:
        """Run `prefill` until it ends, is released, or its lease does."""
        offer = PrefillOffer(next(self._numbers), secrets.randbits(62) + 1)
        task = asyncio.create_task(self._run(offer, prefill), name=f"prefill offer {offer.offer_id}")
        self._running[offer] = task
        task.add_done_callback(lambda _: self._running.pop(offer))  # also of one that was cancelled before it began
        return offer

    async def hand_out(
        self,
        bootstrap: Bootstrap,
        prefill: Callable[[], Awaitable[None]],
        *,
        backend: str,
        num_tokens: int,
        life: EngineLife,
    ) -> AsyncGenerator[Delta, None]:
        """Begin `prefill` and yield its ticket at once. A caller that does not take the ticket ends the prefill."""
        offer = self.open(prefill)
        is_taken = False
        try:
            yield Delta(
                ticket=Ticket(
                    offer_id=offer.offer_id,
                    worker_id=life.worker_id,
                    address=life.address,
                    backend=backend,
                    nonce=offer.nonce,
                    num_tokens=num_tokens,
                    opaque=encode_bootstrap(bootstrap),
                )
            )
            is_taken = True
        finally:
            if not is_taken:
                self.release(offer.offer_id, offer.nonce)

    def release(self, offer_id: int, nonce: int) -> None:
        """Unknown offers, and those that have ended, are no error."""
        if (task := self._running.get(PrefillOffer(offer_id, nonce))) is not None:
            task.cancel()

    async def close(self) -> None:
        """A second call does nothing."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, offer: PrefillOffer, prefill: Callable[[], Awaitable[None]]) -> None:
        """Log a prefill that failed, here alone: the decode engine fails the request."""
        try:
            async with asyncio.timeout(self._lease_s):
                await prefill()
        except TimeoutError:
            log.warning("prefill offer %d was not fetched in %.0f s", offer.offer_id, self._lease_s)
        except Exception as error:
            log.warning("prefill offer %d failed: %s", offer.offer_id, error)


def new_room() -> int:
    """Return a room that no other pair of requests has."""
    return secrets.randbelow(MAX_ROOM)
