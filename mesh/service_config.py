"""Settings that frontend, router and worker have in common."""

from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.mesh.discovery import DiscoveryUrl
from kvmesh.mesh.http.browsers import AllowedHosts
from kvmesh.mesh.identity.credentials import MeshTls
from kvmesh.mesh.telemetry import LogFormat, LogLevel, Namespace


class MemberConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of the settings of a member of the mesh that serves requests."""

    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    allowed_hosts: AllowedHosts = ""
    discovery: DiscoveryUrl = "file:.run/discovery"
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    mesh_tls: MeshTls = ""
    namespace: Namespace = "kvmesh"
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
