"""Keep what answers although its lease has ended: its owner may have lost discovery only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0


class Lapsed:
    """Asks the owners of keys whose lease has ended, and forgets each key whose owner does not answer."""

    def __init__(
        self,
        is_there: Callable[[str], Awaitable[bool]],
        forget: Callable[[str], None],
        on_count: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`on_count` is told how many keys are kept without a lease."""
        self._is_there = is_there
        self._forget = forget
        self._on_count = on_count
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._kept: set[str] = set()

    def add(self, key: str) -> None:
        """Ask the owner of a key from now on."""
        self.discard(key)
        self._asking[key] = asyncio.create_task(self._ask(key), name=f"ask the owner of {key}")

    def discard(self, key: str) -> bool:
        """Ask no longer, because discovery says where the key is. Return whether its lease had ended."""
        if (asking := self._asking.pop(key, None)) is None:
            return False
        asking.cancel()
        self._keep(key, False)
        return True

    def asked(self) -> list[str]:
        """Return the keys whose owners are asked."""
        return list(self._asking)

    async def close(self) -> None:
        asking, self._asking = list(self._asking.values()), {}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, key: str) -> None:
        while await self._is_there(key):
            if key not in self._kept:
                log.warning("%s cannot renew its lease, but it answers: it stays", key)
                self._keep(key, True)
            await asyncio.sleep(ASK_AGAIN_S)
        del self._asking[key]
        self._keep(key, False)
        self._forget(key)

    def _keep(self, key: str, is_kept: bool) -> None:
        before = len(self._kept)
        (self._kept.add if is_kept else self._kept.discard)(key)
        if len(self._kept) != before:
            self._on_count(len(self._kept))
