"""The KV of a real model is the same after it was in host memory, and so are the answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("torch")

import torch

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import Delta, GenerateRequest, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.engines.torch.executor import TorchExecutor
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import MIB, TierSettings
from tests.support.patience import PATIENCE_S

BLOCK, BLOCKS = 16, 24
PROMPT = [(7 * i) % 1900 + 10 for i in range(10 * BLOCK + 5)]


@pytest_asyncio.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[StepEngine]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    config = StepEngineConfig("m", str(CHECKPOINT_DIR), BLOCKS, 8, 512, 30.0, PATIENCE_S, tiers=TierSettings(64 * MIB))
    executor = TorchExecutor(str(CHECKPOINT_DIR), device=request.param, dtype="float32", block_size=BLOCK)
    engine = StepEngine(executor, None, config)
    await engine.start(new_worker_id("w"), "")
    yield engine
    await engine.stop()


async def ask(engine: StepEngine, name: str, prompt: list[int]) -> list[Delta]:
    request = GenerateRequest(
        request_id=RequestId(name),
        model="m",
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0, top_logprobs=2),
        stop=StopConditions(max_tokens=12, ignore_eos=True),
    )
    async with asyncio.timeout(PATIENCE_S):
        deltas = [delta async for delta in engine.generate(request)]
        while engine._copies is not None and engine._copies.stack.in_flight:
            await asyncio.sleep(0.001)
    return deltas


async def test_answers_are_equal_after_a_detour_through_host_memory(engine: StepEngine) -> None:
    first = await ask(engine, "first", PROMPT)
    for number in range(6):
        await ask(engine, f"other-{number}", [number + 3, *PROMPT[1:]])
    engine._scheduler.tiers.compute.line.note(1, 1e6)  # type: ignore[union-attr] # so that loading is the faster way
    again = await ask(engine, "again", PROMPT)
    assert again[0].cached_tokens == 10 * BLOCK
    assert sum(use.counts.get("loaded", 0) for use in engine.load().tiers) > 0
    assert [delta.token_ids for delta in again] == [delta.token_ids for delta in first]
    for one, other in zip(first, again, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert other.logprobs[0].logprob == pytest.approx(one.logprobs[0].logprob, abs=1e-3)
