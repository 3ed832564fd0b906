"""Settings of the router, wherever it runs: in a frontend or by itself."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.core import RouterRules
from router.disaggregation import LocalPrefill
from router.selection import Policy, Weights


class RouterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_ROUTER_<NAME>`, that over the TOML file of `--config`, that over the default."""

    policy: Annotated[Policy, Meta(description="kv: by cached prefixes and load")] = "kv"
    prefill_weight: Annotated[float, Meta(ge=0, description="cost of a block still to prefill: favours reuse")] = 1.0
    decode_weight: Annotated[float, Meta(ge=0, description="cost of a block held by running requests")] = 1.0
    request_weight: Annotated[float, Meta(ge=0, description="cost of a running request, in blocks")] = 0.0
    transfer_weight: Annotated[float, Meta(ge=0, description="cost of a block to pull from a prefill worker")] = 0.1
    temperature: Annotated[float, Meta(ge=0, description="0: the cheapest worker; above: spread")] = 0.0
    local_prefill_max_tokens: Annotated[
        int, Meta(ge=0, description="a decode worker prefills itself below so many uncached tokens")
    ] = 2048
    local_prefill_max_share: Annotated[
        float, Meta(ge=0, le=1, description="... and below this uncached share of the prompt")
    ] = 0.7
    name: Annotated[str, Meta(description="name of this router")] = "router"
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    advertise_host: Annotated[str, Meta(description="address that peers use; default: --host")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the request plane; 0: any")] = 0
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of /metrics; 0: any")] = 0
    discovery: Annotated[str, Meta(description="file:<directory>, where the mesh meets")] = "file:.run/discovery"
    drain_timeout_s: Annotated[float, Meta(ge=0, description="time to finish on shutdown")] = 20.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level")] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="form of a log line")] = "text"


def rules_of(config: RouterConfig) -> RouterRules:
    return RouterRules(
        policy=config.policy,
        weights=Weights(
            prefill=config.prefill_weight,
            decode=config.decode_weight,
            request=config.request_weight,
            transfer=config.transfer_weight,
        ),
        temperature=config.temperature,
        local_prefill=LocalPrefill(config.local_prefill_max_tokens, config.local_prefill_max_share),
    )
