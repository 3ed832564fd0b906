"""The discovery seam. A key lives while its owner renews the lease; watchers see every key come and go."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvmesh.mesh.discovery.board import Change
from kvmesh.mesh.discovery.place import SearchPlace
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.plane.server import Handler


@dataclass(frozen=True, slots=True)
class Registration:
    """A key of this process. Its lease is renewed until `withdraw`, or until the process dies."""

    key: str
    remove: Callable[[str], Awaitable[None]]  # the backend's

    async def withdraw(self) -> None:
        """Remove the key. A second call does nothing."""
        await self.remove(self.key)


class Discovery(Protocol):
    """The keys of all services. Every backend passes tests/contracts/test_discovery.py."""

    async def put(self, key: str, value: bytes) -> Registration:
        """Show `key` with `value` to all watchers. Raises ConfigError if the place cannot be written to."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """Yield the keys that are there, then every change. A slow watcher may miss steps, never the last state.

        The first step raises ConfigError if the place cannot be read.
        """
        ...

    def where(self) -> SearchPlace:
        """Return where keys are searched, and whether that place answers. Never raises, never waits."""
        ...

    async def close(self) -> None:
        """Withdraw all keys of this object and end its watches."""


@runtime_checkable
class ShownByOwner(Protocol):
    """A backend whose watchers ask the owners of keys themselves."""

    def calls(self) -> Mapping[str, Handler]:
        """Return the calls that each request plane of this process has to answer."""
        ...


@dataclass(frozen=True, slots=True)
class DiscoveryBackend:
    """A way to open a discovery. An extension gives one at the seam `discovery`."""

    scheme: str  # of the URL
    usage: str  # of `--discovery`
    open: Callable[[str, Credentials | None], Discovery]  # with what follows the scheme in the URL; never empty
