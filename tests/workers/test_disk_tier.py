"""KV on a disk outlives its worker, and a broken disk is no broken worker."""

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.kvcache.tiers.disk import DiskStore
from kvmesh.kvcache.tiers.slots import PAGE_BYTES
from kvmesh.kvcache.tiers.store import Payload, TierIoError
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.events import Stored
from kvmesh.protocol.ids import new_worker_id
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.disk_tier import DiskSettings
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.step import tier_settings
from kvmesh.workers.metrics import read_load
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import TierSettings
from tests.support.disk import FailingIo
from tests.support.killed import fill_and_kill
from tests.support.patience import PATIENCE_S
from tests.workers.test_tiers import BLOCK, BLOCK_BYTES, BLOCKS, PROMPT, Serving, others

SPACE = 1 << 22


def engine(path: Path, model_path: str = "", host_blocks: int = 0, **disk: bool) -> StepEngine:
    settings = TierSettings(host_blocks * BLOCK_BYTES, "ahead", DiskSettings(str(path), SPACE, **disk))
    config = StepEngineConfig("m", model_path, BLOCKS, 8, 512, 30.0, 5.0, tiers=settings)
    return StepEngine(MockExecutor(block_size=BLOCK, speedup=0), None, config)


async def started(path: Path, **settings: object) -> Serving:
    return await Serving(engine(path, **settings)).start()  # type: ignore[arg-type]


async def use_twice(serving: Serving) -> None:
    """Ask twice for the prompt, and let others take the device."""
    for _ in range(2):
        await serving.ask(PROMPT)
        await serving.quiet()
    await serving.push_out()


def store_of(serving: Serving) -> DiskStore:
    assert serving.engine._copies is not None
    store = serving.engine._copies._tiers.stores[Tier.DISK]
    assert isinstance(store, DiskStore)
    return store


@pytest_asyncio.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    serving = await started(tmp_path)
    yield serving
    await serving.engine.stop()


async def test_an_evicted_prefix_comes_back_from_the_disk(serving: Serving) -> None:
    await use_twice(serving)
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK
    assert serving.count("loaded") == 10
    assert serving.engine.load().used_blocks == 0


async def test_prompts_that_never_come_again_write_nothing(serving: Serving) -> None:
    await serving.push_out()
    assert serving.count("saved") == 0


async def test_routers_hear_of_blocks_on_a_disk(serving: Serving) -> None:
    await use_twice(serving)
    assert any(isinstance(event, Stored) and event.medium == "DISK" for event in serving.events)
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)


async def test_another_worker_finds_the_blocks_of_one_that_has_ended(tmp_path: Path) -> None:
    first = await started(tmp_path)
    await use_twice(first)
    await first.engine.stop()
    second = await started(tmp_path)
    assert (await second.ask(PROMPT)).cached_tokens == 10 * BLOCK
    await second.quiet()
    second.engine._publish_events()
    assert second.engine.kv_digest() == second.index.digest(second.holder)
    await second.engine.stop()


async def test_who_follows_later_hears_what_the_disk_has(tmp_path: Path) -> None:
    """A worker publishes its events when its engine has started."""
    first = await started(tmp_path)
    await use_twice(first)
    await first.engine.stop()
    later = Serving(engine(tmp_path))
    await later.engine.start(later.holder.worker_id, "")
    await asyncio.sleep(0.01)
    later.engine.on_kv_events(later._listen)
    assert later.engine.kv_digest() == later.index.digest(later.holder)
    assert later.engine.kv_digest().blocks == 10
    await later.engine.stop()


async def test_other_weights_find_nothing(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([number]) * 3_000_000)
    first = await started(tmp_path / "kv", model_path=str(folders[0]))
    await use_twice(first)
    await first.engine.stop()
    second = await started(tmp_path / "kv", model_path=str(folders[1]))
    assert (await second.ask(PROMPT)).cached_tokens == 0
    await second.engine.stop()


