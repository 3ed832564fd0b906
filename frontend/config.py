"""Settings of the frontend."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mesh.discovery import DiscoveryUrl
from mesh.telemetry import LogFormat, LogLevel


class FrontendConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_FRONTEND_<NAME>`, that over the TOML file of `--config`, that over the default."""

    name: Annotated[str, Meta(description="name of this frontend")] = "frontend"
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API; 0: any")] = 8000
    advertise_host: Annotated[str, Meta(description="address under which planners find /metrics; default: --host")] = ""
    processes: Annotated[
        int, Meta(ge=1, le=256, description="frontends that share the port; each takes up to one core")
    ] = 1
    shares_port_with: Annotated[
        str, Meta(description="folder where the processes of one port meet; set by --processes")
    ] = ""
    router: Annotated[
        Literal["embedded", "remote", "direct"],
        Meta(
            description="embedded: in this process, set by KVMESH_ROUTER_* and [router]; remote: `python -m router`; "
            "direct: none, an endpoint picker in front names the workers in headers"
        ),
    ] = "embedded"
    direct_worker: Annotated[
        str, Meta(description="--router direct: name of the worker for requests that name none; default: refuse them")
    ] = ""
    discovery: DiscoveryUrl = "file:.run/discovery"
    tokenizer: Annotated[
        Literal["auto", "hf", "fastokens"],
        Meta(description="library that tokenizes; auto: fastokens for models where it proves equal to `tokenizers`"),
    ] = "auto"
    tokenizer_cache_mib: Annotated[
        float, Meta(ge=0, le=65536, description="tokens of known pieces of prompts, kept for each model; 0: none")
    ] = 32.0
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
        str, Meta(description="one API key a line, and its tenant if it has one; only requests with a key are served")
    ] = ""
    cors_origins: Annotated[
        str, Meta(description="origins of web pages that may call the API, with commas between them; *: all pages")
    ] = ""
    access_log: Annotated[bool, Meta(description="log a line for every request")] = False
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
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
