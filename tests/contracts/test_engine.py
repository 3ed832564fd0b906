"""The promises that every engine of ours keeps, alone and as a prefill and a decode half."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvcache.transfer.backend import open_backend
from kvmesh.kvcache.transfer.nixl import why_unavailable
from kvmesh.protocol.errors import EngineError, InvalidRequestError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import (
    Delta,
    EmbedRequest,
    Feature,
    FinishReason,
    GenerateRequest,
    Guide,
    GuideKind,
    SamplingParams,
    StopConditions,
    pack_tokens,
    unpack_tokens,
)
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.mock.executor import MockExecutor, mock_token, mock_vector
from kvmesh.workers.executor import Executor
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from tests.support.patience import PATIENCE_S

BLOCK = 16
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_unavailable()), reason=f"NIXL: {why_unavailable()}"))
numbers = itertools.count()
infos: WeakKeyDictionary[StepEngine, EngineInfo] = WeakKeyDictionary()
Make = Callable[..., "asyncio.Future[StepEngine]"]


def executor(kind: str) -> Executor:
    if kind == "mock":
        return MockExecutor(block_size=BLOCK, speedup=0, loras=["poet"])
    from kvmesh.workers.engines.torch.executor import TorchExecutor

    return TorchExecutor(
        str(CHECKPOINT_DIR), device="cuda" if kind == "torch-cuda" else "cpu", dtype="float32", block_size=BLOCK
    )


@pytest_asyncio.fixture(params=["mock", "torch", pytest.param("torch-cuda", marks=pytest.mark.cuda)])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    engines: list[StepEngine] = []
    on_gpu = request.param == "torch-cuda"
    if on_gpu and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA GPU here")

    async def start(transfer: str = "nixl" if on_gpu else "shm", num_blocks: int = 256, **fields: float) -> StepEngine:
        config = StepEngineConfig(
            model="m",
            model_path=str(CHECKPOINT_DIR),
            num_blocks=num_blocks,
            max_num_seqs=16,
            max_step_tokens=64,
            offer_lease_s=fields.get("offer_lease_s", 30.0),
            pull_timeout_s=PATIENCE_S,
        )
        if on_gpu and transfer == "shm":
            pytest.skip("shm moves CPU memory only")
        engine = StepEngine(executor(request.param), open_backend(transfer), config)
        engines.append(engine)
        infos[engine] = await engine.start(new_worker_id("w"), "127.0.0.1:1")
        return engine

    yield start  # type: ignore[misc]
    for engine in engines:
        await engine.stop()


def prompt_of(length: int, first: int = 100) -> bytes:
    return pack_tokens([(first + 7 * i) % 1900 + 10 for i in range(length)])


def ask(prompt: bytes, max_tokens: int = 12, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"r{next(numbers)}"),
        model="m",
        prompt=prompt,
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


async def run(engine: StepEngine, request: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(PATIENCE_S):
        return [delta async for delta in engine.generate(request)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_an_answer_has_its_tokens_and_a_finish_reason(make: Make) -> None:
    deltas = await run(await make(), ask(prompt_of(40), 12))
    assert len(tokens(deltas)) == 12
    assert [d.finish_reason for d in deltas][-1] is FinishReason.LENGTH
    assert all(d.finish_reason is None for d in deltas[:-1])


async def test_requests_at_once_get_the_answers_they_get_alone(make: Make) -> None:
    engine = await make()
    lengths = [1, 15, 16, 17, 40, 64, 65, 150]
    alone = [tokens(await run(await make(), ask(prompt_of(n, n), cache_salt="a"))) for n in lengths]
    together = await asyncio.gather(*(run(engine, ask(prompt_of(n, n))) for n in lengths * 3))
    assert [tokens(deltas) for deltas in together] == alone * 3
    assert engine.load().used_blocks == 0


async def test_a_prefix_is_computed_once(make: Make) -> None:
    engine = await make()
    first = await run(engine, ask(prompt_of(50)))
    second = await run(engine, ask(prompt_of(50)))
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 48)
    assert tokens(first) == tokens(second)


async def test_a_continued_answer_goes_on_as_it_would_have(make: Make) -> None:
    whole = tokens(await run(await make(), ask(prompt_of(40))))
    rest = await run(await make(), ask(prompt_of(40), generated=tuple(whole[:5])))
    assert tokens(rest) == whole[5:]


@pytest.mark.parametrize("transfer", ["shm", NIXL])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 130])
async def test_prefill_here_and_decode_there_gives_the_answer_of_one(make: Make, transfer: str, length: int) -> None:
    plain = tokens(await run(await make(), ask(prompt_of(length))))
    prefiller, decoder = await make(transfer), await make(transfer)
    request = ask(prompt_of(length), offer_kv=True)
    [first] = await run(prefiller, request)
    assert first.ticket is not None
    assert prefiller.load().offers == 1
    rest = await run(
        decoder, msgspec.structs.replace(request, offer_kv=False, generated=first.token_ids, ticket=first.ticket)
    )
    prefiller.release(first.ticket.offer_id, first.ticket.nonce)
    assert rest[0].pull is not None
    assert (rest[0].pull.error, rest[0].pull.num_blocks) == ("", -(-length // BLOCK))
    assert tokens([first, *rest]) == plain
    assert (prefiller.load().used_blocks, decoder.load().used_blocks, prefiller.load().offers) == (0, 0, 0)


async def test_blocks_that_the_decoder_has_are_not_pulled_again(make: Make) -> None:
    prefiller, decoder = await make(), await make()
    await run(decoder, ask(prompt_of(64)))
    request = ask(prompt_of(70), offer_kv=True)
    [first] = await run(prefiller, request)
    rest = await run(
        decoder, msgspec.structs.replace(request, offer_kv=False, generated=first.token_ids, ticket=first.ticket)
    )
    assert rest[0].pull is not None
    assert rest[0].pull.num_blocks == 1
    assert tokens([first, *rest]) == tokens(await run(await make(), ask(prompt_of(70))))


async def test_an_answer_of_one_token_needs_no_decoder(make: Make) -> None:
    engine = await make()
    [only] = await run(engine, ask(prompt_of(20), 1, offer_kv=True))
    assert (only.ticket, only.finish_reason) == (None, FinishReason.LENGTH)
    assert engine.load().used_blocks == 0


async def test_an_offer_that_ended_is_computed_by_the_decoder(make: Make) -> None:
    prefiller, decoder = await make(), await make()
    request = ask(prompt_of(50), offer_kv=True)
    [first] = await run(prefiller, request)
    assert first.ticket is not None
    prefiller.release(first.ticket.offer_id, first.ticket.nonce)
    prefiller.release(first.ticket.offer_id, first.ticket.nonce)
    rest = await run(
        decoder, msgspec.structs.replace(request, offer_kv=False, generated=first.token_ids, ticket=first.ticket)
    )
    assert rest[0].pull is not None
    assert "ended before it was fetched" in rest[0].pull.error
    assert tokens([first, *rest]) == tokens(await run(await make(), ask(prompt_of(50))))


async def test_an_offer_that_nobody_takes_is_unpinned_by_its_lease(make: Make) -> None:
    engine = await make(offer_lease_s=0.3)
    await run(engine, ask(prompt_of(50), offer_kv=True))
    assert engine.load().offers == 1
    async with asyncio.timeout(PATIENCE_S):
        while engine.load().offers:
            await asyncio.sleep(0.01)
    assert engine.load().used_blocks == 0


async def test_leaving_an_answer_frees_all_it_held(make: Make) -> None:
    engine = await make()
    async with aclosing(engine.generate(ask(prompt_of(50), 500))) as deltas:
        await anext(deltas)
        assert engine.load().used_blocks > 0
    assert (engine.load().used_blocks, engine.load().running) == (0, 0)
    assert len(tokens(await run(engine, ask(prompt_of(50))))) == 12


async def test_a_ticket_that_was_not_delivered_is_taken_back(make: Make) -> None:
    engine = await make()
    async with aclosing(engine.generate(ask(prompt_of(50), offer_kv=True))) as deltas:
        assert (await anext(deltas)).ticket is not None
        assert engine.load().offers == 1
    assert (engine.load().offers, engine.load().used_blocks) == (0, 0)


async def test_a_slow_consumer_gets_steps_merged_and_loses_nothing(make: Make) -> None:
    engine = await make()
    expected = tokens(await run(engine, ask(prompt_of(40), 30)))
    async with aclosing(engine.generate(ask(prompt_of(40), 30))) as deltas:
        got = [await anext(deltas)]
        await run(engine, ask(prompt_of(40), 60))  # time passes: the other answer is longer
        got += [delta async for delta in deltas]
    assert tokens(got) == expected
    assert len(got) <= 3


async def test_events_tell_what_the_pool_holds_through_evictions(make: Make) -> None:
    engine = await make(num_blocks=16)
    followed: list[KvEvent] = []
    engine.on_kv_events(followed.extend)
    for i in range(6):
        await run(engine, ask(prompt_of(100, 31 * i)))
    digest = engine.kv_digest()
    snapshot = engine.kv_snapshot()
    assert digest == Digest(len(names(followed)), sum(map(digest_term, names(followed))) % 2**64)
    assert any(isinstance(event, Removed) for event in followed)
    assert names(followed) == names(snapshot)
    assert names(snapshot)


def names(events: list[KvEvent]) -> set[int]:
    held: set[int] = set()
    for event in events:
        match event:
            case Stored():
                held |= set(event.hashes)
            case Removed():
                held -= set(event.hashes)
            case Cleared():
                held.clear()
    return held


async def test_what_it_cannot_do_is_refused_and_harms_nobody(make: Make) -> None:
    engine = await make(num_blocks=16)
    with pytest.raises(InvalidRequestError, match="empty"):
        await run(engine, ask(b""))
    with pytest.raises(InvalidRequestError, match="--num-blocks"):
        await run(engine, ask(prompt_of(200), 100))
    assert len(tokens(await run(engine, ask(prompt_of(20))))) == 12


# --- features ---------------------------------------------------------------------------------------------------------

SCHEMA = Guide(
    kind=GuideKind.JSON_SCHEMA,
    value=json.dumps(
        {
            "type": "object",
            "properties": {"who": {"enum": ["a fox", "a bear"]}, "age": {"type": "integer", "minimum": 10}},
            "required": ["who", "age"],
            "additionalProperties": False,
        }
    ),
)


async def able(make: Make, feature: Feature, **settings: object) -> StepEngine:
    engine = await make(**settings)
    if feature not in infos[engine].features:
        pytest.skip(f"this engine has no {feature}")
    return engine


def ask_guided(guide: Guide = SCHEMA, seed: int = 1, **stop: object) -> GenerateRequest:
    values = {"max_tokens": 200} | stop
    return GenerateRequest(
        request_id=RequestId(f"r{next(numbers)}"),
        model="m",
        prompt=prompt_of(40),
        sampling=SamplingParams(temperature=1.5, seed=seed, top_logprobs=0),
        stop=StopConditions(**values),  # type: ignore[arg-type]
        guide=guide,
    )


UNABLE = {
    Feature.LOGPROBS: {"sampling": SamplingParams(top_logprobs=1)},
    Feature.PROMPT_LOGPROBS: {"sampling": SamplingParams(top_logprobs=1, prompt_logprobs=1)},
    Feature.LOGIT_BIAS: {"sampling": SamplingParams(logit_bias=((5, 1.0),))},
    Feature.ALLOWED_TOKENS: {"sampling": SamplingParams(allowed_token_ids=(5,))},
    Feature.GUIDED: {"guide": Guide(kind=GuideKind.JSON)},
}


@pytest.mark.parametrize("feature", list(UNABLE))
async def test_an_engine_has_its_features_and_refuses_others(make: Make, feature: Feature) -> None:
    engine = await make()
    request = msgspec.structs.replace(ask(prompt_of(20)), **UNABLE[feature])
    if feature in infos[engine].features:
        assert tokens(await run(engine, request))
        return
    with pytest.raises(InvalidRequestError, match="cannot honour") as refused:
        await run(engine, request)
    assert refused.value.param in ("logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "guide")
    assert engine.load().waiting == 0


async def test_only_allowed_tokens_come_in_answers_of_any_temperature(make: Make) -> None:
    engine = await able(make, Feature.ALLOWED_TOKENS)
    for temperature in (0.0, 3.0):
        sampling = SamplingParams(temperature=temperature, seed=3, allowed_token_ids=(40, 50, 60))
        said = tokens(await run(engine, msgspec.structs.replace(ask(prompt_of(20), 20), sampling=sampling)))
        assert len(said) == 20
        assert set(said) <= {40, 50, 60}


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"logit_bias": ((2048, 1.0),)}, "names token 2048, the model's vocabulary has 2048"),
        ({"logit_bias": ((-1, 1.0),)}, "names token -1"),
        ({"logit_bias": ((1, float("nan")),)}, "not a finite number"),
        ({"allowed_token_ids": (99_999,)}, "allowed_token_ids names token 99999"),
        ({"allowed_token_ids": (1,) * 10_000}, "names 10000 tokens, at most 8192"),
    ],
)
async def test_rules_about_tokens_that_are_not_there_are_refused(make: Make, rules: dict, says: str) -> None:
    engine = await able(make, Feature.LOGIT_BIAS)
    with pytest.raises(InvalidRequestError, match=says):
        await run(engine, msgspec.structs.replace(ask(prompt_of(20)), sampling=SamplingParams(**rules)))


@pytest.mark.parametrize("seed", range(4))
async def test_a_guided_answer_ends_by_itself_and_fits(make: Make, seed: int) -> None:
    engine = await able(make, Feature.GUIDED)
    deltas = await run(engine, ask_guided(seed=seed))
    said = json.loads(text_of(tokens(deltas)))
    assert said["who"] in ("a fox", "a bear")
    assert said["age"] >= 10
    assert (deltas[-1].finish_reason, deltas[-1].stop_token) == (FinishReason.STOP, None)
    assert engine.load().used_blocks == 0


@pytest.mark.parametrize("seed", range(4))
async def test_a_guided_answer_continues_wherever_it_is_cut(make: Make, seed: int) -> None:
    engine = await able(make, Feature.GUIDED)
    whole = tokens(await run(engine, ask_guided(seed=seed)))
    for cut in sorted({1, 2, 3, len(whole) // 2, len(whole) - 1}):
        request = msgspec.structs.replace(ask_guided(seed=seed), generated=tuple(whole[:cut]))
        assert tokens(await run(engine, request)) == whole[cut:]


@pytest.mark.parametrize("seed", range(4))
async def test_a_guided_answer_is_the_same_with_prefill_elsewhere(make: Make, seed: int) -> None:
    prefiller, decoder = await able(make, Feature.GUIDED), await make()
    whole = tokens(await run(decoder, ask_guided(seed=seed)))
    request = msgspec.structs.replace(ask_guided(seed=seed), offer_kv=True)
    [first] = await run(prefiller, request)
    rest = await run(
        decoder, msgspec.structs.replace(request, offer_kv=False, generated=first.token_ids, ticket=first.ticket)
    )
    assert tokens([first, *rest]) == whole


async def test_an_answer_that_its_first_token_completes_needs_no_decoder(make: Make) -> None:
    engine = await able(make, Feature.GUIDED)
    guide = Guide(kind=GuideKind.CHOICE, value='["a"]')
    [only] = await run(engine, msgspec.structs.replace(ask_guided(guide), offer_kv=True))
    assert (only.ticket, only.finish_reason, text_of(only.token_ids)) == (None, FinishReason.STOP, "a")
    assert engine.load().used_blocks == 0


async def test_the_guide_wins_over_min_tokens_and_ignore_eos(make: Make) -> None:
    engine = await able(make, Feature.GUIDED)
    choice = Guide(kind=GuideKind.CHOICE, value='["yes", "no"]')
    deltas = await run(engine, ask_guided(choice, min_tokens=50, ignore_eos=True))
    assert text_of(tokens(deltas)) in ("yes", "no")
    digits = await run(engine, ask_guided(Guide(kind=GuideKind.REGEX, value="[0-9]+"), min_tokens=30, ignore_eos=True))
    assert len(tokens(digits)) >= 30
    assert text_of(tokens(digits)).isdecimal()


async def test_an_uncompilable_guide_is_refused_and_harms_nobody(make: Make) -> None:
    engine = await able(make, Feature.GUIDED)
    with pytest.raises(InvalidRequestError, match="regular expression cannot be followed"):
        await run(engine, ask_guided(Guide(kind=GuideKind.REGEX, value="(")))
    assert (engine.load().waiting, engine.load().running) == (0, 0)
    assert len(tokens(await run(engine, ask(prompt_of(20))))) == 12


async def test_an_answer_that_fails_its_guide_midway_fails_alone(make: Make) -> None:
    engine = await able(make, Feature.GUIDED)
    patterns = " & ".join(f"/[yz]{{8}}(y|x.*a.{{{i}}}b.*)/" for i in range(1, 14))  # costly behind eight letters
    hard = Guide(kind=GuideKind.GRAMMAR, value=f"start: A\nA: {patterns}")
    other = asyncio.create_task(run(engine, ask(prompt_of(30), 300)))
    with pytest.raises(InvalidRequestError, match="cannot follow its guide any further"):
        await run(engine, ask_guided(hard))
    assert len(tokens(await other)) == 300
    assert engine.load().used_blocks == 0


def text_of(token_ids: Sequence[int]) -> str:
    return Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")).decode(list(token_ids))


# --- embeddings -------------------------------------------------------------------------------------------------------


def text(length: int, first: int = 100) -> EmbedRequest:
    return EmbedRequest(request_id=RequestId(f"e{next(numbers)}"), model="m", prompt=prompt_of(length, first))


async def vector_of(engine: StepEngine, request: EmbedRequest) -> np.ndarray:
    async with asyncio.timeout(PATIENCE_S):
        return np.frombuffer((await engine.embed(request)).vector, "<f4")


async def test_a_vector_of_length_1_belongs_to_its_text(make: Make) -> None:
    engine = await able(make, Feature.EMBEDDINGS)
    one, again, other = [await vector_of(engine, text(40, first)) for first in (100, 100, 500)]
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    assert one == pytest.approx(again, abs=1e-5)
    assert one != pytest.approx(other, abs=1e-2)


async def test_a_vector_does_not_depend_on_chunks_or_others(make: Make) -> None:
    engine, alone = await able(make, Feature.EMBEDDINGS), await make()
    lengths = [1, 16, 17, 63, 64, 65, 200]
    expected = [await vector_of(alone, text(n)) for n in lengths]
    answer = asyncio.create_task(run(engine, ask(prompt_of(50), 40)))
    vectors = await asyncio.gather(*(vector_of(engine, text(n)) for n in lengths))
    for vector, right in zip(vectors, expected, strict=True):
        assert vector == pytest.approx(right, abs=1e-4)
    assert tokens(await answer) == tokens(await run(alone, ask(prompt_of(50), 40)))
    assert engine.load().used_blocks == 0


async def test_a_text_leaves_the_cache_that_its_prompt_would(make: Make) -> None:
    embedding, answering = await able(make, Feature.EMBEDDINGS), await make()
    await vector_of(embedding, text(70))
    await run(answering, ask(prompt_of(70), 1))
    assert embedding.kv_digest() == answering.kv_digest()


async def test_a_text_that_is_too_long_or_empty_is_refused(make: Make) -> None:
    engine = await able(make, Feature.EMBEDDINGS, num_blocks=8)
    for length, says in ((0, "has 0 tokens"), (200, "--num-blocks"), (40_000, "has 40000 tokens")):
        with pytest.raises(InvalidRequestError, match=says):
            await vector_of(engine, text(length))
    assert len(await vector_of(engine, text(100)))


async def test_giving_up_on_a_vector_frees_all_it_held(make: Make) -> None:
    engine = await able(make, Feature.EMBEDDINGS)
    asked = asyncio.create_task(vector_of(engine, text(1000)))
    async with asyncio.timeout(PATIENCE_S):
        while not engine.load().running:
            await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    assert (engine.load().used_blocks, engine.load().running) == (0, 0)
    assert len(await vector_of(engine, text(100)))


async def test_an_engine_that_stops_fails_the_vectors_it_owes(make: Make) -> None:
    engine = await able(make, Feature.EMBEDDINGS)
    asked = asyncio.create_task(vector_of(engine, text(1000)))
    async with asyncio.timeout(PATIENCE_S):
        while not engine.load().running:
            await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineError, match="stopping"):
        await asked


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_an_adapter_that_is_not_there_is_refused_by_name(make: Make) -> None:
    engine = await make()
    with pytest.raises(InvalidRequestError, match="no adapter 'painter' on this worker; it has: "):
        await run(engine, ask(prompt_of(20), lora="painter"))
    with pytest.raises(InvalidRequestError, match="no adapter 'painter'"):
        await vector_of(engine, msgspec.structs.replace(text(20), lora="painter"))


async def test_the_mocks_adapters_answer_differently_and_share_no_cache(make: Make) -> None:
    engine = await make()
    if "poet" not in infos[engine].loras:
        pytest.skip("this engine has no adapters")
    plain = await run(engine, ask(prompt_of(40)))
    poetic = await run(engine, ask(prompt_of(40), lora="poet"))
    prompt = unpack_tokens(prompt_of(40))
    assert tokens(plain) == [mock_token(prompt, i, 2048) for i in range(12)]
    assert tokens(poetic) == [mock_token(prompt, i, 2048, "poet") for i in range(12)]
    assert tokens(plain) != tokens(poetic)
    assert poetic[0].cached_tokens == 0
    vector = await engine.embed(msgspec.structs.replace(text(40), lora="poet"))
    assert vector.vector == mock_vector(prompt, "poet") != mock_vector(prompt)


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_an_engine_that_stops_says_so_to_whom_it_served(make: Make) -> None:
    engine = await make()
    answer = asyncio.create_task(run(engine, ask(prompt_of(50), 2000)))
    async with asyncio.timeout(PATIENCE_S):
        while not engine.load().running:
            await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineError, match="stopping"):
        await answer
    with pytest.raises(EngineError):
        engine.check_health()


@pytest.mark.parametrize("kind", ["mock", "torch"])
@pytest.mark.parametrize("turns", [0, 1, 5, 200])
async def test_an_engine_whose_start_is_given_up_can_be_stopped(kind: str, turns: int) -> None:
    config = StepEngineConfig("m", str(CHECKPOINT_DIR), 16, 4, 64, 30.0, 5.0)
    engine = StepEngine(executor(kind), open_backend("shm"), config)
    starting = asyncio.create_task(engine.start(new_worker_id("w"), "127.0.0.1:1"))
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    await engine.stop()
    with pytest.raises(EngineError):
        engine.check_health()


async def test_a_failed_step_fails_the_engine_and_not_silently() -> None:
    class Broken(MockExecutor):
        def execute(self, rows: list) -> list:
            if rows[0].request_id != "warm-up":
                raise RuntimeError("CUDA error: device lost")
            return super().execute(rows)

    config = StepEngineConfig("m", "", 16, 4, 64, 30.0, 5.0)
    engine = StepEngine(Broken(block_size=BLOCK, speedup=0), None, config)
    await engine.start(new_worker_id("w"), "")
    with pytest.raises(EngineError, match="device lost"):
        await run(engine, ask(prompt_of(20)))
    with pytest.raises(EngineError, match="device lost"):
        engine.check_health()
    await engine.stop()
