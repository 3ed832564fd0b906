"""Settings of the planner's service. It also has the settings of the core (planner/model.py)."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.mesh.discovery import DiscoveryUrl
from kvmesh.mesh.http.browsers import AllowedHosts
from kvmesh.mesh.identity.credentials import MeshProbes, MeshTls
from kvmesh.mesh.telemetry import LogFormat, LogLevel, Namespace
from kvmesh.planner.model import PlannerConfig
from kvmesh.planner.slo import Aim
from kvmesh.protocol.messages import Role

CONTROL_FILE = "control.sock"


class ServiceConfig(PlannerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PLANNER_<NAME>`, that over [planner] of the `--config` file, that over the default."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("ttft_slo_s", "itl_slo_s", "mode", "min_prefill", "min_decode", "max_gpus", "forecast", "start_s", "flips"),
        *("name", "slo", "aim", "discovery", "connector", "shadow", "source", "frontends", "prometheus_url"),
        *("prefill_profile", "decode_profile", "compose_files", "kubernetes_prefill", "kubernetes_decode"),
        *("record_file", "host", "metrics_port", "mesh_tls", "log_level"),
    )

    name: Annotated[str, Meta(description="name of this planner")] = "planner"
    slo: Annotated[
        tuple[str, ...],
        Meta(description="'p95 TTFT <= 0.5 s over 5 min', the same of ITL: set --ttft-slo-s, --itl-slo-s, are judged"),
    ] = ()
    aim: Annotated[
        Aim,
        Meta(description="sets --miss-cost; budget: best attainment on --max-gpus; target: the percentiles of --slo"),
    ] = "price"
    discovery: DiscoveryUrl = "file:.run/discovery"
    connector: Annotated[
        Literal["local", "compose", "kubernetes", "virtual", "dry-run"],
        Meta(description="what starts and stops workers; dry-run: nothing, decisions are only recorded"),
    ] = "dry-run"
    shadow: Annotated[
        bool,
        Meta(description="decide beside a planner that acts: never apply, assume that each order is carried out"),
    ] = False
    source: Annotated[
        Literal["frontends", "prometheus"], Meta(description="where the traffic is read: /metrics of the frontends")
    ] = "frontends"
    frontends: Annotated[
        tuple[str, ...], Meta(description="frontends: http://host:port of each; default: all in discovery")
    ] = ()
    prometheus_url: Annotated[str, Meta(description="prometheus: the server, http://host:port")] = ""
    prometheus_matcher: Annotated[
        str, Meta(description='prometheus: labels of the frontends\' series, e.g. job="kvmesh-frontend"')
    ] = ""
    # prometheus: length of one piece of traffic; at least 4 scrapes
    prometheus_window_s: Annotated[float, Meta(gt=0)] = 60.0
    prefill_profile: Annotated[
        str, Meta(description="file of `kvmesh profile` for prefill workers; mock: the mock engine's own model")
    ] = ""
    decode_profile: Annotated[
        str, Meta(description="file of `kvmesh profile` for decode workers; default: --prefill-profile")
    ] = ""
    mock_speedup: Annotated[float, Meta(gt=0, description="profile mock: --mock-speedup of the workers")] = 1.0
    mock_kv_tokens: Annotated[int, Meta(ge=1)] = 32768  # profile mock: KV tokens of a worker
    mock_num_seqs: Annotated[int, Meta(ge=1)] = 32  # profile mock: --max-num-seqs of the workers
    mock_step_tokens: Annotated[int, Meta(ge=1)] = 512  # profile mock: --max-step-tokens of the workers
    local_control: Annotated[str, Meta(description=f"local: unix:<run directory>/control/{CONTROL_FILE}")] = ""
    compose_command: Annotated[str, Meta(description="compose: the command, as for a shell")] = "docker compose"
    compose_inspect: Annotated[str, Meta(description="compose: the command that shows containers by id")] = (
        "docker inspect"
    )
    compose_files: Annotated[tuple[str, ...], Meta(description="compose: files (-f)")] = ()
    compose_project: Annotated[str, Meta(description="compose: project (-p); default: the folder's")] = ""
    compose_prefill: Annotated[str, Meta(description="compose: service of the prefill workers")] = "prefill"
    compose_decode: Annotated[str, Meta(description="compose: service of the decode workers")] = "decode"
    kubernetes_prefill: Annotated[
        str, Meta(description="kubernetes: deployment/<name> or leaderworkerset/<name> of the prefill workers")
    ] = "deployment/kvmesh-prefill"
    kubernetes_decode: Annotated[str, Meta(description="kubernetes: <kind>/<name> of the decode workers")] = (
        "deployment/kvmesh-decode"
    )
    kubernetes_namespace: Annotated[str, Meta(description="kubernetes: namespace; default: the service account's")] = ""
    kubernetes_url: Annotated[str, Meta(description="kubernetes: API server; default: from the pod's environment")] = ""
    # kubernetes: folder with token, ca.crt and namespace of the service account
    kubernetes_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    virtual_host: Annotated[str, Meta(description="virtual: address on which decisions can be fetched")] = "127.0.0.1"
    virtual_port: Annotated[int, Meta(ge=0, le=65535, description="virtual: its port; 0: any")] = 8090
    virtual_timeout_s: Annotated[
        float, Meta(gt=0, description="virtual: a decision that is not acknowledged by then is an error")
    ] = 1800.0
    virtual_token_file: Annotated[
        str, Meta(description="virtual: file with a secret that callers send as Authorization: Bearer; empty: none")
    ] = ""
    record_file: Annotated[str, Meta(description="file of all decisions, JSON lines; empty: none")] = (
        ".run/planner.jsonl"
    )
    record_mib: Annotated[float, Meta(gt=0)] = 16.0  # most MiB of that file and the one before it together
    host: Annotated[str, Meta(description="address of /metrics")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of /metrics; 0: any")] = 0
    allowed_hosts: AllowedHosts = ""
    mesh_tls: MeshTls = ""
    mesh_probes: MeshProbes = False
    namespace: Namespace = "kvmesh"
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


def has_prefill_role(config: PlannerConfig) -> bool:
    return config.mode == "disaggregated"


def decoding_role(config: PlannerConfig) -> Role:
    """Return the role of the workers that write answers. AGGREGATED means that there are no others."""
    return Role.DECODE if has_prefill_role(config) else Role.AGGREGATED
