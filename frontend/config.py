"""Settings of the frontend."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.mesh.service_config import MemberConfig
from kvmesh.router.rules import DEFAULT_SLO_ITL_S

NEED_EXTENSIONS = ("api_keys_file", "jwt_keys", "responses_store")  # must not be ignored where none reads them


class FrontendConfig(MemberConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_FRONTEND_<NAME>`, that over the TOML file of `--config`, that over the default."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("name", "host", "port", "processes", "router", "discovery", "tls_cert", "api_keys_file"),
        *("cors_origins", "allowed_hosts", "access_log", "access_log_file", "responses_store"),
        *("request_timeout_s", "drain_timeout_s", "mesh_tls", "slo_ttft_s", "slo_itl_s", "otlp_endpoint", "log_level"),
    )

    name: Annotated[str, Meta(description="name of this frontend")] = "frontend"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API; 0: any")] = 8000
    advertise_host: Annotated[str, Meta(description="address under which planners find /metrics; default: --host")] = ""
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="frontends that share the port; each takes up to one core; SIGHUP replaces them in turn",
        ),
    ] = 1
    shares_port_with: Annotated[
        str, Meta(description="folder where the processes of one port meet; set by --processes")
    ] = ""
    router: Annotated[
        Literal["embedded", "remote", "direct"],
        Meta(
            description="embedded: in this process, set by KVMESH_ROUTER_* and [router]; remote: `kvmesh router`; "
            "direct: none, an endpoint picker in front names the workers in headers"
        ),
    ] = "embedded"
    direct_worker: Annotated[
        str, Meta(description="--router direct: name of the worker for requests that name none; default: refuse them")
    ] = ""
    tokenizer: Annotated[
        Literal["auto", "hf", "fastokens"],
        Meta(description="library that tokenizes; auto: fastokens for models where it proves equal to `tokenizers`"),
    ] = "auto"
    tokenizer_cache_mib: Annotated[
        float, Meta(ge=0, le=65536, description="tokens of known pieces of prompts, kept for each model; 0: none")
    ] = 32.0
    control_tokens_in_text: Annotated[
        bool,
        Meta(
            description="control tokens that a message or tool spells count as control tokens, as in vLLM and "
            "transformers: whoever writes a text can end its turn"
        ),
    ] = False
    model_cache: Annotated[
        str, Meta(description="folder for tokenizers that come from workers; default: ~/.cache/kvmesh/models")
    ] = ""
    model_cache_mib: Annotated[
        float, Meta(gt=0, description="size of that folder; models that were used longest ago go first")
    ] = 1024.0
    tls_cert: Annotated[str, Meta(description="PEM file with the certificate and its chain: serve HTTPS")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with its private key; default: the one of --tls-cert")] = ""
    tls_client_ca: Annotated[str, Meta(description="PEM file; clients need a certificate that it has signed")] = ""
    api_keys_file: Annotated[
        str, Meta(description="file of API keys, made by `kvmesh keys`; only requests with one of them are served")
    ] = ""
    jwt_keys: Annotated[
        str, Meta(description="also serve requests with JWTs signed by these keys: a JWKS, as a file or an https URL")
    ] = ""
    jwt_issuer: Annotated[str, Meta(description="issuer (`iss`) of the tokens; needed with --jwt-keys")] = ""
    jwt_audience: Annotated[str, Meta(description="audience (`aud`) of the tokens; needed with --jwt-keys")] = ""
    jwt_leeway_s: Annotated[float, Meta(ge=0, le=600, description="by which clocks may differ from the issuer's")] = (
        30.0
    )
    jwt_tenant_claim: Annotated[str, Meta(description="claim with the tenant, where the claim `kvmesh` names none")] = (
        "tenant"
    )
    salt_secret_file: Annotated[
        str, Meta(description="file with a secret, the same at all frontends, that the salts of tenants are made with")
    ] = ""
    limits_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port where frontends share the limits of keys; --processes N takes 2N from there; 0: any",
        ),
    ] = 0
    cors_origins: Annotated[
        str, Meta(description="origins of web pages that may call the API, with commas between them; *: all pages")
    ] = ""
    ui: Annotated[bool, Meta(description="serve the live page, at /ui; with --mesh-tls it needs API keys")] = True
    ui_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="port of the live page; further processes take the next ones; default: that of the API"),
    ] = None
    access_log: Annotated[bool, Meta(description="log a line for every request")] = False
    access_log_file: Annotated[
        str, Meta(description="write these lines here instead, as JSON; of --processes, each adds its name to the path")
    ] = ""
    access_log_mib: Annotated[
        float,
        Meta(ge=1, description="size of that file, with the one before, <file>.1"),
    ] = 256.0
    max_connections: Annotated[int, Meta(ge=1, description="open connections; more are refused")] = 20_000
    max_body_mib: Annotated[float, Meta(gt=0, description="larger request bodies are refused")] = 16.0
    responses_store: Annotated[
        str, Meta(description="where /v1/responses keeps its responses: off, memory, or dir:PATH, which several share")
    ] = "off"
    responses_max: Annotated[int, Meta(ge=1, description="stored responses; the least recently used go first")] = 10_000
    responses_max_mib: Annotated[float, Meta(gt=0, description="size of all stored responses together")] = 1024.0
    responses_ttl_s: Annotated[
        float, Meta(gt=0, description="time that a response is kept after it was stored or last continued")
    ] = 86_400.0
    responses_background: Annotated[
        int, Meta(ge=0, description="background responses that run at a time; more are refused")
    ] = 64
    max_inflight: Annotated[int, Meta(ge=1, description="requests in progress; more are refused")] = 4096
    request_timeout_s: Annotated[float, Meta(gt=0, description="deadline of a request that names none")] = 600.0
    mesh_port: Annotated[
        int, Meta(ge=0, le=65535, description="--mesh-tls: port of /metrics and of placements, for members; 0: any")
    ] = 0
    drain_notice_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="on shutdown, /health says `draining` for so long before the port closes: longer than "
            "load balancers take to notice",
        ),
    ] = 2.5
    slo_ttft_s: Annotated[float, Meta(gt=0, description="SLO: a request whose first token comes later missed it")] = 2.0
    slo_itl_s: Annotated[
        float, Meta(gt=0, description="SLO: a request whose mean gap between tokens is longer missed it")
    ] = DEFAULT_SLO_ITL_S
    gen_ai_metrics: Annotated[
        bool, Meta(description="also count under OpenTelemetry's names for generative AI, gen_ai_*")
    ] = False
    otlp_endpoint: Annotated[
        str, Meta(description="send traces to this OpenTelemetry collector (OTLP over HTTP), as http://host:4318")
    ] = ""
    trace_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of requests to trace, beside those that failed, missed the SLO or migrated",
        ),
    ] = 0.01
