"""Show the present keys to the watchers of one process. All discovery backends share this."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    key: str
    has_lapsed: bool = False  # nobody withdrew it: its owner has died, or cannot renew its lease


Change = Put | Deleted


class Board:
    """The present keys. A watcher remembers the keys that it has yielded, so that a slow watcher needs no queue."""

    def __init__(self) -> None:
        self._present: Mapping[str, bytes] = {}
        self._lapsed: Collection[str] = ()
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    def show(self, present: Mapping[str, bytes], lapsed: Collection[str] = ()) -> None:
        self._present, self._lapsed = present, lapsed
        for changed in self._watchers:
            changed.set()

    def close(self) -> None:
        self._closed = True
        self.show({})

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        seen: dict[str, bytes] = {}
        changed = asyncio.Event()
        changed.set()
        self._watchers.add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                if self._closed:
                    return
                now = {key: value for key, value in self._present.items() if key.startswith(prefix)}
                for change in _difference(seen, now, self._lapsed):
                    yield change
                seen = now
        finally:
            self._watchers.discard(changed)


def _difference(seen: Mapping[str, bytes], now: Mapping[str, bytes], lapsed: Collection[str]) -> list[Change]:
    gone: list[Change] = [Deleted(key, has_lapsed=key in lapsed) for key in seen if key not in now]
    return gone + [Put(key, value) for key, value in now.items() if seen.get(key) != value]
