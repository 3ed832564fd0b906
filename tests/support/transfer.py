"""A KV transfer that hangs, as one from a frozen peer does."""

import asyncio
from collections.abc import Sequence

from kvmesh.kvcache.transfer.shm import ShmBackend
from kvmesh.protocol.messages import Ticket


class HangingBackend(ShmBackend):
    """`fetch` does nothing until `go_on` is set; cancelled or not, it does not return before."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.fetching = asyncio.Event()

    async def fetch(self, ticket: Ticket, skip: int, into: Sequence[int]) -> int:
        self.fetching.set()
        waiting = asyncio.ensure_future(self.go_on.wait())
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await asyncio.wait([waiting])
            raise
        return await super().fetch(ticket, skip, into)
