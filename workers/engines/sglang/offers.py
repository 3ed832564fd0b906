"""Prefills whose KV a decode engine fetches while, or after, it is computed: one task each, until it ends."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

# SGLang gives a bootstrap that nobody answers up after 300 s, and holds no KV until then.
LEASE_S = 330.0


@dataclass(frozen=True, slots=True)
class Offer:
    offer_id: int
    nonce: int  # u63, never 0


class Offers:
    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._running: dict[Offer, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._running)

    def open(self, prefill: Callable[[], Awaitable[None]]) -> Offer:
        """Run `prefill` until it ends, is released, or its lease does."""
        offer = Offer(next(self._numbers), secrets.randbits(62) + 1)
        task = asyncio.create_task(self._run(offer, prefill), name=f"prefill offer {offer.offer_id}")
        self._running[offer] = task
        task.add_done_callback(lambda _: self._running.pop(offer))  # also of one that was cancelled before it began
        return offer

    def release(self, offer_id: int, nonce: int) -> None:
        """Unknown ones, and those that have ended, are no error."""
        if (task := self._running.get(Offer(offer_id, nonce))) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, offer: Offer, prefill: Callable[[], Awaitable[None]]) -> None:
        """The one place where a prefill that failed is told of: the decode engine fails the request."""
        try:
            async with asyncio.timeout(self._lease_s):
                await prefill()
        except TimeoutError:
            log.warning("prefill offer %d was not fetched in %.0f s", offer.offer_id, self._lease_s)
        except Exception as error:
            log.warning("prefill offer %d failed: %s", offer.offer_id, error)