async def test_a_reset_reaches_the_disk(tmp_path: Path) -> None:
    first = await started(tmp_path)
    await use_twice(first)
    await first.engine.reset_cache()
    assert (await first.ask(PROMPT)).cached_tokens == 0
    await first.engine.stop()
    second = await started(tmp_path)
    assert (await second.ask(PROMPT)).cached_tokens == 0
    await second.engine.stop()


async def test_a_reset_of_the_disk_alone_holds_after_a_restart(tmp_path: Path) -> None:
    first = await started(tmp_path, host_blocks=400)
    await use_twice(first)
    await first.engine.reset_cache([Tier.DISK])
    assert first.engine.kv_digest() == first.index.digest(first.holder)
    assert (await first.ask(PROMPT)).cached_tokens == 10 * BLOCK, "from host memory"
    await first.engine.reset_cache([Tier.DISK])
    await first.engine.stop()
    second = await started(tmp_path)
    assert (await second.ask(PROMPT)).cached_tokens == 0
    await second.engine.stop()


async def test_a_worker_that_ends_writes_what_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await started(tmp_path)
    assert first.engine._copies is not None
    first.engine._copies.stack._max_in_flight = 1
    io = store_of(first)._io
    write = io.write

    def slow(file: int, data: Payload, offset: int) -> int:
        time.sleep(0.005)
        return write(file, data, offset)

    monkeypatch.setattr(io, "write", slow)
    for _ in range(2):
        await first.ask(PROMPT)
    await first.engine.stop()
    second = await started(tmp_path)
    assert (await second.ask(PROMPT)).cached_tokens == 10 * BLOCK
    await second.engine.stop()


async def test_salted_prompts_reach_the_disk_only_if_allowed(tmp_path: Path) -> None:
    for allowed in (False, True):
        serving = await started(tmp_path / str(allowed), takes_salted=allowed)
        for _ in range(2):
            await serving.ask(PROMPT, cache_salt="tenant")
            await serving.quiet()
        assert serving.count("saved") == (10 if allowed else 0)
        await serving.engine.stop()


async def test_host_memory_and_disk_load_one_prompt_together(tmp_path: Path) -> None:
    """Host memory has lost the end of the prompt."""
    serving = await started(tmp_path, host_blocks=400)
    await use_twice(serving)
    host, disk = serving.engine._copies._tiers.stack.levels  # type: ignore[union-attr]
    block = host.index.get(max(host.index._blocks.values(), key=lambda each: each.tokens == tuple(PROMPT[96:112])).name)
    assert block is not None
    host.index.drop(block)
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK
    assert (host.counts["loaded"], disk.counts["loaded"]) == (6, 4)
    await serving.engine.stop()


async def test_damaged_blocks_are_computed_and_counted(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    await use_twice(serving)
    io = store_of(serving)._io
    read = io.read

    def flip(file: int, into: Payload, offset: int) -> int:
        count = read(file, into, offset)
        into[4 * PAGE_BYTES + 10] ^= 1  # of the fifth block
        return count

    monkeypatch.setattr(io, "read", flip)
    assert (await serving.ask(PROMPT)).cached_tokens == 4 * BLOCK
    assert (serving.count("unreadable_corrupt"), serving.count("unreadable")) == (1, 1)
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)


