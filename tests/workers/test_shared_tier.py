"""KV in shared storage serves all workers of a model, and broken storage is no broken worker."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.kvcache.tiers.health import MOST_FAILURES
from kvmesh.kvcache.tiers.objects import FolderObjects
from kvmesh.kvcache.tiers.place import place_of
from kvmesh.kvcache.tiers.shared import SharedStore
from kvmesh.kvcache.tiers.store import TierIoError
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.events import Stored
from kvmesh.protocol.ids import new_worker_id
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.controls import tiers_to_reset
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.step import tier_settings
from kvmesh.workers.metrics import read_load
from kvmesh.workers.shared_tier import SharedSettings
from kvmesh.workers.step_engine import StepEngine, StepEngineConfig
from kvmesh.workers.tiers import TierSettings
from tests.support.killed import fill_and_kill
from tests.support.shared import FailingObjects, objects_in
from tests.workers.test_tiers import BLOCK, BLOCK_BYTES, BLOCKS, PROMPT, Serving, others

SPACE = 1 << 26


def engine(path: Path, host_blocks: int = 0, **shared: object) -> StepEngine:
    settings = SharedSettings(f"dir:{path}", SPACE, **shared)  # type: ignore[arg-type]
    tiers = TierSettings(host_blocks * BLOCK_BYTES, "ahead", None, settings)
    config = StepEngineConfig("m", "", BLOCKS, 8, 512, 30.0, 5.0, tiers=tiers)
    return StepEngine(MockExecutor(block_size=BLOCK, speedup=0), None, config)


async def started(path: Path, **settings: object) -> Serving:
    return await Serving(engine(path, **settings)).start()  # type: ignore[arg-type]


async def use_twice(serving: Serving) -> None:
    for _ in range(2):
        await serving.ask(PROMPT)
        await serving.quiet()


async def listed(*all_serving: Serving) -> None:
    """Let workers see what is in the storage now."""
    for serving in all_serving:
        assert serving.engine._shared is not None
        await serving.engine._shared.refresh()
        serving.engine._publish_events()


def failing(serving: Serving) -> FailingObjects:
    """Return the storage of a worker, whose calls a test can have fail."""
    store = serving.engine._tiers.stores[Tier.SHARED]  # type: ignore[union-attr]
    assert isinstance(store, SharedStore)
    assert isinstance(store._objects, FailingObjects)
    return store._objects


@pytest.fixture(autouse=True)
def _storage_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.workers.shared_tier.FolderObjects", FailingObjects)


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Serving, Serving]]:
    pair = await started(tmp_path), await started(tmp_path)
    yield pair
    for serving in pair:
        await serving.engine.stop()


async def test_a_running_worker_uses_what_another_has_stored(pair: tuple[Serving, Serving]) -> None:
    one, other = pair
    await use_twice(one)
    await listed(other)
    assert (await other.ask(PROMPT)).cached_tokens == 10 * BLOCK
    assert (one.count("saved"), other.count("loaded"), other.count("saved")) == (10, 10, 0)


async def test_routers_hear_of_shared_blocks_from_each_worker(pair: tuple[Serving, Serving]) -> None:
    one, other = pair
    await use_twice(one)
    await listed(one, other)
    for serving in pair:
        assert any(isinstance(event, Stored) and event.medium == "SHARED" for event in serving.events)
        assert serving.engine.kv_digest() == serving.index.digest(serving.holder)
    assert other.engine.kv_digest().blocks == 10


async def test_a_worker_lists_the_storage_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingObjects, "list_every_s", 0.01)
    one, other = await started(tmp_path), await started(tmp_path)
    await use_twice(one)
    async with asyncio.timeout(30.0):
        while other.engine.load().tiers[0].blocks < 10:
            await asyncio.sleep(0.01)
    for serving in (one, other):
        await serving.engine.stop()


async def test_a_later_worker_finds_the_blocks(tmp_path: Path) -> None:
    one = await started(tmp_path)
    await use_twice(one)
    await one.engine.stop()
    later = await started(tmp_path)
    assert (await later.ask(PROMPT)).cached_tokens == 10 * BLOCK
    await later.engine.stop()


async def test_prompts_that_never_come_again_write_nothing(pair: tuple[Serving, Serving], tmp_path: Path) -> None:
    await pair[0].push_out()
    assert objects_in(tmp_path) == []


async def test_a_reset_reaches_all_workers(pair: tuple[Serving, Serving]) -> None:
    one, other = pair
    await use_twice(one)
    await listed(other)
    await one.engine.reset_cache([Tier.SHARED])
    await listed(one, other)
    assert (await other.ask(PROMPT)).cached_tokens == 0
    assert (await one.ask(PROMPT)).cached_tokens == 10 * BLOCK, "its device was not reset"
    assert one.engine.kv_digest() == one.index.digest(one.holder)


async def test_a_worker_that_sleeps_leaves_the_blocks_to_others(pair: tuple[Serving, Serving]) -> None:
    one, other = pair
    await use_twice(one)
    await one.engine.stop()  # as sleep does
    await listed(other)
    assert (await other.ask(PROMPT)).cached_tokens == 10 * BLOCK
    assert other.count("loaded") == 10
    await other.engine.reset_cache()
    await listed(other)
    assert other.engine.load().tiers[0].blocks == 0


async def test_what_collectors_remove_is_computed(pair: tuple[Serving, Serving], tmp_path: Path) -> None:
    one, other = pair
    await use_twice(one)
    await listed(other)
    for file in objects_in(tmp_path):
        file.unlink()
    assert (await other.ask(PROMPT)).cached_tokens == 0
    assert other.count("unreadable_gone") == 1
    assert other.engine.kv_digest() == other.index.digest(other.holder)


async def test_damaged_blocks_are_computed_and_stored_again(pair: tuple[Serving, Serving], tmp_path: Path) -> None:
    one, other = pair
    await use_twice(one)
    await listed(other)
    [file] = objects_in(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1 - 6 * BLOCK_BYTES] ^= 1  # of the fourth block
    file.write_bytes(data)
    assert (await other.ask(PROMPT)).cached_tokens == 3 * BLOCK
    assert (other.count("unreadable_corrupt"), objects_in(tmp_path)) == (1, [])
    await listed(one)
    await use_twice(one)
    await listed(other)
    assert other.engine.load().tiers[0].blocks == 10


async def test_salted_prompts_are_shared_only_if_allowed(tmp_path: Path) -> None:
    for allowed in (False, True):
        serving = await started(tmp_path / str(allowed), takes_salted=allowed)
        for _ in range(2):
            await serving.ask(PROMPT, cache_salt="tenant")
            await serving.quiet()
        assert serving.count("saved") == (10 if allowed else 0)
        await serving.engine.stop()


async def test_storage_that_keeps_failing_reads_is_switched_off(
    pair: tuple[Serving, Serving], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    for number in range(MOST_FAILURES):
        for _ in range(2):
            await one.ask(others(1000 + number))
            await one.quiet()
    await listed(other)
    failing(other).errors = {"read"}
    for number in range(MOST_FAILURES):
        assert (await other.ask(others(1000 + number))).cached_tokens == 0
    assert "the shared tier of the KV cache cannot be read and is switched off" in caplog.text
    assert other.engine.tier_report().tiers == ()
    assert other.engine.kv_digest() == other.index.digest(other.holder)


async def test_storage_that_cannot_be_listed_is_switched_off(
    pair: tuple[Serving, Serving], caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = pair
    await use_twice(one)
    failing(one).errors = {"listing"}
    for _ in range(MOST_FAILURES):
        await listed(one)
    assert "the shared tier of the KV cache cannot be listed and is switched off" in caplog.text
    readings = {reading[:2]: reading.value for reading in read_load(("w", "m", "r"), one.engine.load(), 0.0)}
    assert readings["kvmesh_worker_kv_tier_off", ("w", "m", "r", "shared", "reads")] == 1
    assert (await one.ask(PROMPT)).cached_tokens == 10 * BLOCK, "from its device"


async def test_storage_that_takes_no_writes_is_still_read(pair: tuple[Serving, Serving]) -> None:
    one, other = pair
    await use_twice(one)
    await listed(other)
    failing(other).errors = {"put"}
    for number in range(MOST_FAILURES):
        for _ in range(2):
            await other.ask(others(1000 + number))
            await other.quiet()
    [use] = other.engine.load().tiers
    assert (use.is_readable, use.is_writable) == (True, False)
    assert (await other.ask(PROMPT)).cached_tokens == 10 * BLOCK


async def test_a_worker_without_its_storage_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    serving = await started(tmp_path / "file")
    await use_twice(serving)
    assert "is switched off" in caplog.text
    [use] = serving.engine.load().tiers
    assert (use.is_readable, use.is_writable) == (False, False)
    await serving.engine.stop()


async def test_storage_smaller_than_some_blocks_is_refused(tmp_path: Path) -> None:
    tiers = TierSettings(shared=SharedSettings(f"dir:{tmp_path}", 10 * BLOCK_BYTES))
    refused = StepEngine(
        MockExecutor(block_size=BLOCK, speedup=0), None, StepEngineConfig("m", "", 8, 8, 512, 30.0, 5.0, tiers=tiers)
    )
    with pytest.raises(ConfigError, match="--kv-shared-gib gives 1280 bytes"):
        await refused.start(new_worker_id("w"), "")
    await refused.stop()


def test_settings_of_a_worker_become_shared_storage() -> None:
    config = WorkerConfig(engine="mock", model_path="m", kv_shared="dir:/kv", kv_shared_gib=0.5, kv_shared_hours=2)
    assert tier_settings(config).shared == SharedSettings(
        "dir:/kv", 1 << 29, 7200.0, takes_salted=False, timeout_s=10.0
    )
    config = WorkerConfig(engine="mock", model_path="m", kv_shared="s3://bucket/p/", kv_shared_endpoint="http://s3:1")
    assert tier_settings(config).shared == SharedSettings("s3://bucket/p/", 64 << 30, 604800.0, endpoint="http://s3:1")
    assert place_of("s3://bucket/a/b/") == ("bucket", "a/b")
    with pytest.raises(ConfigError, match="--kv-shared is not for the engine vllm"):
        WorkerConfig(engine="vllm", model_path="m", kv_shared="dir:/kv")
    for place in ("nfs:/kv", "dir:", "s3:bucket", "s3://", "s3://a b/c"):
        with pytest.raises(ConfigError, match="no shared storage"):
            WorkerConfig(engine="mock", model_path="m", kv_shared=place)
    for endpoint in ("s3", "ftp://s3", "http://", "http://[", "http://s3:x", "not a url", "http://a b", "http://s3/?x"):
        with pytest.raises(ConfigError, match="no URL of an S3 server"):
            WorkerConfig(engine="mock", model_path="m", kv_shared="s3://bucket", kv_shared_endpoint=endpoint)
    for endpoint in ("https://s3.example.com", "http://[::1]:9000", "http://127.0.0.1:9000/s3"):
        WorkerConfig(engine="mock", model_path="m", kv_shared="s3://bucket", kv_shared_endpoint=endpoint)
    assert tiers_to_reset({"tiers": "shared"}) == (Tier.SHARED,)


def test_a_folder_that_cannot_be_made_is_an_io_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierIoError):
        FolderObjects(tmp_path / "file")


async def test_blocks_of_a_killed_worker_serve_another(tmp_path: Path) -> None:
    fill_and_kill(__name__, tmp_path)
    serving = await started(tmp_path)
    assert (await serving.ask(PROMPT)).cached_tokens == 10 * BLOCK
    await serving.engine.stop()
