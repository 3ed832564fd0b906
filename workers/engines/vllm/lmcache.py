"""LMCache's multiprocess connector with keys that name the KV's content. vLLM loads it in each of its processes.

LMCache's keys have the model's path, and its server outlives workers: after a rollout of new weights to the same path,
a worker would read the KV of the old ones. They do not have the adapter. They have the tenant's salt, but the server
fails requests whose salt has characters that it forbids. Named in --kv-transfer-config as `kv_connector_module_path`.
"""

import copy
from hashlib import blake2b
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector as _LMCacheMPConnector

from kvmesh.workers.engines.vllm.transfer import WEIGHTS

SALT_BYTES = 16


class LMCacheMPConnector(_LMCacheMPConnector):  # type: ignore[misc, unused-ignore]
    """Names the model for LMCache by its content, and what a request's KV depends on beside its tokens by the salt."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(named_by_content(vllm_config), role, kv_cache_config)

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        tracker = super()._get_or_create_request_tracker(request)
        tracker.cache_salt = salt_of(request.lora_request, request.cache_salt or "")
        return tracker


def named_by_content(vllm_config: Any) -> Any:
    """Return a copy of vLLM's configuration whose model is called by its content."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights = vllm_config.kv_transfer_config.get_from_extra_config(WEIGHTS, "")
    parts = (weights or model.model, model.dtype, model.quantization, cache.cache_dtype)
    named = copy.copy(vllm_config)
    named.model_config = copy.copy(model)
    named.model_config.model = "_".join(map(str, parts))  # LMCache wants no @ there
    return named


def salt_of(adapter: Any, salt: str) -> str:
    """Return the salt for LMCache. `adapter`: vLLM's LoRARequest, whose name is unique to its content here."""
    if adapter is None and not salt:
        return ""
    name = "" if adapter is None else adapter.lora_name
    return blake2b(f"{name}\0{salt}".encode(), digest_size=SALT_BYTES).hexdigest()
