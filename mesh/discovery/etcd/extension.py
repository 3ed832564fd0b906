"""Register etcd as a discovery backend."""

from kvmesh.mesh.discovery.store import Discovery, DiscoveryBackend
from kvmesh.mesh.identity.credentials import Credentials


def open_etcd(rest: str, credentials: Credentials | None) -> Discovery:
    from kvmesh.mesh.discovery.etcd.discovery import EtcdDiscovery  # gRPC takes 0.2 s to load

    return EtcdDiscovery(rest)


EXTENSION = DiscoveryBackend("etcd", "etcd:<host:port,...>/<prefix>", open_etcd)
