"""The recipe "add an engine" of CONTRIBUTING.md, followed from beginning to end: a folder and one entry."""

from pathlib import Path
from typing import Any

import pytest

import kvmesh.workers.engines
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.doctor import check_engines
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Feature, GenerateRequest, StopConditions, pack_tokens
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines import registry
from kvmesh.workers.engines.kind import EngineKind
from kvmesh.workers.engines.opening import open_engine

OPENING = """
from kvmesh.workers.engines.mock.executor import MockExecutor
from kvmesh.workers.engines.step import open_step_engine


def open_engine(config):
    return open_step_engine(config, lambda: MockExecutor(block_size=config.block_size, speedup=0))
"""
ENTRY = EngineKind(
    name="abacus",
    title="the abacus",
    summary="counts beads",
    features=(Feature.COMPLETIONS,),
    takes=frozenset({"dp_size"}),
    package="msgspec",
    distributions=("msgspec",),
)


@pytest.fixture
def abacus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder below workers/engines with a module `opening`, and one entry in the registry."""
    folder = tmp_path / "abacus"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "opening.py").write_text(OPENING)
    monkeypatch.setattr(kvmesh.workers.engines, "__path__", [*kvmesh.workers.engines.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "ENGINES", {**registry.ENGINES, "abacus": ENTRY})
    monkeypatch.setattr("kvmesh.workers.engines.opening.ENGINES", registry.ENGINES)


def settings(**more: Any) -> WorkerConfig:
    return WorkerConfig(engine="abacus", model_path=str(CHECKPOINT_DIR), model="m", kv_transfer="shm", **more)


@pytest.mark.usefixtures("abacus")
async def test_a_folder_and_one_entry_are_a_new_engine() -> None:
    engine = open_engine(settings(dp_size=2))
    try:
        info = await engine.start(WorkerId("w"), "127.0.0.1:1")
        request = GenerateRequest(
            request_id=RequestId("r"), model="m", prompt=pack_tokens([5, 6]), stop=StopConditions(max_tokens=3)
        )
        tokens = [token async for delta in engine.generate(request) for token in delta.token_ids]
    finally:
        await engine.stop()
    assert info.dp_size == 2
    assert len(tokens) == 3


@pytest.mark.usefixtures("abacus")
def test_a_new_engine_refuses_settings_that_its_entry_does_not_name() -> None:
    with pytest.raises(ConfigError, match="--count is for mock, not for --engine abacus"):
        open_engine(settings(count=2))


def test_doctor_finds_the_package_of_a_new_engine() -> None:
    assert check_engines({ENTRY.package: ENTRY.distributions}).found.startswith("msgspec ")
