"""Read a deployment request: a TOML file with model, SLO and traffic, for `kvmesh profile plan --apply`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvmesh.planner.slo import Aim, SloStatement, read_statements
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

MAX_REQUEST_BYTES = 1 << 20


class RequestedTraffic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load that the deployment must carry."""

    rps: Annotated[float, Meta(gt=0)]
    isl: Annotated[int, Meta(ge=1)]
    osl: Annotated[int, Meta(ge=1)]
    hit_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    is_peak: bool = False  # the highest load expected: the planner orders no more, unless more lasts


class DeploymentRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for a fleet. `worker` and `planner` are settings of these processes, as in their own files."""

    slo: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2)]
    traffic: RequestedTraffic
    model_path: str = ""  # default: that of `kvmesh profile plan`
    engine: str = ""  # local: of the workers; default: that of the profiles
    profiles: tuple[str, ...] = ("profiles",)
    gpus: Annotated[int, Meta(ge=1)] = 8
    aim: Aim = "price"
    connector: Literal["local", "compose", "kubernetes"] = "local"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # local: of the HTTP API
    compose_command: str = "docker compose"
    helm_command: str = "helm"
    worker: dict[str, Any] = {}
    planner: dict[str, Any] = {}

    @property
    def statements(self) -> dict[str, SloStatement]:
        return {statement.of: statement for statement in read_statements(self.slo)}


def read_request(path: Path) -> DeploymentRequest:
    """Return the request. Raise ConfigError if it cannot be read, or lacks an SLO of the TTFT or of the ITL."""
    try:
        if path.stat().st_size > MAX_REQUEST_BYTES:
            raise ConfigError(f"{path} is too large for a request", hint=f"at most {MAX_REQUEST_BYTES} bytes")
        request = msgspec.toml.decode(path.read_bytes(), type=DeploymentRequest)
    except OSError as error:
        raise ConfigError(f"no request at {path}: {error.strerror}", hint="see docs/profiler.md") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is no request: {error}", hint="see docs/profiler.md") from error
    if missing := {"ttft", "itl"} - set(request.statements):
        raise ConfigError(
            f"{path} has no SLO of the {' and the '.join(sorted(missing)).upper()}",
            hint="for example slo = ['p95 TTFT <= 0.5 s', 'p95 ITL <= 50 ms']",
        )
    return request
