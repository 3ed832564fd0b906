"""A real vLLM whose model pools: vectors instead of tokens."""

import msgspec
import numpy as np
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import EmbedRequest, Feature, GenerateRequest, pack_tokens
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.vllm.engine import VllmEngine
from tests.support.vllm_mesh import ENV, FLAGS, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(300)]


async def test_a_model_that_pools_gives_vectors_of_length_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    settings = {"model_path": str(CHECKPOINT_DIR), "model": "tiny", "dtype": "float32", "engine": "vllm"}
    settings |= {"engine_args": " ".join([*FLAGS, "--runner", "pooling", "--convert", "embed"])}
    engine = VllmEngine(msgspec.convert(settings, WorkerConfig), "tiny")
    try:
        info = await engine.start(WorkerId("w"), "127.0.0.1:1")
        assert info.features == (Feature.EMBEDDINGS,)
        prompts = [pack_tokens(range(50, 150)), pack_tokens(range(60, 160)), pack_tokens(range(50, 150))]
        requests = [EmbedRequest(request_id=RequestId(f"e{i}"), model="tiny", prompt=p) for i, p in enumerate(prompts)]
        vectors = [np.frombuffer((await engine.embed(request)).vector, "<f4") for request in requests]
        assert [vector.shape for vector in vectors] == [(192,)] * 3
        assert np.linalg.norm(vectors[0]) == pytest.approx(1.0, abs=1e-3)
        assert np.allclose(vectors[0], vectors[2], atol=1e-5)
        assert not np.allclose(vectors[0], vectors[1], atol=1e-3)
        with pytest.raises(InvalidRequestError, match="no completions"):
            await anext(engine.generate(GenerateRequest(request_id=RequestId("g"), model="tiny", prompt=prompts[0])))
    finally:
        await engine.stop()
