"""KV that leaves the device comes back from host memory, and nobody waits for it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import pytest
import pytest_asyncio

from kvmesh.kvcache.tiers.store import Payload, TierError
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from kvmesh.protocol.events import Cleared, KvEvent, Stored
from kvmesh.protocol.ids import RequestId, new_worker_id
from kvmesh.protocol.messages import Delta, GenerateRequest, SamplingParams, StopConditions, pack_tokens
from kvmesh.protocol.tiers import Tier
from kvmesh.router.index import Holder, PlainIndex
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.mock.executor import MockExecutor, mock_token
from kvmesh.workers.metrics import read_load
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import TierSettings
from tests.support.patience import PATIENCE_S

BLOCK, BLOCKS = 16, 24
BLOCK_BYTES = 2 * 4 * BLOCK
PROMPT = list(range(10, 10 + 10 * BLOCK + 3))  # 10 full blocks


def engine(host_blocks: int = 400, offload: str = "ahead", **mock: object) -> StepEngine:
    settings = TierSettings(host_blocks * BLOCK_BYTES, offload)  # type: ignore[arg-type]
    config = StepEngineConfig("m", "", BLOCKS, 8, 512, 30.0, 5.0, tiers=settings)
    return StepEngine(MockExecutor(block_size=BLOCK, speedup=0, **mock), None, config)  # type: ignore[arg-type]


def others(number: int) -> list[int]:
    """Return a prompt that shares no block with those of other numbers."""
    return [number, *range(400, 400 + 9 * BLOCK)]


class Serving:
    """An engine whose KV events go to an index."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.index = PlainIndex()
        self.holder = Holder(new_worker_id("w"), 0)
        self.events: list[KvEvent] = []
        self._asked = 0

    async def start(self) -> "Serving":
        self.engine.on_kv_events(self._listen)
        await self.engine.start(self.holder.worker_id, "")
        return self

    def _listen(self, events: Sequence[KvEvent]) -> None:
        self.events += events
        self.index.apply(self.holder, events)

    def request(self, prompt: Sequence[int], **fields: object) -> GenerateRequest:
        self._asked += 1
        return GenerateRequest(
            request_id=RequestId(f"r{self._asked}"),
            model="m",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0),
            stop=StopConditions(max_tokens=3, ignore_eos=True),
            **fields,  # type: ignore[arg-type]
        )

    async def ask(self, prompt: Sequence[int], **fields: object) -> Delta:
        """Return the first delta of an answer, which is the right one."""
        async with asyncio.timeout(PATIENCE_S):
            deltas = [delta async for delta in self.engine.generate(self.request(prompt, **fields))]
        answer = [token for delta in deltas for token in delta.token_ids]
        assert answer == [mock_token(prompt, i, 2048) for i in range(3)]
        return deltas[0]

    async def push_out(self, seed: int = 1000) -> None:
        """Let other prompts take the whole device."""
        for number in range(8):
            await self.ask(others(seed + number))
            await self.quiet()

    async def quiet(self) -> None:
        """Wait until no copy is in progress."""
        copies = self.engine._copies
        assert copies is not None
        async with asyncio.timeout(PATIENCE_S):
            while copies._running or copies.stack.in_flight or copies._loads:
                await asyncio.sleep(0.001)

    def count(self, name: str) -> int:
        return sum(use.counts.get(name, 0) for use in self.engine.load().tiers)


@pytest_asyncio.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = await Serving(engine()).start()
    yield serving
    await serving.engine.stop()


async def test_an_evicted_prefix_comes_back_from_host_memory(serving: Serving) -> None:
    assert (await serving.ask(PROMPT)).cached_tokens == 0
    await serving.push_out()
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK
    assert serving.count("loaded") == 10
    assert serving.engine.load().used_blocks == 0


async def test_without_the_setting_there_is_no_tier() -> None:
    serving = await Serving(engine(host_blocks=0)).start()
    await serving.ask(PROMPT)
    for number in range(8):
        await serving.ask(others(1000 + number))
    assert (await serving.ask(PROMPT)).cached_tokens == 0
    assert serving.engine.load().tiers == ()
    assert serving.engine._pool.journal is None
    await serving.engine.stop()


async def test_equal_prompts_share_one_load(serving: Serving) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    answers = await asyncio.gather(*[serving.ask(PROMPT) for _ in range(16)])
    assert [answer.cached_tokens for answer in answers] == [10 * BLOCK] * 16
    assert serving.count("loaded") == 10


async def test_routers_hear_of_blocks_in_host_memory(serving: Serving) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    assert any(isinstance(event, Stored) and event.medium == "CPU" for event in serving.events)
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)
    rebuilt = PlainIndex()
    rebuilt.apply(serving.holder, serving.engine.kv_snapshot())
    assert rebuilt.content(serving.holder) == serving.index.content(serving.holder)
    assert rebuilt.digest(serving.holder) == serving.engine.kv_digest()


