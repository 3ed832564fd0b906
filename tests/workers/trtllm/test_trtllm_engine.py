"""TensorRT-LLM's own behaviour: polls, variants, lost events, ids that are unique among prefills."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
import pytest_asyncio

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.events import Cleared, KvEvent
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import Delta, GenerateRequest, Role, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.engines.trtllm.engine import TrtllmEngine
from tests.support.fake_trtllm import FakeTrtllm
from tests.support.patience import PATIENCE_S

Make = Callable[..., Awaitable[TrtllmEngine]]


@pytest.fixture
def fake() -> FakeTrtllm:
    return FakeTrtllm()


@pytest_asyncio.fixture
async def make(fake: FakeTrtllm) -> AsyncIterator[Make]:
    engines: list[TrtllmEngine] = []

    async def start(flags: str = "", **fields: object) -> TrtllmEngine:
        config = WorkerConfig(model_path="/models/toy", engine_args=flags, **fields)  # type: ignore[arg-type]
        engines.append(TrtllmEngine(config, "m", fake.package))
        await engines[-1].start(new_worker_id("w"), "127.0.0.1:1")
        return engines[-1]

    yield start
    for engine in engines:
        await engine.stop()


async def run(engine: TrtllmEngine, length: int = 40, **fields: object) -> list[Delta]:
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=pack_tokens(range(10, 10 + length)),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=4, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )
    async with asyncio.timeout(PATIENCE_S), aclosing(engine.generate(request)) as deltas:
        return [delta async for delta in deltas]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_variant_starts_without_arguments_it_does_not_know(
    make: Make, fake: FakeTrtllm, caplog: pytest.LogCaptureFixture
) -> None:
    await make("--backend autodeploy --world-size 2 --scheduler-config.policy x --guided-decoding-backend xgrammar")
    assert fake.llms[0].kwargs["world_size"] == 2
    assert "scheduler_config" not in fake.llms[0].kwargs
    assert "does not know guided_decoding_backend, scheduler_config" in caplog.text


async def test_events_that_were_lost_leave_nothing_known(make: Make, fake: FakeTrtllm) -> None:
    engine = await make()
    told: list[KvEvent] = []
    engine.on_kv_events(told.extend)
    await run(engine)
    await until(lambda: engine.kv_digest().blocks > 0)
    before = engine.kv_digest()
    fake.llms[0].events.append({"event_id": 1000, "data": {"type": "removed", "block_hashes": []}})
    await until(lambda: engine.kv_digest().blocks == 0)
    assert before.blocks > 0
    assert isinstance(told[-1], Cleared)


async def test_a_poll_that_fails_is_tried_again(make: Make, fake: FakeTrtllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.engines.trtllm.engine.POLL_RETRY_S", 0.0)
    engine = await make()
    fake.llms[0].events.append({"data": 7})
    await run(engine)
    await until(lambda: engine.kv_digest().blocks > 0)


async def test_load_is_what_the_statistics_tell(make: Make, fake: FakeTrtllm) -> None:
    engine = await make()
    await until(lambda: bool(engine._stats))
    assert engine.load().total_blocks == fake.num_blocks
    assert (engine.load().running, engine.load().used_blocks) == (0, 0)


async def test_prefill_workers_name_their_requests_apart(make: Make, fake: FakeTrtllm) -> None:
    for engine in (await make(role=Role.PREFILL), await make(role=Role.PREFILL)):
        for _ in range(3):
            [delta] = await run(engine, offer_kv=True)
            assert delta.ticket is not None
    ids = [seen.disaggregated.disagg_request_id for llm in fake.llms for seen in llm.seen if seen.disaggregated]
    assert len(set(ids)) == 6


async def test_a_prefill_is_whole_and_a_decode_gets_the_prompt(make: Make, fake: FakeTrtllm) -> None:
    prefiller, decoder = await make(role=Role.PREFILL), await make(role=Role.DECODE)
    [first] = await run(prefiller, offer_kv=True)
    await run(decoder, generated=first.token_ids, ticket=first.ticket)
    [prefill], [decode] = fake.llms[0].seen, fake.llms[1].seen
    assert (prefill.streaming, decode.streaming) == (False, True)
    assert prefill.tokens == decode.tokens == list(range(10, 50))
    assert decode.disaggregated is not None
    assert decode.disaggregated.first_gen_tokens == list(first.token_ids)


async def test_an_argument_that_it_refuses_is_a_bad_setting(make: Make, fake: FakeTrtllm) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("max_batch_size must be positive")

    fake._launch = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="must be positive"):
        await make("--max-batch-size 0")


async def test_without_the_package_it_says_what_to_install() -> None:
    engine = open_engine(WorkerConfig(engine="trtllm", model_path="/models/toy"))
    with pytest.raises(ConfigError, match="needs the tensorrt_llm package"):
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
    await engine.stop()
