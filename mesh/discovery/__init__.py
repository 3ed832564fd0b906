"""Tell who is in the mesh: services put keys under leases, and watch the keys of others.

BACKENDS has those of the core and those of extensions. tests/contracts/test_discovery.py runs against each.
"""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from kvmesh.mesh.discovery.board import Change, Deleted, Put
from kvmesh.mesh.discovery.file import FileDiscovery
from kvmesh.mesh.discovery.static import USAGE as STATIC_USAGE
from kvmesh.mesh.discovery.static import StaticDiscovery
from kvmesh.mesh.discovery.store import Discovery, DiscoveryBackend, Registration, ShownByOwner
from kvmesh.mesh.extensions import load
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.plane.server import Handler
from kvmesh.protocol.errors import ConfigError

__all__ = [
    "BACKENDS",
    "Change",
    "Deleted",
    "Discovery",
    "DiscoveryUrl",
    "Put",
    "Registration",
    "open_discovery",
    "standing_calls",
]


def open_file(rest: str, credentials: Credentials | None) -> Discovery:
    return FileDiscovery(rest)


def open_static(rest: str, credentials: Credentials | None) -> Discovery:
    return StaticDiscovery(rest, credentials=credentials)


_BACKENDS = (
    DiscoveryBackend("file", "file:<directory>", open_file),
    *load("discovery"),
    DiscoveryBackend("static", STATIC_USAGE, open_static),
)
BACKENDS: Mapping[str, DiscoveryBackend] = {backend.scheme: backend for backend in _BACKENDS}
USAGE = " or ".join(backend.usage for backend in BACKENDS.values())

# The type of a service's setting.
DiscoveryUrl = Annotated[str, Meta(description=f"{USAGE}, where the services of the mesh find each other")]


def open_discovery(url: str, credentials: Credentials | None = None) -> Discovery:
    """Open the backend that `url` names. Raises ConfigError for an unknown one.

    `credentials` count where services ask each other; other backends have users and certificates of their own.

    A process that talks only to itself makes a MemoryDiscovery instead.
    """
    scheme, _, rest = url.partition(":")
    if rest and (backend := BACKENDS.get(scheme)) is not None:
        return backend.open(rest, credentials)
    raise ConfigError(f"no discovery backend for {url!r}", hint=f"use {USAGE}")


def standing_calls(discovery: Discovery) -> Mapping[str, Handler]:
    """Return the calls that each request plane of a process has to answer for its discovery."""
    return discovery.calls() if isinstance(discovery, ShownByOwner) else {}
