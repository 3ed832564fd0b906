"""Register SGLang as an engine."""

from kvmesh.protocol.messages import Feature
from kvmesh.workers.engines.kind import SAMPLES, EngineKind
from kvmesh.workers.engines.sglang.mapping import mapping_flags

EXTENSION = EngineKind(
    name="sglang",
    title="SGLang",
    summary="SGLang in this process",
    features=(*SAMPLES, Feature.LOGIT_BIAS, Feature.GUIDED),
    takes=frozenset({"loras", "engine_args"}),
    mapping_flags=mapping_flags,
    package="sglang",
    distributions=("sglang",),
    install="pip install sglang",
)
