"""Tell who is in the mesh: services put keys under leases, and watch the keys of others.

A backend is a module of this folder and one entry of BACKENDS. tests/contracts/test_discovery.py runs against each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kvmesh.mesh.discovery.board import Change, Deleted, Put
from kvmesh.mesh.discovery.file import FileDiscovery
from kvmesh.mesh.discovery.static import USAGE as STATIC_USAGE
from kvmesh.mesh.discovery.static import StaticDiscovery
from kvmesh.mesh.discovery.store import Discovery, Registration, ShownByOwner
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


@dataclass(frozen=True, slots=True)
class DiscoveryBackend:
    usage: str  # of `--discovery`
    open: Callable[[str, Credentials | None], Discovery]  # with what follows the scheme in the URL; never empty


def open_file(rest: str, credentials: Credentials | None) -> Discovery:
    return FileDiscovery(rest)


def open_etcd(rest: str, credentials: Credentials | None) -> Discovery:
    from kvmesh.mesh.discovery.etcd import EtcdDiscovery  # gRPC takes 0.2 s to load

    return EtcdDiscovery(rest)


def open_kubernetes(rest: str, credentials: Credentials | None) -> Discovery:
    from kvmesh.mesh.discovery.kubernetes import KubernetesDiscovery  # its HTTP client takes a while to load

    return KubernetesDiscovery(rest)


def open_static(rest: str, credentials: Credentials | None) -> Discovery:
    return StaticDiscovery(rest, credentials=credentials)


BACKENDS: Mapping[str, DiscoveryBackend] = {
    "file": DiscoveryBackend("file:<directory>", open_file),
    "etcd": DiscoveryBackend("etcd:<host:port,...>/<prefix>", open_etcd),
    "kubernetes": DiscoveryBackend("kubernetes:<namespace>/<mesh>", open_kubernetes),
    "static": DiscoveryBackend(STATIC_USAGE, open_static),
}
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
