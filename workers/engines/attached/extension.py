"""Register servers that run already as an engine."""

from kvmesh.protocol.messages import Feature
from kvmesh.workers.engines.kind import STEERS, EngineKind

EXTENSION = EngineKind(
    name="attach",
    title="an attached server",
    summary="a server that runs already, see --attach-url",
    folder="attached",
    features=(*STEERS, Feature.PROMPT_LOGPROBS, Feature.GUIDED, Feature.EMBEDDINGS),
    is_started=False,
)
