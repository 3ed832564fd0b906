"""Read what a server says of itself. Pure; workers/engines/attached/asking.py asks.

Kinds are told apart by `owned_by` in /v1/models: the one field that each kind writes in its own way.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import ConfigError, WireError
from kvmesh.protocol.messages import UNREADABLE
from kvmesh.workers.engines.attached.server import (
    AttachedServer,
    Disaggregation,
    EventSource,
    LoadMetrics,
    ServerKind,
    ServerLoad,
)

MAX_NAMES = 4096  # of models that a server lists
MAX_RANKS = 1024

T = TypeVar("T")


class _Meta(msgspec.Struct):
    n_ctx_train: int | None = None
    n_ctx: int | None = None


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Rank(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""


class _ServerInfo(msgspec.Struct):
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disaggregation_transfer_backend: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,40}$")] = "mooncake"
    disaggregation_bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] = 8998


class _SlotSettings(msgspec.Struct):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    total_slots: int | None = None
    default_generation_settings: _SlotSettings | None = None


def read_models(body: bytes, wanted: str, kind_of: Callable[[str], ServerKind]) -> AttachedServer:
    """Return what /v1/models says of the model `wanted`, as the server calls it; "": the only one it has.

    `kind_of`: the kind of server by `owned_by`. Raise WireError for any other body, ConfigError if the model is not in
    the list.
    """
    models = _decode(body, _Models, "/v1/models").data
    if len(models) > MAX_NAMES:
        raise WireError(f"/v1/models lists {len(models)} models", hint=f"at most {MAX_NAMES} are accepted")
    bases = [model for model in models if model.parent is None]
    found = [model for model in bases if wanted in ("", model.id)]
    if not found or (not wanted and len(found) > 1 and len({model.root for model in found}) > 1):
        names = ", ".join(model.id for model in bases[:10]) or "none"
        raise ConfigError(
            f"the server has {'no model ' + repr(wanted) if wanted else 'no single model'}; it has: {names}",
            hint="name one of these with --model",
        )
    model = found[0]
    return AttachedServer(
        kind=kind_of(model.owned_by),
        model=model.id,
        loras=tuple(one.id for one in models if one.parent is not None and one.parent in (model.id, model.root)),
        root=model.root or "",
        context_tokens=model.max_model_len or (model.meta and (model.meta.n_ctx or model.meta.n_ctx_train)) or None,
    )


def read_cache_config(metrics: str) -> tuple[int, int] | None:
    """Tokens per KV block and number of blocks, from vLLM's metrics; None if they are not there."""
    for labels, _ in _samples(metrics, "vllm:cache_config_info"):
        size, count = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if size.isdecimal() and count.isdecimal() and 1 <= int(size) <= 1 << 20 and 2 <= int(count) <= 1 << 32:
            return int(size), int(count)
    return None


def read_load(metrics: str, names: LoadMetrics) -> ServerLoad:
    """Return the load summed over the ranks, with the mean of their usage. Zeros for metrics that are missing."""
    shares = [value for _, value in _samples(metrics, names.cache_usage)]
    return ServerLoad(
        running=_total(value for _, value in _samples(metrics, names.running)),
        waiting=_total(value for _, value in _samples(metrics, names.waiting)),
        cache_usage=min(max(sum(shares) / len(shares), 0.0), 1.0) if shares else 0.0,
    )


def read_event_sources(body: bytes, host: str) -> dict[int, EventSource]:
    """Return the KV event sources in vLLM's /kv_event_sources, by rank. Raise WireError.

    A wildcard address is read as `host`.
    """
    ranks = _decode(body, dict[int, _Rank], "/kv_event_sources")
    if len(ranks) > MAX_RANKS:
        raise WireError(f"/kv_event_sources lists {len(ranks)} ranks", hint=f"at most {MAX_RANKS} are accepted")
    return {
        rank: EventSource(reachable(told.endpoint, host), reachable(told.replay_endpoint or "", host), told.topic)
        for rank, told in ranks.items()
        if told.enable_kv_cache_events and told.publisher == "zmq" and told.endpoint
    }


def read_props(body: bytes) -> tuple[int | None, int | None]:
    """Return the sequences at once, and the tokens each can have, from llama.cpp's /props. Raises WireError."""
    props = _decode(body, _Props, "/props")
    settings = props.default_generation_settings
    return props.total_slots, None if settings is None else settings.n_ctx


def read_disaggregation(body: bytes) -> Disaggregation:
    """Return what SGLang's /server_info says, and SGLang's own defaults where it says nothing. Raise WireError."""
    info = _decode(body, _ServerInfo, "/server_info")
    return Disaggregation(
        info.disaggregation_mode, info.disaggregation_transfer_backend, info.disaggregation_bootstrap_port
    )


def reachable(endpoint: str, host: str) -> str:
    """Return the address to connect to for the address that was bound: tcp://*:5557 is tcp://<host>:5557."""
    for wildcard in ("*", "0.0.0.0", "[::]"):
        if endpoint.startswith(f"tcp://{wildcard}:"):
            return f"tcp://{host}:{endpoint.removeprefix(f'tcp://{wildcard}:')}"
    return endpoint


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _samples(metrics: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of each sample called `name`: a tenth of the work of a parser for everything."""
    for line in metrics.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " "):
            continue
        labels, _, value = line[len(name) :].rpartition(" ")
        try:
            number = float(value)
        except ValueError:
            continue
        if number == number:  # no NaN
            yield dict(_LABEL.findall(labels)), number


def _total(values: Iterator[float]) -> int:
    return int(min(max(sum(values), 0.0), 1e9))


def _decode(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise WireError(
            f"{path} of the server is not what was expected: {error}", hint="is this URL an OpenAI-compatible server?"
        ) from error


def only_rank(sources: Mapping[int, EventSource]) -> EventSource | None:
    """Return the source of a server with one rank.

    None if it has no source, or several ranks: any of them may then answer.
    """
    return next(iter(sources.values())) if len(sources) == 1 else None


# --- the probes of kinds of servers: what an answer adds to what is known -------------------------------------------


def with_cache_config(server: AttachedServer, body: bytes, host: str) -> AttachedServer:
    cache = read_cache_config(body.decode(errors="replace"))
    return server if cache is None else replace(server, block_size=cache[0], num_blocks=cache[1])


def with_event_sources(server: AttachedServer, body: bytes, host: str) -> AttachedServer:
    return replace(server, event_sources=read_event_sources(body, host))


def with_props(server: AttachedServer, body: bytes, host: str) -> AttachedServer:
    slots, context_tokens = read_props(body)
    return replace(server, slots=slots, context_tokens=context_tokens or server.context_tokens)


def with_disaggregation(server: AttachedServer, body: bytes, host: str) -> AttachedServer:
    return replace(server, disaggregation=read_disaggregation(body))
