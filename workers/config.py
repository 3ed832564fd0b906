"""Settings of a worker."""

import shlex
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.kvcache.tiers.place import check_endpoint, place_of
from kvmesh.kvevents.connect import SERVER_USAGE
from kvmesh.mesh.identity.credentials import MeshProbes
from kvmesh.mesh.service_config import MemberConfig
from kvmesh.protocol.card_checks import MAX_NAME_CHARS
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.protocol.parsers import REASONING_PARSER_HELP, TOOL_PARSER_HELP, reasoning_parser_name, tool_parser_name
from kvmesh.workers.canary import CANARY_INTERVAL_S
from kvmesh.workers.engines.registry import ENGINE_HELP, EngineName
from kvmesh.workers.schemas import GuideWhitespace
from kvmesh.workers.stall import ANSWER_STALL_S, STEP_STALL_S


class WorkerConfig(MemberConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_WORKER_<NAME>`, that over the TOML file of `--config`, that over the default."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("name", "role", "engine", "engine_args", "model_path", "model", "device", "dtype"),
        *("block_size", "num_blocks", "max_num_seqs", "max_step_tokens", "loras", "tool_parser"),
        *("reasoning_parser", "kv_transfer", "kv_connector", "kv_host_mib", "kv_disk", "kv_shared"),
        *("host", "advertise_host", "port", "metrics_port", "discovery", "mesh_tls", "drain_timeout_s", "log_level"),
    )

    name: Annotated[str, Meta(description="stable name of this worker; default: its role and a random suffix")] = ""
    role: Annotated[Role, Meta(description="prefill, decode, or aggregated: both halves")] = Role.AGGREGATED
    engine: Annotated[EngineName, Meta(description=ENGINE_HELP)] = "torch"
    engine_args: Annotated[
        str, Meta(description="vllm, sglang, trtllm: flags of the engine itself; or give them after --")
    ] = ""
    model_path: Annotated[str, Meta(description="Hugging Face folder (mock, attach: of the tokenizer)")]
    model: Annotated[
        str, Meta(max_length=MAX_NAME_CHARS, description="name the model is served under; default: that of its folder")
    ] = ""
    random_weights: Annotated[
        bool, Meta(description="torch, vllm: make weights up, the folder has only config.json")
    ] = False
    weights_service: Annotated[
        str,
        Meta(
            description="torch: socket of `kvmesh memory`, which shares weights on a CPU between workers; empty: none"
        ),
    ] = ""
    device: Annotated[str, Meta(description="torch: cpu, cuda, cuda:<n> or auto")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="torch, vllm: type of weights; auto: the model's, float32 on a CPU slow at that (doctor says)"
        ),
    ] = "auto"
    num_threads: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="torch, vllm: CPU threads of a step; 0: the engine decides; default: 1 for small models"),
    ] = None
    decode_buckets: Annotated[
        str, Meta(description="torch on a GPU: batch sizes of decoding that are CUDA graphs, as 1,2,4,8; none if empty")
    ] = ""
    guide_whitespace: Annotated[
        GuideWhitespace,
        Meta(description="torch: spaces between the parts of guided JSON; compact: none; flexible: as the model likes"),
    ] = "compact"
    block_size: Annotated[
        int, Meta(ge=1, le=1024, description="tokens per KV block (vllm: set its own flag after --)")
    ] = 16
    num_blocks: Annotated[
        int,
        Meta(ge=2, le=1 << 27, description="torch, mock: KV blocks of each rank; attach: if the server does not say"),
    ] = 2048
    max_num_seqs: Annotated[
        int, Meta(ge=1, description="torch, mock: sequences in one step; attach: if the server does not say")
    ] = 32
    max_step_tokens: Annotated[
        int, Meta(ge=1, description="torch, mock: tokens of one step; longer prompts are chunked")
    ] = 512
    mock_speedup: Annotated[float, Meta(ge=0, description="mock: how much faster than modelled; 0: no delay")] = 1.0
    mock_itl_ms: Annotated[float, Meta(ge=0, description="mock: fixed time of a step that decodes; 0: as modelled")] = (
        0.0
    )
    mock_profile: Annotated[
        str,
        Meta(description="mock: file of `kvmesh profile` by which steps are timed; default: a fit to a real engine"),
    ] = ""
    mock_kv_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="mock: gigabytes of KV per second that a pull brings at most; 0: no limit")
    ] = 0.0
    mock_host_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="mock: gigabytes of KV per second to and from host memory; 0: no limit")
    ] = 0.0
    mock_disk_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="mock: gigabytes of KV per second to and from --kv-disk; 0: as fast as it is")
    ] = 0.0
    mock_shared_bandwidth_gbps: Annotated[
        float, Meta(ge=0, description="mock: gigabytes of KV per second to and from --kv-shared; 0: as fast as it is")
    ] = 0.0
    mock_start_s: Annotated[float, Meta(ge=0, description="mock: time to load, before it joins the mesh")] = 0.0
    capacity: Annotated[
        Annotated[float, Meta(ge=0.01, le=100)] | None,
        Meta(
            description="speed against the other workers of its role: one of 2 is given twice the work; "
            "default: that of the profile, else 1"
        ),
    ] = None
    dp_size: Annotated[
        int, Meta(ge=1, le=64, description="mock, vllm: data-parallel ranks, each with its own cache")
    ] = 1
    count: Annotated[
        int, Meta(ge=1, le=1024, description="mock: workers in this process, called <name>-0, <name>-1, ...")
    ] = 1
    loras: Annotated[str, Meta(description="adapters, comma-separated: vllm, sglang: name=path; mock: names")] = ""
    attach_url: Annotated[str, Meta(description="attach: the server's, http://host:port")] = ""
    attach_kv_events: Annotated[str, Meta(description="attach: its KV events, tcp://host:port; empty: ask it")] = ""
    attach_kv_replay: Annotated[str, Meta(description="attach: their replay socket, tcp://host:port")] = ""
    tool_parser: Annotated[str, Meta(description=TOOL_PARSER_HELP)] = ""
    reasoning_parser: Annotated[str, Meta(description=REASONING_PARSER_HELP)] = ""
    kv_transfer: Annotated[
        Literal["auto", "nixl", "shm"],
        Meta(description="torch, mock: how KV moves between workers; auto: nixl if it loads"),
    ] = "auto"
    kv_connector: Annotated[
        str,
        Meta(description="vllm: nixl, offloading, lmcache, lmcache-mp, a chain of them as nixl,offloading, or none"),
    ] = ""
    kv_host_mib: Annotated[
        int, Meta(ge=0, description="torch, mock: host memory of each rank for KV that leaves the device; 0: none")
    ] = 0
    kv_offload: Annotated[
        Literal["ahead", "through"],
        Meta(description="torch, mock: copy KV to host memory before it is evicted (ahead), or as soon as it is full"),
    ] = "ahead"
    kv_disk: Annotated[
        str, Meta(description="torch, mock: folder on a local disk for KV that is used twice; empty: none")
    ] = ""
    kv_disk_gib: Annotated[float, Meta(gt=0, description="torch, mock: space of --kv-disk that each rank may take")] = (
        16.0
    )
    kv_disk_salted: Annotated[
        bool, Meta(description="torch, mock: --kv-disk takes KV of requests with a cache_salt, and writes the salt too")
    ] = False
    kv_shared: Annotated[
        str,
        Meta(description="torch, mock: storage of several workers for KV used twice: dir:PATH or s3://BUCKET/PREFIX"),
    ] = ""
    kv_shared_endpoint: Annotated[
        str, Meta(description="torch, mock: URL of the S3 server; default: AWS_ENDPOINT_URL, or that of AWS")
    ] = ""
    kv_shared_gib: Annotated[float, Meta(gt=0, description="torch, mock: space of one model in --kv-shared")] = 64.0
    kv_shared_hours: Annotated[
        float, Meta(gt=0, description="torch, mock: KV in --kv-shared that nobody uses so long is removed")
    ] = 168.0
    kv_shared_salted: Annotated[
        bool, Meta(description="torch, mock: --kv-shared takes KV of requests with a cache_salt, and the salt too")
    ] = False
    kv_peers: Annotated[
        bool,
        Meta(description="torch, mock: pull prefixes from other workers where that is faster, and offer them its own"),
    ] = True
    kv_offloading_gib: Annotated[float, Meta(gt=0, description="vllm: host memory of --kv-connector offloading")] = 4.0
    lmcache_server: Annotated[
        str,
        Meta(
            pattern=r"^[^:/\s]+:[0-9]{1,5}\Z",
            description="vllm: HOST:PORT of the `lmcache server` of --kv-connector lmcache-mp",
        ),
    ] = "127.0.0.1:5555"
    offer_lease_s: Annotated[float, Meta(gt=0, description="a KV offer that nobody fetches is unpinned after")] = 30.0
    pull_timeout_s: Annotated[float, Meta(gt=0, description="a KV pull that takes longer is given up")] = 10.0
    canary_interval_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="a worker that is quiet for so long asks its engine for one token, and ends if none comes; "
            f"default: {CANARY_INTERVAL_S:g}, and 0 for attached servers; 0: never"
        ),
    ] = None
    stall_timeout_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="a worker whose engine makes no progress for so long ends, so that its owner starts it again; "
            f"default: {STEP_STALL_S:g} for a step of torch or mock, {ANSWER_STALL_S:g} for any answer of another "
            "engine; 0: never",
        ),
    ] = None
    advertise_host: Annotated[str, Meta(description="address that peers use; default: --host")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the request plane; 0: any")] = 0
    http_endpoint: Annotated[
        str,
        Meta(
            description="host:port where this worker answers OpenAI's API to gateways: a frontend beside it "
            "(--router direct); attach: the server's own by default"
        ),
    ] = ""
    kv_events_transport: Annotated[Literal["zmq", "nats"], Meta(description="what carries KV events to routers")] = (
        "zmq"
    )
    nats_url: Annotated[
        str, Meta(description=f"for --kv-events-transport nats: server with JetStream, {SERVER_USAGE}")
    ] = "nats://127.0.0.1:4222"
    kv_events_ports: Annotated[
        str,
        Meta(
            description="zmq: ports to choose from, FIRST-LAST, for firewalls: two for each rank, and two more for a "
            "change of role; empty: any",
            pattern=r"^$|^[0-9]{1,5}-[0-9]{1,5}$",
        ),
    ] = ""
    load_report_interval_s: Annotated[
        float, Meta(ge=0, le=600, description="time between two reports of load to a router, at least; 0: no reports")
    ] = 0.5
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of /metrics; 0: any")] = 0
    max_calls: Annotated[int, Meta(ge=1)] = 4096  # calls at once, beyond that they are refused
    mesh_probes: MeshProbes = False

    def __post_init__(self) -> None:
        """Raise ConfigError for a parser that no frontend has: its requests would all fail. Also for whitespace that
        the engine would not heed."""
        tool_parser_name(self.tool_parser)
        reasoning_parser_name(self.reasoning_parser)
        given = {"--kv-host-mib": self.kv_host_mib, "--kv-disk": self.kv_disk, "--kv-shared": self.kv_shared}
        tiers = [name for name, value in given.items() if value]
        if tiers and self.engine not in ("torch", "mock"):
            raise ConfigError(
                f"{tiers[0]} is not for the engine {self.engine}",
                hint="engines of other projects have tiers of their own, see docs/engines.md",
            )
        if self.kv_shared:
            place_of(self.kv_shared)
            check_endpoint(self.kv_shared_endpoint)
        if self.weights_service and self.engine != "torch":
            raise ConfigError(f"--weights-service is not for the engine {self.engine}", hint="leave it out")
        if self.decode_buckets and self.engine != "torch":
            raise ConfigError(
                f"--decode-buckets is not for the engine {self.engine}",
                hint="engines of other projects have flags of their own for CUDA graphs, see docs/engines.md",
            )
        if self.guide_whitespace != "compact" and self.engine != "torch":
            raise ConfigError(
                f"--guide-whitespace is not for the engine {self.engine}",
                hint="engines of other projects have flags of their own for it, see docs/workers.md",
            )


def with_engine_args(argv: list[str]) -> list[str]:
    """Return the arguments with all that follows `--` as the value of --engine-args."""
    if "--" not in argv:
        return argv
    at = argv.index("--")
    return [*argv[:at], f"--engine-args={shlex.join(argv[at + 1 :])}"]