async def test_a_disk_that_keeps_failing_reads_is_switched_off(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    await use_twice(serving)
    io = store_of(serving)._io = FailingIo()
    io.errors = {"read": errno.EIO}
    for number in range(5):  # a block that could not be read goes to the disk again when it is asked for again
        assert (await serving.ask(PROMPT)).cached_tokens == 0
        await serving.quiet()
        await serving.push_out(1100 + 10 * number)
    assert "the disk tier of the KV cache cannot be read and is switched off" in caplog.text
    readings = {reading[:2]: reading.value for reading in read_load(("w", "m", "r"), serving.engine.load(), 0.0)}
    assert readings["kvmesh_worker_kv_tier_off", ("w", "m", "r", "disk", "reads")] == 1
    assert readings["kvmesh_worker_kv_tier_unreadable_blocks_total", ("w", "m", "r", "disk", "failed")] == 3
    assert serving.engine.tier_report().tiers == (), "the worker's card says so"
    assert serving.engine.kv_digest() == serving.index.digest(serving.holder)
    await use_twice(serving)
    assert (await serving.ask(PROMPT)).cached_tokens == 0, "it serves without the tier"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_disk_that_takes_no_writes_is_still_read(serving: Serving, number: int) -> None:
    await use_twice(serving)
    io = store_of(serving)._io = FailingIo()
    io.errors = {"write": number}
    for _ in range(4):
        await serving.ask(others(900))
        await serving.quiet()
    assert serving.count("dropped_failed") == 3 * 9
    [use] = serving.engine.load().tiers
    assert (use.is_readable, use.is_writable) == (True, False)
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK


async def test_a_write_that_hangs_holds_up_nobody(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, hangs, goes_on = serving.engine._copies, threading.Event(), threading.Event()
    assert copies is not None
    io = store_of(serving)._io
    write = io.write

    def hang(file: int, data: Payload, offset: int) -> int:
        hangs.set()
        goes_on.wait(PATIENCE_S)
        return write(file, data, offset)

    monkeypatch.setattr(io, "write", hang)
    for _ in range(2):
        await serving.ask(PROMPT)
    await asyncio.to_thread(hangs.wait, PATIENCE_S)
    copies._on_saves_late(copies.stack.levels[0])
    await serving.ask(others(900))
    [use] = serving.engine.load().tiers
    assert (use.is_readable, use.is_writable) == (True, False)
    goes_on.set()
    await serving.quiet()
    assert serving.engine.load().used_blocks == 0


async def test_a_worker_without_its_disk_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    serving = await started(tmp_path / "file")
    await use_twice(serving)
    assert (await serving.ask(PROMPT)).cached_tokens == 0
    assert "is switched off" in caplog.text
    [use] = serving.engine.load().tiers
    assert (use.is_readable, use.is_writable, use.blocks) == (False, False, 0)
    await serving.engine.stop()


async def test_a_disk_that_does_not_answer_delays_the_start_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("kvmesh.workers.disk_tier.OPEN_S", 0.05)
    monkeypatch.setattr("kvmesh.workers.disk_tier.own_folder", lambda *_: goes_on.wait(PATIENCE_S) and _raise())
    serving = await started(tmp_path)
    assert not serving.engine.load().tiers[0].is_readable
    goes_on.set()
    await serving.engine.stop()


def _raise() -> None:
    raise TierIoError("too late")


async def test_ranks_and_workers_with_one_path_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = await started(tmp_path), await started(tmp_path)
    assert {store_of(each)._folder.path.name for each in (first, second)} == {"0", "1"}
    await first.engine.stop()
    await second.engine.stop()


async def test_a_disk_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    config = StepEngineConfig("m", "", 8, 8, 512, 30.0, 5.0, tiers=TierSettings(disk=DiskSettings(str(tmp_path), 4096)))
    refused = StepEngine(MockExecutor(block_size=BLOCK, speedup=0), None, config)
    with pytest.raises(ConfigError, match=r"--kv-disk-gib gives 4096 bytes, a KV block of this model takes 8192"):
        await refused.start(new_worker_id("w"), "")
    await refused.stop()


def test_settings_of_a_worker_become_tiers() -> None:
    config = WorkerConfig(engine="mock", model_path="m", kv_disk="/kv", kv_disk_gib=0.5, kv_disk_salted=True)
    assert tier_settings(config) == TierSettings(0, "ahead", DiskSettings("/kv", 1 << 29, takes_salted=True))
    with pytest.raises(ConfigError, match="--kv-disk is not for the engine vllm"):
        WorkerConfig(engine="vllm", model_path="m", kv_disk="/kv")


async def test_blocks_survive_kill_9(tmp_path: Path) -> None:
    fill_and_kill(__name__, tmp_path)
    serving = await started(tmp_path)
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK
    await serving.engine.stop()
