"""Settings of a mesh on one host: the settings of `kvmesh up`, and the ones that it passes on to its processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import Group, load_with_groups
from kvmesh.mesh.telemetry import LogLevel, Namespace
from kvmesh.planner.connectors.local_api import MAX_WORKERS
from kvmesh.protocol.card_checks import MAX_NAME_CHARS
from kvmesh.protocol.messages import Role
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.registry import ENGINE_HELP, StartedEngineName

ENV_PREFIX = "KVMESH_UP_"
ClusterTls = Annotated[  # the type of a command's setting
    str,
    Meta(description="mutual TLS between the processes: folder of a CA; auto: one is made in the run directory"),
]
GROUPS = (
    Group(
        "options of every worker",
        WorkerConfig,
        frozenset(
            {"name", "namespace", "role", "count", "discovery", "advertise_host", "metrics_port", "http_endpoint"}
        )
        | {"mesh_tls", "mesh_probes", "allowed_hosts"}
        | {name for name in WorkerConfig.__struct_fields__ if name.startswith("attach_")},
    ),
    Group(
        "options of the frontend",
        FrontendConfig,
        frozenset(
            {"name", "namespace", "advertise_host", "discovery", "processes", "shares_port_with", "direct_worker"}
        )
        | {"mesh_tls", "mesh_port"},
    ),
    Group(
        "options of the router",
        RouterConfig,
        frozenset(
            {
                "name",
                "namespace",
                "advertise_host",
                "discovery",
                "http_port",
                "metrics_port",
                "gossip_port",
                "max_body_mib",
            }
        )
        | {"mesh_tls", "mesh_probes", "allowed_hosts"}
        | {"tokenizer", "tokenizer_cache_mib", "model_cache", "model_cache_mib"}  # the frontend's
        | {"control_tokens_in_text"}
        | {name for name in RouterConfig.__struct_fields__ if name.startswith("ext_proc_")},
    ),
)


class UpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_UP_<NAME>`, that wins over the table [up] of `--config`, that over the default."""

    host: Annotated[str, Meta(min_length=1, description="address of the HTTP API")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API; 0: any")] = 8000
    prefill: Annotated[int, Meta(ge=0, le=MAX_WORKERS, description="prefill workers")] = 1
    decode: Annotated[int, Meta(ge=0, le=MAX_WORKERS, description="decode workers")] = 2
    aggregated: Annotated[
        int, Meta(ge=0, le=MAX_WORKERS, description="aggregated workers, which prefill and decode")
    ] = 0
    router: Annotated[Literal["embedded", "remote"], Meta(description="remote: a router process of its own")] = (
        "embedded"
    )
    model_path: Annotated[str, Meta(description="Hugging Face folder; default: the tiny model")] = str(CHECKPOINT_DIR)
    model: Annotated[
        str,
        Meta(max_length=MAX_NAME_CHARS, description="name the model is served under; default: tiny, or its folder's"),
    ] = ""
    engine: Annotated[StartedEngineName, Meta(description=ENGINE_HELP)] = "torch"
    memory_gib: Annotated[
        float,
        Meta(ge=0, description="torch: start a memory service of so many GiB, so that workers share weights; 0: none"),
    ] = 0.0
    planner: Annotated[
        bool,
        Meta(description="a planner starts and stops workers; its options begin with --planner-, see kvmesh planner"),
    ] = False
    mesh_tls: ClusterTls = ""
    run_dir: Annotated[
        str, Meta(description="folder of discovery and logs; default: a new one, removed at the end")
    ] = ""
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    namespace: Namespace = "kvmesh"
    log_level: LogLevel = "info"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A mesh on one host. `worker`, `frontend` and `router` hold the settings that were given for these processes."""

    up: UpConfig = field(default_factory=UpConfig)
    worker: Mapping[str, Any] = field(default_factory=dict)
    frontend: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Return the name that the model is served under."""
        return served_name(self.up.model, self.up.model_path)

    def worker_config(
        self, role: Role, name: str, discovery: str, mesh_tls: str = "", weights_service: str = ""
    ) -> WorkerConfig:
        up = self.up
        shared = {"weights_service": weights_service} if weights_service else {}
        return WorkerConfig(
            **{**self.worker, **shared},
            name=name,
            role=role,
            engine=up.engine,
            model_path=up.model_path,
            model=self.model,
            discovery=discovery,
            drain_timeout_s=up.drain_timeout_s,
            mesh_tls=mesh_tls,
            namespace=up.namespace,
            log_level=up.log_level,
        )

    def first_workers(self) -> dict[str, Role]:
        """Return the roles, by name, of the workers that the mesh begins with."""
        up = self.up
        counts = {Role.PREFILL: up.prefill, Role.DECODE: up.decode, Role.AGGREGATED: up.aggregated}
        return {f"{role.value}-{number}": role for role, count in counts.items() for number in range(count)}


def served_name(model: str, model_path: str) -> str:
    if model:
        return model
    return "tiny" if Path(model_path) == CHECKPOINT_DIR else Path(model_path).resolve().name


def load_cluster(argv: Sequence[str], environ: Mapping[str, str]) -> ClusterConfig:
    """Read the settings of `kvmesh up` as `kvmesh.mesh.config.load` does. Raises ConfigError."""
    up, (worker, frontend, router) = load_with_groups(
        UpConfig,
        GROUPS,
        argv,
        environ,
        prefix=ENV_PREFIX,
        prog="kvmesh up",
        description="Run a mesh on this host until Ctrl-C. Options of the planner begin with --planner-, see "
        "`kvmesh planner --help`. Frontend and router also read KVMESH_FRONTEND_*, KVMESH_ROUTER_* and the tables "
        "[frontend] and [router] of --config.",
        section="up",
    )
    return ClusterConfig(up, worker, frontend, router)
