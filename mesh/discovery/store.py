"""The discovery seam. A key lives as long as its owner renews the lease; watchers see every key come and go."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    key: str


Change = Put | Deleted


class Registration(Protocol):
    """A key of ours. Its lease is renewed until `withdraw`, or until this process dies."""

    async def withdraw(self) -> None: ...


class Discovery(Protocol):
    """Every backend passes tests/contracts/test_discovery.py."""

    async def put(self, key: str, value: bytes) -> Registration: ...

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """First what is there, then what changes. A slow watcher may miss steps between, never the last state."""

    async def close(self) -> None:
        """Withdraw all keys of ours and end the watches."""


def open_discovery(url: str) -> Discovery:
    """`file:<directory>` or `memory:`; see docs/architecture.md, "Planes"."""
    scheme, _, rest = url.partition(":")
    match scheme:
        case "file" if rest:
            from mesh.discovery.file import FileDiscovery

            return FileDiscovery(rest)
        case "memory":
            from mesh.discovery.memory import MemoryDiscovery

            return MemoryDiscovery()
    raise ConfigError(f"no discovery backend for {url!r}", hint="use file:<directory> or memory:")


class Board:
    """The present keys as watchers of one process see them. A watcher keeps what it has seen and yields the
    difference, so that a slow one costs no queue."""

    def __init__(self) -> None:
        self._present: Mapping[str, bytes] = {}
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    def show(self, present: Mapping[str, bytes]) -> None:
        self._present = present
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
                for change in _difference(seen, now):
                    yield change
                seen = now
        finally:
            self._watchers.discard(changed)


def _difference(seen: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[Change]:
    gone: list[Change] = [Deleted(key) for key in seen if key not in now]
    return gone + [Put(key, value) for key, value in now.items() if seen.get(key) != value]
