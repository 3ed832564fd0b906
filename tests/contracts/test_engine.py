"""What every engine promises, alone and as a prefill and a decode half."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import msgspec
import pytest
import pytest_asyncio

from kvcache.transfer.backend import open_backend
from kvcache.transfer.nixl import why_unavailable
from kvmesh.tiny_model import CHECKPOINT_DIR
from protocol.errors import EngineError, InvalidRequestError
from protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from protocol.hashing import digest_term
from protocol.ids import RequestId, new_worker_id
from protocol.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    pack_tokens,
)
from workers.executor import Executor
from workers.mock_engine.executor import MockExecutor
from workers.step_engine import StepEngine, StepEngineConfig

BLOCK = 16
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_unavailable()), reason=f"NIXL: {why_unavailable()}"))
numbers = itertools.count()
Make = Callable[..., "asyncio.Future[StepEngine]"]


def executor(kind: str) -> Executor:
    if kind == "mock":
        return MockExecutor(block_size=BLOCK, speedup=0)
    from workers.torch_engine.executor import TorchExecutor

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
            pull_timeout_s=5.0,
        )
        if on_gpu and transfer == "shm":
            pytest.skip("shm moves CPU memory only")
        engine = StepEngine(executor(request.param), open_backend(transfer), config)
        engines.append(engine)
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
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
    async with asyncio.timeout(20):
        return [delta async for delta in engine.generate(request)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_an_answer_has_the_tokens_asked_for_and_ends_with_a_reason(make: Make) -> None:
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


async def test_an_answer_that_ends_with_its_first_token_needs_no_decoder(make: Make) -> None:
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
    engine = await make(offer_lease_s=0.05)
    await run(engine, ask(prompt_of(50), offer_kv=True))
    assert engine.load().offers == 1
    async with asyncio.timeout(5):
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


async def test_an_engine_that_stops_says_so_to_whom_it_served(make: Make) -> None:
    engine = await make()
    answer = asyncio.create_task(run(engine, ask(prompt_of(50), 2000)))
    async with asyncio.timeout(5):
        while not engine.load().running:
            await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineError, match="stopping"):
        await answer
    with pytest.raises(EngineError):
        engine.check_health()


async def test_a_failed_step_fails_the_engine_and_not_silently() -> None:
    class Broken(MockExecutor):
        def execute(self, rows: list) -> list:
            if rows[0].request_id != "warm-up":
                raise RuntimeError("device lost")
            return super().execute(rows)

    config = StepEngineConfig("m", "", 16, 4, 64, 30.0, 5.0)
    engine = StepEngine(Broken(block_size=BLOCK, speedup=0), None, config)
    await engine.start(new_worker_id("w"), "")
    with pytest.raises(EngineError, match="device lost"):
        await run(engine, ask(prompt_of(20)))
    with pytest.raises(EngineError, match="device lost"):
        engine.check_health()
    await engine.stop()
