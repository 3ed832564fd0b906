"""The discovery seam. A key lives as long as its owner renews the lease; watchers see every key come and go."""

from collections.abc import AsyncIterator
from typing import Protocol

from mesh.discovery.board import Change
from protocol.errors import ConfigError


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
    """`file:<directory>`; see docs/architecture.md, "Planes". A process that talks only to itself makes a
    MemoryDiscovery."""
    scheme, _, rest = url.partition(":")
    match scheme:
        case "file" if rest:
            from mesh.discovery.file import FileDiscovery

            return FileDiscovery(rest)
    raise ConfigError(f"no discovery backend for {url!r}", hint="use file:<directory>")
