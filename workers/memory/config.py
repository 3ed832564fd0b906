"""Settings of the memory service."""

from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.mesh.http.browsers import AllowedHosts
from kvmesh.mesh.telemetry import LogFormat, LogLevel, Namespace


class MemoryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_MEMORY_<NAME>`, that over the TOML file of `--config`, that over the default."""

    socket: Annotated[str, Meta(description="path of the Unix socket that workers are given as --weights-service")]
    limit_gib: Annotated[float, Meta(gt=0, description="memory that images may take, those in use and those kept")] = (
        64.0
    )
    # a worker that takes longer to load and write is followed by the next
    writer_deadline_s: Annotated[float, Meta(gt=0)] = 1800.0
    status: Annotated[bool, Meta(description="print what the service at --socket holds, and end")] = False
    json: Annotated[bool, Meta(description="with --status: print one JSON object")] = False
    host: Annotated[str, Meta(description="address of /metrics")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of /metrics; 0: any")] = 0
    allowed_hosts: AllowedHosts = ""
    namespace: Namespace = "kvmesh"
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
