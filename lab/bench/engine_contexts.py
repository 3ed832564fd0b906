"""Fill contexts with one number instead of computing them, for vLLM's side of `kvmesh lab bench engine versus`.

vLLM loads this module by its name, as a KV connector. The contexts of 32 sequences would take it minutes to compute.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from kvmesh.lab.bench.engine_side import COMPUTED


class FilledContexts(DecodeBenchConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Fill all of a prompt but its last token, unless the id of the request says that it is to be computed."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if str(request.request_id).startswith(COMPUTED):
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found
