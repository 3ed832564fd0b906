"""Settings of the router, wherever it runs: in a frontend or by itself."""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvmesh.kvevents.allowance import EventRates
from kvmesh.kvevents.nats_access import USAGE as NATS_USAGE
from kvmesh.mesh.discovery import DiscoveryUrl
from kvmesh.mesh.http.browsers import AllowedHosts
from kvmesh.mesh.identity.credentials import MeshProbes, MeshTls
from kvmesh.mesh.safeguards import is_off
from kvmesh.mesh.telemetry import LogFormat, LogLevel, Namespace
from kvmesh.router.admission import AdmissionRules
from kvmesh.router.disaggregation import LocalPrefill
from kvmesh.router.policies import Policy, policies_help
from kvmesh.router.queue import Order, QueueRules
from kvmesh.router.rules import RouterRules, Saturation
from kvmesh.router.selection import Weights

_RULES = RouterRules()  # the defaults stand there
_SATURATION = Saturation()
_NEVER = 1 << 62
MIB = 1 << 20


class RouterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ROUTER_<NAME>`, that over the TOML file of `--config`, that over the default."""

    policy: Annotated[Policy, Meta(description=policies_help())] = _RULES.policy
    recompute_price: Annotated[
        float, Meta(ge=0, description="of a block to prefill, in blocks that wait; 0: worked out from the traffic")
    ] = _RULES.recompute_price
    prefill_weight: Annotated[float, Meta(ge=0, description="cost of a block still to prefill: favours reuse")] = (
        _RULES.weights.prefill
    )
    decode_weight: Annotated[float, Meta(ge=0, description="cost of a block held by running requests")] = (
        _RULES.weights.decode
    )
    request_weight: Annotated[float, Meta(ge=0, description="cost of a running request, in blocks")] = (
        _RULES.weights.request
    )
    transfer_weight: Annotated[float, Meta(ge=0, description="cost of a block to pull from a prefill worker")] = (
        _RULES.weights.transfer
    )
    host_weight: Annotated[float, Meta(ge=0, le=1, description="share of a block's work that host memory saves")] = (
        _RULES.weights.host
    )
    disk_weight: Annotated[float, Meta(ge=0, le=1, description="... that a disk saves")] = _RULES.weights.disk
    object_weight: Annotated[float, Meta(ge=0, le=1, description="... that an object store saves")] = (
        _RULES.weights.object
    )
    temperature: Annotated[float, Meta(ge=0, description="0: the cheapest worker; above: spread")] = _RULES.temperature
    local_prefill_max_tokens: Annotated[
        int, Meta(ge=0, description="a decode worker prefills itself below so many uncached tokens")
    ] = _RULES.local_prefill.max_tokens
    local_prefill_max_share: Annotated[
        float, Meta(ge=0, le=1, description="... and below this uncached share of the prompt")
    ] = _RULES.local_prefill.max_share
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
    queue_order: Annotated[Order, Meta(description="fcfs: by arrival; wspt: short uncached prompts first")] = (
        _RULES.queue.order
    )
    queue_max_requests: Annotated[int, Meta(ge=1, description="requests that wait for one model; more get a 429")] = (
        _RULES.queue.max_requests
    )
    queue_max_tokens: Annotated[int, Meta(ge=1, description="... and tokens of their prompts")] = (
        _RULES.queue.max_tokens
    )
    queue_aging_tokens_per_s: Annotated[
        float, Meta(gt=0, description="wspt: a prompt is overtaken for its uncached tokens divided by this, in s")
    ] = _RULES.queue.aging_tokens_per_s
    admission: Annotated[
        bool, Meta(description="refuse requests at once that would miss the deadline that their client stated")
    ] = _RULES.admission.is_on
    queue_max_wait_s: Annotated[
        float, Meta(ge=0, description="refuse requests with a stated deadline that would wait longer; 0: any wait")
    ] = _RULES.admission.max_wait_s
    queue_standing_wait_s: Annotated[
        float, Meta(ge=0, description="... so long in a queue that stays; 0: any wait")
    ] = _RULES.admission.standing_wait_s
    affinity_ttl_s: Annotated[
        float, Meta(ge=0, description="a session keeps to its worker for so long after its last request; 0: not")
    ] = _RULES.affinity_ttl_s
    predict_ttl_s: Annotated[
        float, Meta(ge=0, description="a placement counts as cached until its KV events come, so long at most; 0: not")
    ] = _RULES.predict_ttl_s
    approximate_ttl_s: Annotated[
        float, Meta(ge=0, description="... so long where a worker publishes no KV events; 0: not")
    ] = _RULES.approximate_ttl_s
    lease_s: Annotated[float, Meta(gt=0, description="a booking ends when nothing was heard of it for so long")] = (
        _RULES.lease_s
    )
    ramp_s: Annotated[float, Meta(ge=0, description="a worker that has joined gets its full share after so long")] = (
        _RULES.ramp_s
    )
    name: Annotated[str, Meta(min_length=1, description="name of this router, unlike those of the others")] = "router"
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    advertise_host: Annotated[str, Meta(description="address that peers use; default: --host")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the request plane; 0: any")] = 0
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP API and /metrics; 0: any")] = 0
    allowed_hosts: AllowedHosts = ""
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="a port for /metrics alone, besides; 0: any")
    ] = None
    gossip: Annotated[bool, Meta(description="report the load placed here to other routers, and follow theirs")] = True
    gossip_port: Annotated[int, Meta(ge=0, le=65535, description="port of the gossip; 0: any")] = 0
    nats_url: Annotated[
        str, Meta(description=f"NATS server that wants user and password for the KV events: {NATS_USAGE}")
    ] = ""
    kv_events_per_s: Annotated[
        float, Meta(gt=0, description="KV events of one publisher; one that sends more is heard again after a rest")
    ] = EventRates().events_per_s
    kv_events_mib_per_s: Annotated[float, Meta(gt=0, description="... and their size")] = EventRates().bytes_per_s / MIB
    max_body_mib: Annotated[float, Meta(gt=0, description="larger HTTP bodies are refused")] = 2.0
    max_bookings: Annotated[int, Meta(ge=1, description="bookings made over HTTP that stand at once")] = 4096
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
    ext_proc_max_streams: Annotated[int, Meta(ge=1, description="picker: requests at once; more get a 429")] = 8192
    ext_proc_max_body_mib: Annotated[float, Meta(gt=0, le=1024, description="picker: larger requests are refused")] = (
        16.0
    )
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
    discovery: DiscoveryUrl = "file:.run/discovery"
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    mesh_tls: MeshTls = ""
    mesh_probes: MeshProbes = False
    namespace: Namespace = "kvmesh"
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


def rules_of(config: RouterConfig) -> RouterRules:
    return RouterRules(
        policy=config.policy,
        weights=Weights(
            prefill=config.prefill_weight,
            decode=config.decode_weight,
            request=config.request_weight,
            transfer=config.transfer_weight,
            host=config.host_weight,
            disk=config.disk_weight,
            object=config.object_weight,
        ),
        recompute_price=config.recompute_price,
        temperature=config.temperature,
        local_prefill=LocalPrefill(config.local_prefill_max_tokens, config.local_prefill_max_share),
        saturation=saturation_of(config),
        queue=QueueRules(
            order=config.queue_order,
            max_requests=config.queue_max_requests,
            max_tokens=config.queue_max_tokens,
            aging_tokens_per_s=config.queue_aging_tokens_per_s,
        ),
        admission=AdmissionRules(
            is_on=config.admission, max_wait_s=config.queue_max_wait_s, standing_wait_s=config.queue_standing_wait_s
        ),
        slo_itl_s=config.slo_itl_s or 0.0,
        affinity_ttl_s=config.affinity_ttl_s,
        predict_ttl_s=config.predict_ttl_s,
        approximate_ttl_s=config.approximate_ttl_s,
        lease_s=math.inf if is_off("lease_expiry") else config.lease_s,
        ramp_s=config.ramp_s,
    )


def event_rates_of(config: RouterConfig) -> EventRates:
    return EventRates(events_per_s=config.kv_events_per_s, bytes_per_s=config.kv_events_mib_per_s * MIB)


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
