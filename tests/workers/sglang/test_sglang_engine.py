"""SGLang's own behaviour: warm-up, signals, ranks, metrics, offers that are running prefills."""

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError, WireError
from kvmesh.protocol.events import Stored
from kvmesh.protocol.hashing import hash_seed, sequence_hashes
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.kv_content import PENDING
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    ControlReply,
    Feature,
    GenerateRequest,
    Role,
    SamplingParams,
    StopConditions,
    pack_tokens,
)
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import Controllable
from kvmesh.workers.engines.external.ports import free_ports
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.engines.sglang.engine import SglangEngine
from kvmesh.workers.engines.sglang.offers import PrefillOffers
from kvmesh.workers.engines.sglang.runtime import FAKE_BOOTSTRAP_HOST, Metrics, read_metrics, signals_kept
from tests.support.fake_sglang import FakeSglang
from tests.support.patience import PATIENCE_S

Make = Callable[..., Awaitable[SglangEngine]]


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang()


@pytest_asyncio.fixture
async def make(fake: FakeSglang) -> AsyncIterator[Make]:
    engines: list[SglangEngine] = []

    async def start(flags: str = "", **fields: object) -> SglangEngine:
        config = WorkerConfig(model_path="/models/toy", engine_args=flags, **fields)  # type: ignore[arg-type]
        engines.append(SglangEngine(config, "m", fake.package))
        await engines[-1].start(new_worker_id("w"), "127.0.0.1:1")
        return engines[-1]

    yield start
    for engine in engines:
        await engine.stop()


