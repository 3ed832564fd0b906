"""Servers that are announced in discovery: a worker stands in front of each for as long as it is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.cluster.attach.announce import AnnounceConfig, entry_of
from kvmesh.cluster.attach.attaching import Announced, attach
from kvmesh.cluster.attach.servers import AttachConfig, read_announced
from kvmesh.mesh.config import load
from kvmesh.mesh.discovery.file import leaving_no_folder
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.protocol.errors import ConfigError, MeshError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig
from tests.support.patience import PATIENCE_S


class FakeSupervisor(Supervisor):
    """Starts nothing."""

    def __init__(self) -> None:
        super().__init__(None)
        self.specs: dict[str, ProcessSpec] = {}
        self.give_up: dict[str, Callable[[MeshError], None] | None] = {}
        self.num_starts = 0

    def start(
        self, spec: ProcessSpec, on_failure: Callable[[MeshError], None] | None = None, on_down: object = None
    ) -> None:
        assert spec.name not in self.specs, "it was stopped before"
        self.specs[spec.name] = spec
        self.give_up[spec.name] = on_failure
        self.num_starts += 1

    async def stop(self, names: Sequence[str], timeout_s: float) -> None:
        for name in names:
            del self.specs[name]

    def worker(self, name: str) -> WorkerConfig:
        return load(WorkerConfig, self.specs[name].argv[2:], {}, prefix="KVMESH_WORKER_", prog="worker")


class Following:
    def __init__(self) -> None:
        self.discovery = MemoryDiscovery()
        self.supervisor = FakeSupervisor()
        self.told: list[str] = []
        config = AttachConfig(discover=True, frontend=True, model="m")
        announced = Announced(config, self.supervisor, {"frontend"}, self.told.append)
        self.task = asyncio.create_task(announced.follow(self.discovery))

    async def announce(self, url: str, **labels: str) -> None:
        config = msgspec.convert(labels, AnnounceConfig)
        entry = entry_of(config, url)
        await self.discovery.put(f"servers/{entry.name}", msgspec.json.encode(entry))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0)


@pytest_asyncio.fixture
async def following() -> AsyncIterator[Following]:
    following = Following()
    yield following
    following.task.cancel()
    await asyncio.wait([following.task])
    await following.discovery.close()


async def test_its_labels_are_the_settings_of_its_worker(following: Following) -> None:
    await following.announce("http://gpu-1:8000", role="prefill", kv_events="tcp://gpu-1:5557", replay="tcp://gpu-1:1")
    await following.until(lambda: "gpu-1-8000" in following.supervisor.specs)
    worker = following.supervisor.worker("gpu-1-8000")
    assert (worker.engine, worker.attach_url, worker.role) == ("attach", "http://gpu-1:8000", Role.PREFILL)
    assert (worker.attach_kv_events, worker.attach_kv_replay) == ("tcp://gpu-1:5557", "tcp://gpu-1:1")
    assert worker.model == "m", "what is not announced is as the flags say"
    assert list(following.supervisor.specs) == ["gpu-1-8000"], "a frontend is started once, and not here"


async def test_its_worker_ends_with_the_announcement(following: Following) -> None:
    await following.announce("http://a:1", name="a")
    await following.announce("http://b:1", name="b")
    await following.until(lambda: len(following.supervisor.specs) == 2)
    following.discovery.remove("servers/a")
    await following.until(lambda: list(following.supervisor.specs) == ["b"])
    assert following.told == ["a is attached no more"]


async def test_a_changed_announcement_attaches_the_server_again(following: Following) -> None:
    await following.announce("http://a:1", name="a")
    await following.until(lambda: "a" in following.supervisor.specs)
    await following.announce("http://a:1", name="a")
    await following.announce("http://a:2", name="b")
    await following.until(lambda: "b" in following.supervisor.specs)
    assert following.supervisor.num_starts == 2
    await following.announce("http://a:9", name="a")
    await following.until(lambda: following.supervisor.num_starts == 3)
    assert following.supervisor.worker("a").attach_url == "http://a:9"


@pytest.mark.parametrize(
    "value", [b"nonsense", b"{}", b'{"url": "tcp://x"}', b'{"url": "http://x", "rolle": "decode"}']
)
async def test_a_bad_announcement_is_reported_and_harms_no_other(following: Following, value: bytes) -> None:
    with pytest.raises(ConfigError):
        read_announced("x", value)
    await following.discovery.put("servers/x", value)
    await following.announce("http://a:1", name="a")
    await following.until(lambda: list(following.supervisor.specs) == ["a"])
    [line] = following.told
    assert line.startswith("servers/x is not attached: ")


async def test_a_name_that_is_taken_is_refused(following: Following) -> None:
    await following.announce("http://a:1", name="frontend")
    await following.until(lambda: bool(following.told))
    assert "the name 'frontend' is taken" in following.told[0]
    assert not following.supervisor.specs


async def test_one_that_cannot_be_attached_does_not_end_the_others(following: Following) -> None:
    """The supervisor ends everything if nobody is told of the failure."""
    await following.announce("http://a:1", name="a")
    await following.until(lambda: "a" in following.supervisor.specs)
    give_up = following.supervisor.give_up["a"]
    assert give_up is not None
    give_up(ConfigError("no tokenizer"))
    assert following.told == ["a is not attached: no tokenizer"]
    assert not following.supervisor.failed.is_set()


async def test_attach_leaves_nothing_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, stop, told = AttachConfig(discover=True), asyncio.Event(), list[str]()
    with leaving_no_folder(config.discovery):
        attaching = asyncio.create_task(attach(config, [], stop, told.append))
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / ".run" / "discovery").exists():
                await asyncio.sleep(0.01)
        stop.set()
        await attaching
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_use_stays(tmp_path: Path) -> None:
    used, old = tmp_path / "used", tmp_path / "old"
    old.mkdir()
    with leaving_no_folder(f"file:{used}/discovery"), leaving_no_folder(f"file:{old}"):
        (used / "discovery").mkdir(parents=True)
        (used / "discovery" / "frontends.key").write_text("a card")
    assert old.exists() and (used / "discovery" / "frontends.key").exists()
