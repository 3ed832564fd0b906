"""Register TensorRT-LLM as an engine."""

from kvmesh.protocol.messages import Feature
from kvmesh.workers.engines.kind import SAMPLES, EngineKind
from kvmesh.workers.engines.trtllm.mapping import mapping_flags

EXTENSION = EngineKind(
    name="trtllm",
    title="TensorRT-LLM",
    summary="TensorRT-LLM in this process",
    features=(*SAMPLES, Feature.GUIDED),
    takes=frozenset({"engine_args"}),
    mapping_flags=mapping_flags,
    package="tensorrt_llm",
    distributions=("tensorrt_llm",),
    install="pip install tensorrt-llm",
)
