"""The kinds of servers that can be attached: one value for each, with all that makes it differ. Pure."""

from typing import Any

import msgspec

from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from kvmesh.protocol.messages import UNREADABLE, Feature, GenerateRequest, Guide, GuideKind, Role
from kvmesh.workers.choices import choices_of
from kvmesh.workers.engines.attached.probe import with_cache_config, with_disaggregation, with_event_sources, with_props
from kvmesh.workers.engines.attached.server import AttachedServer, Body, Disaggregation, LoadMetrics, Probe, ServerKind
from kvmesh.workers.engines.attached.tickets import BACKEND
from kvmesh.workers.engines.sglang.bootstrap import backend_name

START_HINT = "start it with --disaggregation-mode {role}, or attach it without --role"


def bootstrap_transfer(role: Role, told: Disaggregation | None) -> str:
    """Return the KV transfer for the worker's card: "" for a server that does both halves.

    Raise ConfigError for a server that was started in another role.
    """
    mode = "null" if told is None else told.mode
    if role is Role.AGGREGATED:
        if mode != "null":
            raise ConfigError(f"this SGLang server runs as {mode}", hint=f"attach it with --role {mode}")
        return ""
    if mode != role.value:
        found = "does not say that it can" if mode == "null" else f"runs as {mode}"
        raise ConfigError(f"--role {role.value}, and the server {found}", hint=START_HINT.format(role=role.value))
    assert told is not None
    return backend_name(told.transfer)


_BASE = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
_USUAL = _BASE | {"top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids"}


# --- parameters of /v1/completions ------------------------------------------------------------------------


def _no_fields(request: GenerateRequest, max_tokens: int) -> Body:
    return {}


def _usual_fields(request: GenerateRequest, max_tokens: int) -> Body:
    """Return the parameters that vLLM, SGLang and TensorRT-LLM have in common."""
    sampling, stop = request.sampling, request.stop
    return {
        "top_k": sampling.top_k if sampling.top_k else -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": stop.ignore_eos,
        "min_tokens": min(max(stop.min_tokens - len(request.generated), 0), max_tokens),
        "stop_token_ids": list(stop.stop_token_ids),
    }


def _llamacpp_fields(request: GenerateRequest, max_tokens: int) -> Body:
    """Return llama.cpp's parameters. Its prompt cache knows no tenants: a tenant's request does not use the cache."""
    return {
        "top_k": request.sampling.top_k,
        "min_p": request.sampling.min_p,
        "repeat_penalty": request.sampling.repetition_penalty,
        "ignore_eos": request.stop.ignore_eos,
        "cache_prompt": request.cache_salt is None,
    }


def _vllm_fields(request: GenerateRequest, max_tokens: int) -> Body:
    sampling = request.sampling
    fields = _usual_fields(request, max_tokens) | {"return_token_ids": True, "request_id": request.request_id}
    if request.cache_salt:
        fields["cache_salt"] = request.cache_salt
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.allowed_token_ids:
        fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.top_logprobs is not None:
        fields |= {"logprobs": sampling.top_logprobs, "return_tokens_as_token_ids": True}
    if sampling.prompt_logprobs is not None:
        fields["echo"] = True  # as many likeliest tokens as for the answer
    if request.guide is not None:
        fields["structured_outputs"] = structured_outputs(request.guide)
    return fields


def structured_outputs(guide: Guide) -> dict[str, Any]:
    """Return a guide in vLLM's words. Raises InvalidRequestError if its value is not JSON where it has to be."""
    match guide.kind:
        case GuideKind.JSON:
            return {"json_object": True}
        case GuideKind.JSON_SCHEMA:
            return {"json": _json(guide.value)}
        case GuideKind.CHOICE:
            return {"choice": choices_of(guide.value)}
        case GuideKind.REGEX:
            return {"regex": guide.value}
        case GuideKind.GRAMMAR:
            return {"grammar": guide.value}


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE as error:
        raise InvalidRequestError(f"a guide that is not JSON: {error}", param="guide") from error


# --- how prefill hands KV to decode -----------------------------------------------------------------------


def _no_transfer(role: Role, server: AttachedServer) -> str:
    if role is Role.AGGREGATED:
        return ""
    raise ConfigError(
        f"--role {role.value} for a server of kind {server.kind.name}: vLLM's and SGLang's handovers are known",
        hint="attach it without --role",
    )


def _vllm_transfer(role: Role, server: AttachedServer) -> str:
    return "" if role is Role.AGGREGATED else BACKEND


def _sglang_transfer(role: Role, server: AttachedServer) -> str:
    return bootstrap_transfer(role, server.disaggregation)


# --- the kinds --------------------------------------------------------------------------------------------

VLLM = ServerKind(
    name="vllm",
    owner="vllm",
    features=(
        Feature.COMPLETIONS,
        Feature.LOGPROBS,
        Feature.PROMPT_LOGPROBS,
        Feature.LOGIT_BIAS,
        Feature.ALLOWED_TOKENS,
        Feature.GUIDED,
    ),
    honours=_USUAL | {"cache_salt"},
    fields=_vllm_fields,
    max_seed=0x7FFF_FFFF_FFFF_FFFF,
    returns_token_ids=True,
    salts_embeddings=True,
    metrics_prefix="vllm:",
    load_metrics=LoadMetrics("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    probes=(Probe(("/metrics",), with_cache_config), Probe(("/kv_event_sources",), with_event_sources)),
    transfer=_vllm_transfer,
    counts_stream_tokens=True,
)
SGLANG = ServerKind(
    name="sglang",
    owner="sglang",
    honours=_USUAL,
    fields=_usual_fields,
    metrics_prefix="sglang:",
    load_metrics=LoadMetrics("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    probes=(Probe(("/server_info", "/get_server_info"), with_disaggregation),),  # the second one until 2026
    transfer=_sglang_transfer,
)
TRTLLM = ServerKind(name="trtllm", owner="tensorrt_llm", honours=_USUAL, fields=_usual_fields, transfer=_no_transfer)
LLAMACPP = ServerKind(
    name="llama.cpp",
    owner="llamacpp",
    honours=_BASE | {"top_k", "min_p", "repetition_penalty", "ignore_eos", "cache_salt"},
    fields=_llamacpp_fields,
    metrics_prefix="llamacpp:",
    load_metrics=LoadMetrics(
        "llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio"
    ),
    probes=(Probe(("/props",), with_props),),
    transfer=_no_transfer,
)
OPENAI = ServerKind(  # any other server that has /v1/completions
    name="openai",
    honours=_BASE,
    fields=_no_fields,
    takes_token_ids=False,
    takes_stream_options=False,
    transfer=_no_transfer,
)
KINDS = (VLLM, SGLANG, TRTLLM, LLAMACPP, OPENAI)

_BY_OWNER = {kind.owner: kind for kind in KINDS if kind.owner}


def kind_of(owner: str) -> ServerKind:
    """Return the kind of a server that writes `owner` as owned_by in /v1/models."""
    return _BY_OWNER.get(owner, OPENAI)
