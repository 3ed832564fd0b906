"""Logprobs of a prompt's tokens: those of transformers, however the prompt is cut, cached, preempted or handed over."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvcache.transfer.backend import open_backend
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import (
    MAX_PROMPT_LOGPROBS,
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    TokenLogprob,
    pack_tokens,
)
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.torch.executor import TorchExecutor
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.asking import prompt_tokens
from tests.support.patience import PATIENCE_S

BLOCK = 16
TOP = 3
CLOSE = 1e-3
numbers = itertools.count()
Start = Callable[..., Awaitable[StepEngine]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    engines: list[StepEngine] = []

    async def start(kind: str = "torch", max_step_tokens: int = 512, num_blocks: int = 256) -> StepEngine:
        config = StepEngineConfig(
            model="m",
            model_path=str(CHECKPOINT_DIR),
            num_blocks=num_blocks,
            max_num_seqs=16,
            max_step_tokens=max_step_tokens,
            offer_lease_s=30.0,
            pull_timeout_s=PATIENCE_S,
        )
        executor = (
            MockExecutor(block_size=BLOCK, speedup=0)
            if kind == "mock"
            else TorchExecutor(str(CHECKPOINT_DIR), device="cpu", dtype="float32", block_size=BLOCK)
        )
        engine = StepEngine(executor, open_backend("shm"), config)
        engines.append(engine)
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
        return engine

    yield start
    for engine in engines:
        await engine.stop()


def scoring(prompt: Sequence[int], max_tokens: int = 1, top: int = TOP, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"r{next(numbers)}"),
        model="m",
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0, top_logprobs=top, prompt_logprobs=top),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


async def run(engine: StepEngine, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(PATIENCE_S):
        return [delta async for delta in engine.generate(request)]


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def scores_of(deltas: Sequence[Delta]) -> list[TokenLogprob]:
    """All logprobs of the prompt: of each delta, those beyond the ones of its tokens."""
    return [one for d in deltas for one in (d.logprobs or ())[: len(d.logprobs or ()) - len(d.token_ids)]]


@cache
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)


def expected(prompt: Sequence[int]) -> Any:
    """The logprobs after each position, by transformers: [len(prompt), vocab]."""
    with torch.inference_mode():
        return reference()(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)


def check(scores: Sequence[TokenLogprob], prompt: Sequence[int]) -> None:
    assert [one.token_id for one in scores] == list(prompt[1:])
    logprobs = expected(prompt)[:-1]
    for n, one in enumerate(scores):
        assert one.logprob == pytest.approx(logprobs[n, one.token_id].item(), abs=CLOSE)
        assert len(one.top) == TOP
        assert [value for _, value in one.top] == pytest.approx(logprobs[n].topk(TOP).values.tolist(), abs=CLOSE)


@pytest.mark.parametrize("max_step_tokens", [7, 64, 512])
async def test_scores_are_those_of_transformers_for_any_chunk_size(start: Start, max_step_tokens: int) -> None:
    engine = await start(max_step_tokens=max_step_tokens)
    for length in (1, 2, 15, 16, 17, 130):
        prompt = prompt_tokens(length, length)
        deltas = await run(engine, scoring(prompt, 3))
        check(scores_of(deltas), prompt)
        assert len(tokens_of(deltas)) == 3


async def test_a_cached_prompt_is_computed_again_for_its_scores(start: Start) -> None:
    engine, prompt = await start(max_step_tokens=64), prompt_tokens(100)
    plain = GenerateRequest(request_id=RequestId("plain"), model="m", prompt=pack_tokens(prompt))
    await run(engine, plain)
    cached = engine.load().cached_blocks
    for _ in range(2):
        deltas = await run(engine, scoring(prompt))
        check(scores_of(deltas), prompt)
        assert [d.cached_tokens for d in deltas if d.token_ids] == [0]
    assert (engine.load().cached_blocks, engine.load().used_blocks) == (cached, 0)


async def test_eight_requests_at_once_have_the_scores_of_each(start: Start) -> None:
    engine = await start(max_step_tokens=64)
    prompts = [prompt_tokens(20 + 9 * n, 11 + n % 3) for n in range(8)]
    answers = await asyncio.gather(*(run(engine, scoring(prompt, 4)) for prompt in prompts))
    for prompt, deltas in zip(prompts, answers, strict=True):
        check(scores_of(deltas), prompt)


async def test_requests_without_scores_get_none_beside_those_with(start: Start) -> None:
    engine, prompt = await start(), prompt_tokens(60)
    plain = GenerateRequest(
        request_id=RequestId("plain"), model="m", prompt=pack_tokens(prompt), sampling=SamplingParams(temperature=0)
    )
    with_scores, without = await asyncio.gather(run(engine, scoring(prompt, 16)), run(engine, plain))
    check(scores_of(with_scores), prompt)
    assert all(delta.logprobs is None for delta in without)
    assert tokens_of(without) == tokens_of(with_scores)[: len(tokens_of(without))]


async def test_a_preempted_prompt_continues_its_scores(start: Start) -> None:
    engine = await start(max_step_tokens=24, num_blocks=12)
    prompts = [prompt_tokens(80, 11 + n) for n in range(4)]
    answers = await asyncio.gather(*(run(engine, scoring(prompt, 30)) for prompt in prompts))
    assert engine._scheduler.num_preempted, "the cache is too small for all"
    for prompt, deltas in zip(prompts, answers, strict=True):
        check(scores_of(deltas), prompt)


async def test_a_prefill_leg_gives_the_scores_before_its_ticket(start: Start) -> None:
    prefiller, decoder = await start(max_step_tokens=64), await start()
    prompt, request = prompt_tokens(150), scoring(prompt_tokens(150), 8)
    *scores, last = await run(prefiller, scoring(prompt, 8, offer_kv=True))
    assert last.ticket is not None
    assert len(last.token_ids) == 1
    check(scores_of([*scores, last]), prompt)
    alone = await run(decoder, request)
    assert tokens_of(alone)[:1] == list(last.token_ids)
    prefiller.release(last.ticket.offer_id, last.ticket.nonce)


async def test_a_slow_caller_gets_all_scores_in_order(start: Start) -> None:
    engine, prompt = await start(max_step_tokens=16), prompt_tokens(100)
    answer = engine.generate(scoring(prompt, 8))
    deltas = [await anext(answer)]
    async with asyncio.timeout(PATIENCE_S):
        while engine.load().running:
            await asyncio.sleep(0.01)
    deltas += [delta async for delta in answer]
    assert len(deltas) < 8, "deltas were merged"
    check(scores_of(deltas), prompt)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert len(tokens_of(deltas)) == 8


async def test_the_mock_engine_is_certain_of_every_token(start: Start) -> None:
    engine, prompt = await start("mock"), prompt_tokens(50)
    scores = scores_of(await run(engine, scoring(prompt)))
    assert scores == [TokenLogprob(token, 0.0, ((token, 0.0),)) for token in prompt[1:]]


async def test_a_prompt_with_too_many_scores_is_refused(start: Start) -> None:
    engine = await start("mock", num_blocks=4096)
    with pytest.raises(InvalidRequestError, match="logprobs of") as refused:
        await run(engine, scoring(prompt_tokens(20_000), top=MAX_PROMPT_LOGPROBS // 20_000))
    assert refused.value.param == "logprobs"
    assert engine.load().waiting == 0


async def test_an_aborted_request_frees_what_it_held(start: Start) -> None:
    engine = await start(max_step_tokens=16)
    answer = engine.generate(scoring(prompt_tokens(200)))
    await anext(answer)
    await answer.aclose()
    assert engine.load().used_blocks == 0
