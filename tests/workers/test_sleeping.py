"""An engine of ours sleeps and wakes: its memory is freed, requests go elsewhere, and answers stay what they were."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ConfigError, DrainingError
from kvmesh.protocol.events import Cleared, Digest, Stored
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import GenerateRequest, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.ranks import RankedEngine
from kvmesh.workers.sleeping import SleepableEngine
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig

PROMPT = [5] * 40


def settings(**given: Any) -> WorkerConfig:
    base: dict[str, Any] = {"engine": "mock", "mock_speedup": 0, "num_blocks": 64, "kv_transfer": "shm", "model": "m"}
    return WorkerConfig(**{"model_path": str(CHECKPOINT_DIR), **base, **given})


@pytest.fixture
async def engine() -> AsyncIterator[SleepableEngine]:
    made = open_engine(settings())
    assert isinstance(made, SleepableEngine)
    await made.start(WorkerId("w"), "127.0.0.1:1")
    yield made
    await made.stop()


async def answer(engine: Any, number: int = 0, offer_kv: bool = False) -> list[Any]:
    request = GenerateRequest(
        request_id=RequestId(f"r{number}"),
        model="m",
        prompt=pack_tokens(PROMPT),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=4, ignore_eos=True),
        offer_kv=offer_kv,
    )
    return [delta async for delta in engine.generate(request)]


def tokens(deltas: list[Any]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_request_that_comes_asleep_goes_elsewhere(engine: SleepableEngine) -> None:
    await engine.sleep()
    for ask in (answer(engine), engine.reset_cache()):
        with pytest.raises(DrainingError, match="asleep; wake it"):
            await ask
    engine.check_health()
    assert engine.load().total_blocks == 64
    await engine.wake()
    assert tokens(await answer(engine))


async def test_a_second_sleep_and_a_second_wake_do_nothing(engine: SleepableEngine) -> None:
    await asyncio.gather(engine.sleep(), engine.sleep())
    await asyncio.gather(engine.wake(), engine.wake())
    first = engine.awake
    await engine.wake()
    assert engine.awake is first


async def test_routers_hear_that_the_cache_is_gone(engine: SleepableEngine) -> None:
    events: list[Any] = []
    engine.on_kv_events(events.extend)
    await answer(engine)
    assert engine.kv_digest().blocks == 2
    events.clear()
    await engine.sleep()
    assert (events, engine.kv_snapshot(), engine.kv_digest()) == ([Cleared()], [], Digest(0, 0))
    await engine.wake()
    [*deltas] = await answer(engine, 1)
    assert deltas[0].cached_tokens == 0
    engine.kv_snapshot()
    assert any(isinstance(event, Stored) for event in events)


async def test_no_old_ticket_names_the_engine_that_woke(engine: SleepableEngine) -> None:
    [before] = [delta.ticket for delta in await answer(engine, offer_kv=True) if delta.ticket]
    await engine.sleep()
    await engine.wake()
    [after] = [delta.ticket for delta in await answer(engine, offer_kv=True) if delta.ticket]
    assert (before.worker_id, after.worker_id) == ("w", "w~1")
    engine.release(before.offer_id, before.nonce)
    assert engine.load().offers == 1
    engine.release(after.offer_id, after.nonce)
    assert engine.load().offers == 0


async def test_listeners_of_load_follow_the_engine_that_woke(engine: SleepableEngine) -> None:
    changes: list[int] = []
    engine.on_load_change(lambda: changes.append(1))
    await engine.sleep()
    await engine.wake()
    changes.clear()
    await answer(engine)
    assert changes


async def test_all_ranks_sleep_and_wake() -> None:
    ranked = open_engine(settings(dp_size=2))
    assert isinstance(ranked, RankedEngine)
    await ranked.start(WorkerId("w"), "127.0.0.1:1")
    await ranked.sleep()
    with pytest.raises(DrainingError):
        await answer(ranked)
    await ranked.wake()
    assert tokens(await answer(ranked))
    await ranked.stop()


class FailingOnce(MockExecutor):
    """Its second instance cannot load."""

    made = 0

    def load(self) -> Any:
        FailingOnce.made += 1
        if FailingOnce.made == 2:
            raise ConfigError("no memory", hint="free some")
        return super().load()


async def test_an_engine_that_cannot_wake_sleeps_on() -> None:
    FailingOnce.made = 0
    config = StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0)
    engine = SleepableEngine(lambda: StepEngine(FailingOnce(block_size=16, speedup=0), None, config))
    await engine.start(WorkerId("w"), "")
    await engine.sleep()
    with pytest.raises(ConfigError, match="no memory; free some"):
        await engine.wake()
    with pytest.raises(DrainingError):
        engine.awake  # noqa: B018
    await engine.wake()
    assert tokens(await answer(engine))
    await engine.stop()


class SlowSecond(MockExecutor):
    """Its second instance takes a minute to load."""

    made = 0

    def load(self) -> Any:
        SlowSecond.made += 1
        return replace(super().load(), start_s=60.0 * (SlowSecond.made == 2))


async def test_a_worker_that_stops_gives_up_a_wake() -> None:
    SlowSecond.made = 0
    config = StepEngineConfig("m", "", 64, 8, 512, 30.0, 5.0)
    engine = SleepableEngine(lambda: StepEngine(SlowSecond(block_size=16, speedup=0), None, config))
    await engine.start(WorkerId("w"), "")
    await engine.sleep()
    waking = asyncio.create_task(engine.wake())
    while SlowSecond.made < 2:
        await asyncio.sleep(0.001)
    await asyncio.wait_for(engine.stop(), 5)
    with pytest.raises(asyncio.CancelledError):
        await waking


def resident_bytes() -> int:
    """Pages in memory, private or shared with a child: a child that ends makes shared pages private."""
    return 1024 * int(re.findall(r"^Rss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[0])


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
async def test_asleep_a_torch_engine_takes_no_memory() -> None:
    pytest.importorskip("torch")
    engine = open_engine(settings(engine="torch", num_blocks=16384, dtype="bfloat16", kv_transfer="auto"))
    await engine.start(WorkerId("w"), "127.0.0.1:1")
    assert isinstance(engine, SleepableEngine)
    expected = tokens(await answer(engine))
    layout = engine.awake._info and engine.awake._info.layout
    assert layout
    kv_bytes = 16384 * layout.block_bytes  # 256 MiB, far above what other tests' threads allocate meanwhile
    awake = resident_bytes()
    await engine.sleep()
    assert awake - resident_bytes() > 0.75 * kv_bytes
    await engine.wake()
    assert tokens(await answer(engine)) == expected
    await engine.stop()