async def test_a_reset_forgets_all_tiers(serving: Serving) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    await serving.engine.reset_cache()
    assert serving.events[-1] == Cleared()
    assert serving.engine.kv_digest().blocks == 0
    assert serving.index.content(serving.holder) == frozenset()
    assert (await serving.ask(PROMPT)).cached_tokens == 0


async def test_a_reset_of_host_memory_alone_keeps_the_device(serving: Serving) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    on_device = serving.engine._pool.digest.blocks
    await serving.engine.reset_cache([Tier.HOST])
    assert serving.engine._pool.digest.blocks == on_device > 0
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)
    assert (await serving.ask(PROMPT)).cached_tokens == 0
    await serving.push_out(1100)
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK, "the tier takes blocks again"


async def test_a_reset_of_the_device_alone_keeps_host_memory(serving: Serving) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    below = serving.engine.load().tiers[0].blocks
    await serving.engine.reset_cache([Tier.DEVICE])
    assert serving.engine.kv_digest().blocks == below > 0
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder), "routers are told of them again"
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK


def hanging_loads(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make loads hang. Return what is set when one does, and what lets it go on."""
    copies = serving.engine._copies
    assert copies is not None
    [store] = copies._tiers.stores.values()
    load, hangs, goes_on = store.load, threading.Event(), threading.Event()

    def hang(addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        hangs.set()
        goes_on.wait(PATIENCE_S)
        load(addresses, take)

    monkeypatch.setattr(store, "load", hang)
    return hangs, goes_on


async def test_a_tier_that_is_read_or_not_there_is_not_reset(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    hangs, goes_on = hanging_loads(serving, monkeypatch)
    asked = asyncio.create_task(serving.ask(PROMPT))
    await asyncio.to_thread(hangs.wait, PATIENCE_S)
    with pytest.raises(InvalidRequestError, match="blocks of the host tier are being read"):
        await serving.engine.reset_cache([Tier.HOST])
    goes_on.set()
    await asked
    with pytest.raises(InvalidRequestError, match="no disk tier; it has device, host"):
        await serving.engine.reset_cache([Tier.DISK])


async def test_a_block_that_cannot_be_read_is_computed(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    assert serving.engine._copies is not None
    [store] = serving.engine._copies._tiers.stores.values()
    load = store.load

    def fails_at_the_fifth(addresses: Sequence[bytes], take: Callable[[Payload], object]) -> None:
        load(addresses[:4], take)
        raise TierError("a bit has flipped")

    monkeypatch.setattr(store, "load", fails_at_the_fifth)
    assert (await serving.ask(PROMPT)).cached_tokens == 4 * BLOCK, "what has come before is kept"
    assert serving.count("unreadable") == 1
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)


async def test_a_load_that_hangs_holds_up_nobody(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    hangs, goes_on = hanging_loads(serving, monkeypatch)
    copies = serving.engine._copies
    assert copies is not None
    copies._timeout_s = PATIENCE_S
    waiting = asyncio.create_task(serving.ask(PROMPT))
    await asyncio.to_thread(hangs.wait, PATIENCE_S)
    other = await serving.ask(others(1900))
    assert other.cached_tokens == 0
    [loading] = copies._loads.values()
    copies._on_late(loading)
    assert (await waiting).cached_tokens == 0, "the hanging load was given up"
    assert serving.engine.load().used_blocks == 10, "those that the hanging copy may still write into"
    goes_on.set()
    await serving.quiet()
    assert serving.engine.load().used_blocks == 0


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_nobody_queues_behind_a_load_that_hangs(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts wait for one copy that hangs, which counts once. The tier is read again when it has ended."""
    prompts = [others(first)[: 4 * BLOCK + 1] for first in (1800, 1801, 1802)]
    for prompt in prompts:
        await serving.ask(prompt)
    await serving.push_out()
    hangs, goes_on = hanging_loads(serving, monkeypatch)
    copies = serving.engine._copies
    assert copies is not None
    copies._timeout_s = PATIENCE_S
    waiting = [asyncio.create_task(serving.ask(prompt)) for prompt in prompts]
    await asyncio.to_thread(hangs.wait, PATIENCE_S)
    await reached(lambda: len(copies._loads) == 3)
    for loading in list(copies._loads.values()):
        copies._on_late(loading)
    assert [(await answer).cached_tokens for answer in waiting] == [0, 0, 0]
    [level] = copies.stack.levels
    assert level.health.is_readable
    for number in range(8):
        await serving.ask(others(1500 + number)[: 4 * BLOCK + 1])
    begun = serving.count("loads")
    assert (await serving.ask(prompts[0])).cached_tokens == 0
    assert serving.count("loads") == begun
    goes_on.set()
    await serving.quiet()
    assert level.health.takes_loads
    assert serving.engine.load().used_blocks == 0


async def test_a_load_that_never_ends_switches_its_tier_off(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    hangs, goes_on = hanging_loads(serving, monkeypatch)
    copies = serving.engine._copies
    assert copies is not None
    copies._timeout_s = 0.01
    assert (await serving.ask(PROMPT)).cached_tokens == 0
    assert hangs.is_set()
    [level] = copies.stack.levels
    await reached(lambda: not level.health.is_readable)
    assert "a read hangs: the host tier of the KV cache is switched off" in caplog.text
    goes_on.set()
    await serving.quiet()
    assert level.health.hanging == 0
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)


async def test_an_abort_frees_the_blocks_when_the_copy_ends(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    hangs, goes_on = hanging_loads(serving, monkeypatch)
    async with aclosing(serving.engine.generate(serving.request(PROMPT))) as deltas:
        taking = asyncio.ensure_future(anext(deltas))
        joined = asyncio.create_task(serving.ask(PROMPT))
        await asyncio.to_thread(hangs.wait, PATIENCE_S)
        taking.cancel()
        await asyncio.wait([taking])
    goes_on.set()
    assert (await joined).cached_tokens == 10 * BLOCK, "who has joined the load begins one"
    await serving.quiet()
    assert (serving.engine.load().running, serving.engine.load().used_blocks) == (0, 0)


async def test_through_copies_blocks_as_soon_as_they_are_full() -> None:
    serving = await Serving(engine(offload="through")).start()
    await serving.ask(PROMPT)
    await serving.quiet()
    assert serving.count("saved") == 10
    await serving.engine.stop()


async def test_a_tier_stays_within_its_limit() -> None:
    serving = await Serving(engine(host_blocks=12)).start()
    for seed in (1000, 1010, 1020):
        await serving.push_out(seed)
        for use in serving.engine.load().tiers:
            assert use.used_bytes <= use.limit_bytes == 12 * BLOCK_BYTES
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)
    await serving.engine.stop()


async def test_tenants_do_not_share_blocks_of_host_memory(serving: Serving) -> None:
    await serving.ask(PROMPT, cache_salt="one")
    await serving.push_out()
    assert (await serving.ask(PROMPT, cache_salt="two")).cached_tokens == 0
    assert (await serving.ask(PROMPT, cache_salt="one")).cached_tokens == 10 * BLOCK


async def test_the_mock_copies_at_its_bandwidth() -> None:
    serving = await Serving(engine(tier_s_per_token={Tier.HOST: 0.001})).start()
    await serving.ask(PROMPT)
    await serving.push_out()
    [tier] = serving.engine.tier_report().tiers
    assert tier.block_s == 0, "nothing has come back yet"
    began_s = asyncio.get_running_loop().time()
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK
    assert asyncio.get_running_loop().time() - began_s >= 0.16
    [tier] = serving.engine.tier_report().tiers
    assert tier.block_s >= 0.016
    await serving.engine.stop()


async def test_host_memory_smaller_than_a_block_is_refused() -> None:
    config = StepEngineConfig("m", "", 8, 8, 512, 30.0, 5.0, tiers=TierSettings(BLOCK_BYTES - 1))
    refused = StepEngine(MockExecutor(block_size=BLOCK, speedup=0), None, config)
    with pytest.raises(ConfigError, match=r"--kv-host-mib gives 127 bytes, a KV block of this model has 128"):
        await refused.start(new_worker_id("w"), "")
    await refused.stop()


def test_engines_with_tiers_of_their_own_take_no_host_memory() -> None:
    with pytest.raises(ConfigError, match="--kv-host-mib is not for the engine vllm"):
        WorkerConfig(engine="vllm", model_path="m", kv_host_mib=1)


async def test_the_metrics_of_a_worker_have_its_tiers(serving: Serving) -> None:
    await serving.ask(PROMPT)
    await serving.push_out()
    await serving.ask(PROMPT)
    readings = {reading[:2]: reading.value for reading in read_load(("w", "m", "r"), serving.engine.load(), 0.0)}
    where = ("w", "m", "r", "host")
    assert readings["kvmesh_worker_kv_tier_hit_blocks_total", where] == 10
    assert readings["kvmesh_worker_kv_tier_loaded_bytes_total", where] == 10 * BLOCK_BYTES
    assert readings["kvmesh_worker_kv_tier_saved_bytes_total", where] >= 10 * BLOCK_BYTES
    assert readings["kvmesh_worker_kv_tier_lookups_total", (*where, "yes")] == 1
    assert readings["kvmesh_worker_kv_tier_limit_bytes", where] == 400 * BLOCK_BYTES
    assert 0 < readings["kvmesh_worker_kv_hit_share", ("w", "m", "r", "below")] < 1