def ask(length: int = 40, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=pack_tokens(range(10, 10 + length)),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=4, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_prefill_worker_is_warm_before_it_is_known(make: Make, fake: FakeSglang) -> None:
    await make(role=Role.PREFILL)
    assert not [room for room in fake.rooms if room[0] == FAKE_BOOTSTRAP_HOST], "nobody is to fetch it"
    assert fake.engines[0].warm_ups == 1


async def test_a_decode_worker_has_nothing_to_warm_up_with(make: Make, fake: FakeSglang) -> None:
    await make(role=Role.DECODE)
    assert fake.engines[0].warm_ups == 0


async def test_sigterm_stays_the_workers(make: Make) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        await make()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await stopped.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_a_failure_that_sglang_signals_ends_no_worker(
    make: Make, fake: FakeSglang, caplog: pytest.LogCaptureFixture
) -> None:
    """Left to itself, SGLang kills the process that it runs in."""
    engine = await make()
    signal.raise_signal(signal.SIGQUIT)
    await until(lambda: "one of its processes failed" in caplog.text)
    engine.check_health()
    fake.engines[0].child_pids = [2**22 + 1]
    with pytest.raises(EngineError, match="has ended"):
        engine.check_health()


async def test_a_prefill_runs_after_its_ticket_until_released(make: Make, fake: FakeSglang) -> None:
    engine = await make(role=Role.PREFILL)
    fake.engines[0].gate.clear()
    async with aclosing(engine.generate(ask(offer_kv=True))) as deltas:
        [delta] = [delta async for delta in deltas]
    assert delta.ticket is not None
    assert engine.load().offers == 1
    await until(lambda: len(fake.engines[0].requests.running) == 1)
    engine.release(delta.ticket.offer_id, delta.ticket.nonce + 1)
    await asyncio.sleep(0)
    assert engine.load().offers == 1
    engine.release(delta.ticket.offer_id, delta.ticket.nonce)
    await until(lambda: engine.load().offers == 0 and not fake.engines[0].requests.running)
    assert fake.engines[0].requests.aborted


async def test_an_offer_that_nobody_takes_ends_with_its_lease() -> None:
    offers = PrefillOffers(lease_s=0.01)
    offers.open(asyncio.Event().wait)  # type: ignore[arg-type]
    assert len(offers) == 1
    await until(lambda: len(offers) == 0)


async def test_a_prefill_that_fails_ends_its_offer() -> None:
    async def fail() -> None:
        raise RuntimeError("out of memory")

    offers = PrefillOffers()
    offers.open(fail)
    await until(lambda: len(offers) == 0)


async def test_the_schedulers_load_counts_while_anything_runs(make: Make, fake: FakeSglang) -> None:
    """A scheduler that comes to rest tells nothing: what it told while it computed is no longer so."""
    engine = await make(block_size=16)
    await take_all(engine, ask())  # which is told of while it runs
    fake.engines[0].gate.clear()
    runs = asyncio.create_task(take_all(engine, ask()))
    await until(lambda: engine.load().running == engine.load().used_blocks == 1)
    assert engine.load().total_blocks == fake.num_blocks
    fake.engines[0].gate.set()
    await runs
    assert (engine.load().running, engine.load().waiting, engine.load().used_blocks) == (0, 0, 0)


async def take_all(engine: SglangEngine, request: GenerateRequest) -> None:
    async with aclosing(engine.generate(request)) as deltas:
        async for _ in deltas:
            pass


def test_sglangs_metrics_are_read_and_pickles_are_not() -> None:
    told = ["KvMetrics", 3, 8, 640, 4096, 2, 0.15, 0.5, 1]
    assert read_metrics(msgspec.msgpack.encode(told)) == Metrics(3, 8, 640, 4096, 2, 0.15, 0.5, 1)
    for bad in (pickle.dumps(told), msgspec.msgpack.encode(["Other", 1]), b"", b"\xc1"):
        with pytest.raises(WireError, match="SGLANG_USE_PICKLE_IPC"):
            read_metrics(bad)


async def test_structured_output_needs_a_grammar_backend(make: Make, fake: FakeSglang) -> None:
    def features(engine: SglangEngine) -> tuple[Feature, ...]:
        assert engine._life.info is not None
        return engine._life.info.features

    assert Feature.GUIDED not in features(await make())
    assert Feature.GUIDED in features(await make("--grammar-backend xgrammar"))


async def test_ranks_publish_on_ports_in_a_row(make: Make, fake: FakeSglang) -> None:
    await make("--dp-size 2")
    config = fake.engines[0].events_config
    live, replay = (int(config[key].rpartition(":")[2]) for key in ("endpoint", "replay_endpoint"))
    assert replay == live + 2


def test_free_ports_are_in_a_row_or_not_there() -> None:
    assert 1024 <= free_ports(4) <= 65_532
    with pytest.raises(ConfigError, match="in a row"):
        free_ports(70_000)


async def test_a_node_that_does_not_lead_serves_nobody(make: Make, fake: FakeSglang) -> None:
    engine = await make("--nnodes 2 --node-rank 1")
    assert engine._life.info is not None
    assert (engine._life.info.features, engine._life.info.tells_events) == ((), False)
    with pytest.raises(Exception, match="--node-rank 0"):
        async with aclosing(engine.generate(ask())) as deltas:
            await anext(deltas)
    engine.check_health()


async def test_flags_that_sglang_refuses_are_a_bad_setting(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.23 refused its flags"):
        await make("--no-such-flag")


async def test_another_page_size_than_the_routers_count_in_is_refused(make: Make, fake: FakeSglang) -> None:
    fake.page_size = 64
    with pytest.raises(ConfigError, match="set --block-size 64"):
        await make(block_size=16)


# --- control calls ----------------------------------------------------------------------------------------------------


async def told(engine: SglangEngine, action: ControlAction, **arguments: str) -> ControlReply:
    assert isinstance(engine, Controllable)
    return await engine.control(Control(action=action, arguments=arguments))


async def test_an_operator_can_empty_the_cache_when_nothing_runs(make: Make, fake: FakeSglang) -> None:
    engine = await make()
    async with aclosing(engine.generate(ask())) as deltas:
        await anext(deltas)
        with pytest.raises(InvalidRequestError, match="requests are running"):
            await told(engine, ControlAction.RESET_PREFIX_CACHE)
        async for _ in deltas:
            pass
    await until(lambda: engine.kv_digest().blocks > 0)
    await told(engine, ControlAction.RESET_PREFIX_CACHE)
    await until(lambda: engine.kv_digest().blocks == 0)


async def test_adapters_come_and_go_and_are_served_by_name(make: Make) -> None:
    engine = await make(loras="poet=/adapters/poet")
    reply = await told(engine, ControlAction.LOAD_LORA, name="cook", path="/adapters/cook")
    assert reply.loras == ("poet", "cook")
    async with aclosing(engine.generate(ask(lora="cook"))) as deltas:
        assert [delta async for delta in deltas]
    assert (await told(engine, ControlAction.UNLOAD_LORA, name="poet")).loras == ("cook",)
    with pytest.raises(InvalidRequestError, match="no adapter 'poet'"):
        async with aclosing(engine.generate(ask(lora="poet"))) as deltas:
            await anext(deltas)
    assert (await told(engine, ControlAction.LIST_LORAS)).detail == "cook"


async def test_an_adapter_loaded_again_reuses_no_kv_and_claims_none(make: Make) -> None:
    """SGLang keys its cache by an adapter's name here; the files behind the name may have changed."""
    engine = await make(loras="poet=/adapters/poet")
    names = sequence_hashes(range(10, 74), 16, hash_seed("poet"))
    for _ in range(2):
        first = [delta async for delta in engine.generate(ask(64, lora="poet"))]
        assert first[0].cached_tokens == 0
        await until(lambda: names[0] in announced(engine))
        await told(engine, ControlAction.UNLOAD_LORA, name="poet")
        await told(engine, ControlAction.LOAD_LORA, name="poet", path="/adapters/poet")
        assert not announced(engine) & {*names}


def announced(engine: SglangEngine) -> set[int]:
    return {name for event in engine.kv_snapshot() if isinstance(event, Stored) for name in event.hashes}


async def test_an_adapter_with_other_weights_under_its_old_name_has_another_fingerprint(
    make: Make, tmp_path: Path
) -> None:
    engine = await make(loras="poet=/adapters/poet")
    found = []
    for weights in (b"one", b"one", b"two"):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        await told(engine, ControlAction.LOAD_LORA, name="cook", path=str(tmp_path))
        found.append(engine.kv_content().of("cook"))
        await told(engine, ControlAction.UNLOAD_LORA, name="cook")
    assert found[0] == found[1] != found[2]
    assert {found[0], engine.kv_content().of("poet"), engine.kv_content().of(None)}.isdisjoint({"", PENDING})


async def test_kv_of_other_weights_is_refused(make: Make) -> None:
    prefill, decode = await make(role=Role.PREFILL), await make(role=Role.DECODE)
    async with aclosing(prefill.generate(ask(offer_kv=True))) as deltas:
        [delta] = [delta async for delta in deltas]
    assert delta.ticket is not None
    assert prefill.kv_content() == decode.kv_content()
    ticket = msgspec.structs.replace(delta.ticket, content="other")
    with pytest.raises(EngineError, match="offers KV of another content"):
        async with aclosing(decode.generate(ask(ticket=ticket))) as deltas:
            await anext(deltas)


@pytest.mark.parametrize(
    ("action", "arguments", "says"),
    [
        (ControlAction.LOAD_LORA, {"name": "a", "path": "/a"}, "LoRA is not enabled"),
        (ControlAction.LOAD_LORA, {"name": "a"}, "needs 'path'"),
        (ControlAction.UNLOAD_LORA, {"name": "a"}, "no adapter 'a'"),
        (ControlAction.SLEEP, {}, "cannot sleep"),
        (ControlAction.WAKE, {}, "cannot wake"),
    ],
)
async def test_a_refused_control_call_has_sglangs_reason(
    make: Make, action: ControlAction, arguments: dict[str, str], says: str
) -> None:
    engine = await make()
    with pytest.raises(InvalidRequestError, match=says):
        await told(engine, action, **arguments)


async def test_profiling_is_begun_once(make: Make, fake: FakeSglang) -> None:
    engine = await make()
    await told(engine, ControlAction.START_PROFILE)
    with pytest.raises(InvalidRequestError, match="already in progress"):
        await told(engine, ControlAction.START_PROFILE)
    await told(engine, ControlAction.STOP_PROFILE)
    assert not fake.engines[0].is_profiling


async def test_without_the_package_it_says_what_to_install() -> None:
    engine = open_engine(WorkerConfig(engine="sglang", model_path="/models/toy"))
    with pytest.raises(ConfigError, match="needs the sglang package"):
        await engine.start(new_worker_id("w"), "127.0.0.1:1")
    await engine.stop()


def test_signals_are_kept_on_the_loop_that_workers_run_on() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def take_signals() -> list[str]:
        loop = asyncio.get_running_loop()
        heard: list[str] = []
        both = asyncio.Event()

        def hear(who: str) -> None:
            heard.append(who)
            if len(heard) == 2:
                both.set()

        loop.add_signal_handler(signal.SIGTERM, hear, "worker")
        with signals_kept(loop):
            loop.add_signal_handler(signal.SIGTERM, hear, "sglang")
            loop.add_signal_handler(signal.SIGUSR1, hear, "sglang")
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(PATIENCE_S):
            await both.wait()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGUSR1)
        return sorted(heard)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(take_signals()) == ["sglang", "worker"]
