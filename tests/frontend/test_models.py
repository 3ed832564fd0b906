"""Which models are served, by the cards of the workers."""

import asyncio
from pathlib import Path

import pytest

from frontend.errors import UnknownModelError
from frontend.models import ModelRegistry
from protocol.errors import ConfigError, NoWorkerError
from protocol.ids import WorkerId
from protocol.messages import Role
from tests.frontend import tiny


def test_a_model_is_ready_with_a_worker_that_can_answer() -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("p", Role.PREFILL))
    assert registry.ready() == []
    registry.add(tiny.card("d", Role.DECODE))
    assert [served.name for served in registry.ready()] == ["tiny"]
    assert registry.count() == {"tiny": {"aggregated": 0, "prefill": 1, "decode": 1}}
    registry.remove(WorkerId("d"))
    assert registry.ready() == []
    registry.remove(WorkerId("never seen"))


def test_facts_are_taken_anew_once_all_workers_have_gone() -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a"))
    registry.remove(WorkerId("a"))
    registry.add(tiny.card("b", block_size=64))
    assert registry.find("tiny").block_size == 64


def test_a_worker_may_correct_itself_and_change_its_model() -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a"))
    registry.add(tiny.card("a", block_size=64))
    assert registry.find("tiny").block_size == 64
    registry.add(tiny.card("a", model="other"))
    assert [served.name for served in registry.ready()] == ["other"]


async def test_unknown_models_and_models_without_workers_are_told_apart() -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a"))
    with pytest.raises(UnknownModelError, match="served here: tiny"):
        await registry.get("big")
    registry.remove(WorkerId("a"))
    with pytest.raises(NoWorkerError):
        await registry.get("tiny")


async def test_a_model_is_loaded_once_and_survives_an_impatient_caller(tmp_path: Path) -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a", path=tiny.save_model(tmp_path)))
    first = asyncio.create_task(registry.get("tiny"))
    second = asyncio.create_task(registry.get("tiny"))
    await asyncio.sleep(0)  # both wait for the load now
    first.cancel()
    model = await second
    assert model is await registry.get("tiny")
    assert (model.name, model.context_tokens, model.block_size) == ("tiny", 512, 16)
    assert first.cancelled()


async def test_a_failed_load_is_tried_again(tmp_path: Path) -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a", path=tmp_path))
    with pytest.raises(ConfigError):
        await registry.get("tiny")
    tiny.save_model(tmp_path)
    assert (await registry.get("tiny")).template is not None
