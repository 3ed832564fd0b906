"""LMCache's multiprocess connector with keys that name the weights' content. vLLM loads it in each of its processes.

LMCache's keys have the model's path, and its server outlives workers: after a rollout of new weights to the same path,
a worker would read the KV of the old ones. Named in --kv-transfer-config as `kv_connector_module_path`.
"""

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector as _LMCacheMPConnector

from workers.engines.vllm.transfer import WEIGHTS


class LMCacheMPConnector(_LMCacheMPConnector):  # type: ignore[misc, unused-ignore]
    """Names the model for LMCache by its weights, and by what else the bytes of its KV depend on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(named_by_content(vllm_config), role, kv_cache_config)


def named_by_content(vllm_config: Any) -> Any:
    """Return a copy of vLLM's configuration whose model is called by its content."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights = vllm_config.kv_transfer_config.get_from_extra_config(WEIGHTS, "")
    parts = (weights or model.model, model.dtype, model.quantization, cache.cache_dtype)
    named = copy.copy(vllm_config)
    named.model_config = copy.copy(model)
    named.model_config.model = "@".join(map(str, parts))
    return named
