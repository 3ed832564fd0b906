"""Build the arguments of TensorRT-LLM's LLM class from the worker's settings and the flags after `--`. Pure.

TensorRT-LLM has no flags for them, so those after `--` are read here: `--max-batch-size 64`, `--enable-attention-dp`,
`--kv-cache-config.free-gpu-memory-fraction 0.8`. A value that is JSON is taken as JSON, any other as text.
"""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig

EVENT_BUFFER_SIZE = 100_000  # events that TensorRT-LLM keeps until they are asked for

_OWNED: Mapping[str, str] = {
    "model": "set --model-path of the worker",
    "skip_tokenizer_init": "TensorRT-LLM takes the end-of-sequence tokens from its tokenizer",
    "kv_cache_config.tokens_per_block": "set --block-size of the worker: routers count in its blocks",
    "kv_cache_config.kv_events_config": "the worker polls the events",
}
_SINGLE_GPU_ONLY = (  # AutoDeploy shards by world_size alone
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
)
_SHORT_NAMES = {  # of TensorRT-LLM's own server command; its LLM class would not know them
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "cluster_size": "moe_cluster_parallel_size",
}
_IGNORED_BY_AUTODEPLOY = frozenset({"build_config", "scheduler_config", "cp_config", "gpus_per_node"})


class Variant(StrEnum):
    """Values of TensorRT-LLM's `backend`. The TensorRT engine files of older releases are not among them."""

    PYTORCH = "pytorch"
    AUTODEPLOY = "_autodeploy"


@dataclass(frozen=True, slots=True)
class Arguments:
    variant: Variant
    kwargs: dict[str, Any]
    tells_events: bool
    has_guides: bool
    uses_xgrammar: bool
    ranks: int = 1  # that keep caches of their own


def read_arguments(config: WorkerConfig) -> Arguments:
    """Raises ConfigError for what contradicts the worker's settings."""
    if config.block_size & (config.block_size - 1):
        raise ConfigError(f"--block-size is {config.block_size}, TensorRT-LLM takes powers of two")
    given = read_given(shlex.split(config.engine_args))
    variant = _variant(given.pop("backend", Variant.PYTORCH))
    _refuse(given, config, variant)
    kwargs = _merged(_defaults(config, variant), given)
    cache = kwargs["kv_cache_config"]
    return Arguments(
        variant=variant,
        kwargs=kwargs,
        tells_events=bool(cache["enable_block_reuse"] and cache["event_buffer_max_size"]),
        has_guides=bool(kwargs.get("guided_decoding_backend")),
        uses_xgrammar=kwargs.get("guided_decoding_backend") == "xgrammar",
        ranks=kwargs.get("tensor_parallel_size", 1) if kwargs.get("enable_attention_dp") else 1,
    )


def prune(arguments: Arguments, known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the variant takes, and the names of those left out because it does not know them.

    `known`: the fields of the variant's own arguments class. Empty: not known, so all are passed on.
    """
    kept: dict[str, Any] = {}
    removed: list[str] = []
    for name, value in arguments.kwargs.items():
        is_ignored = arguments.variant is Variant.AUTODEPLOY and name in _IGNORED_BY_AUTODEPLOY
        if is_ignored or (known and name not in known):
            removed.append(name)
        else:
            kept[name] = value
    return kept, removed


def read_given(parts: Sequence[str]) -> dict[str, Any]:
    """Return the flags, nested by the dots in their names. Raises ConfigError for a word that is no flag."""
    given: dict[str, Any] = {}
    rest = list(parts)
    while rest:
        name, has_value, text = rest.pop(0).partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise ConfigError(f"{name!r} after -- is no flag", hint="give TensorRT-LLM's arguments as --name value")
        value: Any = True
        if has_value:
            value = _value(text)
        elif rest and not rest[0].startswith("--"):
            value = _value(rest.pop(0))
        elif name.startswith("--no-"):
            name, value = f"--{name[5:]}", False
        key = name[2:].replace("-", "_")
        _put(given, _SHORT_NAMES.get(key, key).split("."), value)
    return given


def _put(given: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        inner = given.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--{'.'.join(path)} after a plain value for --{key}", hint="give one of them")
        given = inner
    given[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _variant(name: object) -> Variant:
    known = {Variant.PYTORCH: Variant.PYTORCH, "autodeploy": Variant.AUTODEPLOY, "_autodeploy": Variant.AUTODEPLOY}
    if isinstance(name, str) and name in known:
        return known[name]
    raise ConfigError(f"--backend is {name!r}", hint="set it to pytorch or autodeploy")


def _refuse(given: Mapping[str, Any], config: WorkerConfig, variant: Variant) -> None:
    for path, hint in _OWNED.items():
        if _has(given, path.split(".")):
            raise ConfigError(f"--{path.replace('_', '-')} after -- contradicts the worker, which sets it", hint=hint)
    if config.role is Role.AGGREGATED and given.get("cache_transceiver_config"):
        raise ConfigError(
            "--cache-transceiver-config is for prefill and decode workers", hint="set --role prefill or --role decode"
        )
    if given.get("max_beam_width", 1) != 1:
        raise ConfigError("the worker sends requests without beams", hint="leave --max-beam-width out")
    if variant is Variant.AUTODEPLOY:
        for name in _SINGLE_GPU_ONLY:
            if not _is_single(given.get(name)):
                raise ConfigError(
                    f"AutoDeploy takes no --{name.replace('_', '-')}", hint="set --world-size, or --backend pytorch"
                )


def _is_single(value: object) -> bool:
    return value is None or value is False or (type(value) is int and value == 1)


def _has(given: Mapping[str, Any], path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(given, Mapping) or key not in given:
            return False
        given = given[key]
    return True


def _defaults(config: WorkerConfig, variant: Variant) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "model": config.model_path,
        "backend": variant.value,
        "kv_cache_config": {
            "enable_block_reuse": True,
            "event_buffer_max_size": EVENT_BUFFER_SIZE,
            "tokens_per_block": config.block_size,
        },
        "enable_iter_perf_stats": True,
    }
    if config.role is not Role.AGGREGATED:
        defaults["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "kv_transfer_timeout_ms": max(1, int(config.offer_lease_s * 1000)),
        }
    return defaults


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged
