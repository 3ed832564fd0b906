"""Register Kubernetes as a discovery backend."""

from kvmesh.mesh.discovery.store import Discovery, DiscoveryBackend
from kvmesh.mesh.identity.credentials import Credentials


def open_kubernetes(rest: str, credentials: Credentials | None) -> Discovery:
    # imported when it is used: its HTTP client takes a while to load
    from kvmesh.mesh.discovery.kubernetes.discovery import KubernetesDiscovery

    return KubernetesDiscovery(rest)


EXTENSION = DiscoveryBackend("kubernetes", "kubernetes:<namespace>/<mesh>", open_kubernetes)
