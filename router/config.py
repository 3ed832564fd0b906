"""Settings of the router, wherever it runs: in a frontend or by itself."""

import math
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.kvevents.connect import SERVER_USAGE
from kvmesh.mesh.identity.credentials import MeshProbes
from kvmesh.mesh.safeguards import is_off
from kvmesh.mesh.service_config import MemberConfig
from kvmesh.router.admission import AdmissionRules
from kvmesh.router.disaggregation import LocalPrefill
from kvmesh.router.policies import Policy, policies_help
from kvmesh.router.queue import QueueRules
from kvmesh.router.rules import RouterRules, Saturation

_RULES = RouterRules()  # the defaults stand there
_SATURATION = Saturation()
_NEVER = 1 << 62


class RouterConfig(MemberConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ROUTER_<NAME>`, that over the TOML file of `--config`, that over the default."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("policy", "saturation_tokens", "slo_itl_s", "name", "host", "advertise_host", "port"),
        *("http_port", "metrics_port", "gossip_port", "ext_proc_port", "discovery", "mesh_tls"),
        *("drain_timeout_s", "log_level"),
    )

    policy: Annotated[Policy, Meta(description=policies_help())] = _RULES.policy
    recompute_price: Annotated[
        float, Meta(ge=0, description="of a block to prefill, in blocks that wait; 0: worked out from the traffic")
    ] = _RULES.recompute_price
    temperature: Annotated[float, Meta(ge=0, description="0: the cheapest worker; above: spread")] = _RULES.temperature
    local_prefill_max_tokens: Annotated[
        int, Meta(ge=0, description="a decode worker prefills itself below so many uncached tokens")
    ] = _RULES.local_prefill.max_tokens
    saturation_tokens: Annotated[
        int, Meta(ge=0, description="requests wait while a worker has so many prompt tokens to compute; 0: never")
    ] = _SATURATION.queued_tokens
    saturation_requests_share: Annotated[
        float, Meta(ge=0, description="... or this share of the sequences that it runs at once; 0: never")
    ] = _SATURATION.requests_share
    saturation_blocks_share: Annotated[
        float, Meta(ge=0, description="... or would have this share of its KV blocks in use; 0: never")
    ] = _SATURATION.blocks_share
    slo_itl_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="gap between tokens that decode workers keep when they compute prompts that prefill workers "
            "have no room for; 0: no limit; default: the frontend's --slo-itl-s if it was set, else no limit"
        ),
    ] = None
    queue_max_requests: Annotated[int, Meta(ge=1, description="requests that wait for one model; more get a 429")] = (
        _RULES.queue.max_requests
    )
    queue_max_tokens: Annotated[int, Meta(ge=1, description="... and tokens of their prompts")] = (
        _RULES.queue.max_tokens
    )
    admission: Annotated[
        bool, Meta(description="refuse requests at once that would miss the deadline that their client stated")
    ] = _RULES.admission.is_on
    queue_max_wait_s: Annotated[
        float, Meta(ge=0, description="refuse requests with a stated deadline that would wait longer; 0: any wait")
    ] = _RULES.admission.max_wait_s
    affinity_ttl_s: Annotated[
        float, Meta(ge=0, description="a session keeps to its worker for so long after its last request; 0: not")
    ] = _RULES.affinity_ttl_s
    lease_s: Annotated[float, Meta(gt=0, description="a booking ends when nothing was heard of it for so long")] = (
        _RULES.lease_s
    )
    ramp_s: Annotated[float, Meta(ge=0, description="a worker that has joined gets its full share after so long")] = (
        _RULES.ramp_s
    )
    name: Annotated[str, Meta(min_length=1, description="name of this router, unlike those of the others")] = "router"
    advertise_host: Annotated[str, Meta(description="address that peers use; default: --host")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the request plane; 0: any")] = 0
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API and /metrics; 0: any")] = 0
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="a port for /metrics alone, besides; 0: any")
    ] = None
    gossip: Annotated[bool, Meta(description="report the load placed here to other routers, and follow theirs")] = True
    gossip_port: Annotated[int, Meta(ge=0, le=65535, description="port of the gossip; 0: any")] = 0
    nats_url: Annotated[
        str, Meta(description=f"NATS server that wants user and password for the KV events: {SERVER_USAGE}")
    ] = ""
    max_body_mib: Annotated[float, Meta(gt=0, description="larger HTTP bodies are refused")] = 2.0
    max_bookings: Annotated[int, Meta(ge=1)] = 4096  # bookings made over HTTP that stand at once
    ext_proc_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="be the endpoint picker of a gateway (Envoy's ext_proc) on this port, and nothing else; 0: any"
        ),
    ] = None
    ext_proc_wait_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="picker: a request waits so long for a worker with room, then gets a 429"),
    ] = 20.0
    ext_proc_objectives: Annotated[
        str, Meta(description="picker: priorities of inference objectives, name=priority,...; below 0: never waits")
    ] = ""
    ext_proc_max_streams: Annotated[int, Meta(ge=1)] = 8192  # picker: requests at once; more get a 429
    ext_proc_max_body_mib: Annotated[float, Meta(gt=0, le=1024)] = 16.0  # picker: larger requests are refused
    ext_proc_tls_cert: Annotated[str, Meta(description="picker: PEM file with its certificate; default: no TLS")] = ""
    ext_proc_tls_key: Annotated[
        str, Meta(description="picker: PEM file with the key; default: in the certificate's")
    ] = ""
    ext_proc_client_ca: Annotated[
        str, Meta(description="picker: PEM file of the CA whose certificates gateways must show; default: none needed")
    ] = ""
    tokenizer: Annotated[
        Literal["auto", "hf", "fastokens"], Meta(description="picker: library that tokenizes, as a frontend has it")
    ] = "auto"
    tokenizer_cache_mib: Annotated[
        float, Meta(ge=0, le=65536, description="picker: tokens of known pieces of prompts, for each model; 0: none")
    ] = 32.0
    control_tokens_in_text: Annotated[
        bool, Meta(description="picker: control tokens that a text spells count as such, as a frontend has it")
    ] = False
    model_cache: Annotated[
        str, Meta(description="picker: folder for tokenizers that come from workers; default: ~/.cache/kvmesh/models")
    ] = ""
    model_cache_mib: Annotated[float, Meta(gt=0, description="picker: size of that folder")] = 1024.0
    mesh_probes: MeshProbes = False


def rules_of(config: RouterConfig) -> RouterRules:
    return RouterRules(
        policy=config.policy,
        recompute_price=config.recompute_price,
        temperature=config.temperature,
        local_prefill=LocalPrefill(config.local_prefill_max_tokens),
        saturation=saturation_of(config),
        queue=QueueRules(
            order=_RULES.queue.order, max_requests=config.queue_max_requests, max_tokens=config.queue_max_tokens
        ),
        admission=AdmissionRules(is_on=config.admission, max_wait_s=config.queue_max_wait_s),
        slo_itl_s=config.slo_itl_s or 0.0,
        affinity_ttl_s=config.affinity_ttl_s,
        lease_s=math.inf if is_off("lease_expiry") else config.lease_s,
        ramp_s=config.ramp_s,
    )


def saturation_of(config: RouterConfig) -> Saturation | None:
    """Return the limits; None if no request waits in the router."""
    limits = (config.saturation_tokens, config.saturation_requests_share, config.saturation_blocks_share)
    if not any(limits):
        return None
    return Saturation(
        queued_tokens=config.saturation_tokens or _NEVER,
        requests_share=config.saturation_requests_share or math.inf,
        blocks_share=config.saturation_blocks_share or math.inf,
    )
