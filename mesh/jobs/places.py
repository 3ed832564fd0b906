"""Limit how much runs at once, in total and for one key, so that one tenant cannot occupy everything."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """A limited number of places. Waiting callers are served in order, except those whose key has its share already."""

    def __init__(self, total: int, per_key: int) -> None:
        self._free = total
        self._per_key = per_key
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, key: str) -> None:
        """Take a place; wait until there is one. A cancelled caller holds nothing."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, place))
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(key)
            else:
                self._waiting.remove((key, place))
            raise

    def leave(self, key: str) -> None:
        """Give a place back."""
        self._free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._serve()

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold a place inside the block."""
        await self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    def _serve(self) -> None:
        if not self._free:
            return
        left: list[tuple[str, asyncio.Future[None]]] = []
        for key, place in self._waiting:
            if place.done():  # cancelled in this turn of the loop: its caller removes nothing
                left.append((key, place))
            elif self._free and self._held[key] < self._per_key:
                self._free -= 1
                self._held[key] += 1
                place.set_result(None)
            else:
                left.append((key, place))
        self._waiting = left
