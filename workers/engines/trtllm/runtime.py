"""The parts of tensorrt_llm that the worker uses. Only this module imports it, and only when it is asked for."""

import json
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.trtllm.arguments import Arguments, Variant


class LlmResult(Protocol):
    """The parts of `RequestOutput` that the worker uses: one object per request, which each step of its iteration
    changes.
    """

    outputs: list[Any]
    finished: bool

    def __aiter__(self) -> AsyncIterator["LlmResult"]: ...

    def abort(self) -> None: ...


class Llm(Protocol):
    """The parts of `LLM` that the worker uses."""

    args: Any

    def generate_async(self, inputs: list[int], **kwargs: Any) -> LlmResult: ...

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[Any]: ...

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[Any]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Trtllm:
    """The package. `launch` takes minutes and blocks."""

    version: str
    fields: Callable[[Variant], Collection[str]]  # of the variant's arguments class; empty: not known
    launch: Callable[[Variant, dict[str, Any]], Llm]
    sampling_params: Callable[..., Any]
    guided_decoding: Callable[..., Any]
    disaggregated_params: Callable[..., Any]
    request_error: type[Exception]
    request_id: Callable[[int], int] | None = None  # machine id (10 bits) -> an id that is unique among prefills


def load_trtllm() -> Trtllm:
    """Import it: tens of seconds. Raises ConfigError where it is not installed."""
    try:
        package = import_module("tensorrt_llm")
        api = import_module("tensorrt_llm.llmapi")
        sampling = import_module("tensorrt_llm.sampling_params")
        errors = import_module("tensorrt_llm.executor.utils")
        disagg = import_module("tensorrt_llm.llmapi.disagg_utils")
    except ImportError as error:
        raise ConfigError(
            f"the TensorRT-LLM engine needs the tensorrt_llm package: {error}",
            hint="use an image that has it, or set another --engine",
        ) from error
    return Trtllm(
        version=package.__version__,
        fields=_fields,
        launch=lambda variant, kwargs: cast(Llm, _llm_class(variant)(**kwargs)),
        sampling_params=sampling.SamplingParams,
        guided_decoding=sampling.GuidedDecodingParams,
        disaggregated_params=api.DisaggregatedParams,
        request_error=getattr(errors, "RequestError", RuntimeError),
        request_id=getattr(disagg, "get_global_disagg_request_id", None),
    )


def _llm_class(variant: Variant) -> Any:
    if variant is Variant.AUTODEPLOY:
        return import_module("tensorrt_llm._torch.auto_deploy").LLM
    return import_module("tensorrt_llm").LLM


def _fields(variant: Variant) -> Collection[str]:
    if variant is Variant.AUTODEPLOY:
        fields = import_module("tensorrt_llm._torch.auto_deploy.llm_args").LlmArgs.model_fields
    else:
        fields = import_module("tensorrt_llm.llmapi").TorchLlmArgs.model_fields
    return frozenset(fields)


def kv_settings(llm: Llm) -> str:
    """Return what changes the values of KV beside the model's files. How many GPUs share the work does not."""
    args, cache = llm.args, getattr(llm.args, "kv_cache_config", None)
    found = {name: getattr(args, name, None) for name in ("dtype", "quant_config")}
    return json.dumps(found | {"kv_dtype": getattr(cache, "dtype", None)}, default=str)


def launch(trtllm: Trtllm, arguments: Arguments, kwargs: dict[str, Any]) -> Llm:
    """Start the engine; blocks for minutes. Raises ConfigError if it does not come up."""
    try:
        return trtllm.launch(arguments.variant, kwargs)
    except (SystemExit, Exception) as error:
        hint = "check what follows --, and its log above"
        raise ConfigError(f"TensorRT-LLM {trtllm.version} did not start: {error}", hint=hint) from error


def gpu_blocks(llm: Llm) -> int:
    """Return the blocks in the KV cache of one rank, 0 if this release does not say."""
    ask = getattr(llm, "get_kv_cache_capacity", None)
    return 0 if ask is None else int(ask()["maxNumBlocks"])


def is_healthy(llm: Llm) -> bool:
    """Ask as TensorRT-LLM's own server does. A release without that question is healthy until a request fails."""
    ask = getattr(llm, "_check_health", None)
    return ask is None or bool(ask())
