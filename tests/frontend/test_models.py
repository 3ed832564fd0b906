"""The models that are served follow from the cards of the workers."""

import asyncio
import logging
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.errors import UnknownModelError
from kvmesh.frontend.models import RETRY_S, ModelRegistry
from kvmesh.frontend.tokenizing.backends import BackendName
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, NoWorkerError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role
from tests.frontend import tiny
from tests.support.patience import PATIENCE_S


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
    assert registry.find("tiny").facts.block_size == 64


def test_a_worker_may_correct_itself_and_change_its_model() -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a"))
    registry.add(tiny.card("a", block_size=64))
    assert registry.find("tiny").facts.block_size == 64
    registry.add(tiny.card("a", model="other"))
    assert [served.name for served in registry.ready()] == ["other"]


async def test_a_worker_with_an_unknown_parser_serves_nothing(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    registry = ModelRegistry()
    registry.add(replace(tiny.card("odd", path=tiny.save_model(tmp_path)), tool_parser="foo"))
    assert "the worker 'odd'" in caplog.text
    assert registry.ready() == []
    with pytest.raises(NoWorkerError, match=r"the worker 'odd' .* no tool parser is named 'foo'; use one of"):
        await registry.get("tiny")
    registry.add(tiny.card("good", path=tmp_path))
    assert (await registry.get("tiny")).name == "tiny"


async def test_unknown_models_and_models_without_workers_are_told_apart() -> None:
    registry = ModelRegistry()
    registry.add(tiny.card("a"))
    with pytest.raises(UnknownModelError, match="served here: tiny"):
        await registry.get("big")
    registry.remove(WorkerId("a"))
    with pytest.raises(NoWorkerError):
        await registry.get("tiny")


async def test_a_loaded_model_is_found_while_its_worker_is_started_again(tmp_path: Path) -> None:
    registry, awaited = ModelRegistry(), set[str]()
    registry.is_awaited = awaited.__contains__
    registry.add(tiny.card("a", path=tiny.save_model(tmp_path)))
    model = await registry.get("tiny")
    registry.remove(WorkerId("a"))
    with pytest.raises(NoWorkerError):
        await registry.get("tiny")
    awaited.add("tiny")
    assert await registry.get("tiny") is model
    with pytest.raises(NoWorkerError):
        registry.find_ready("tiny")


async def test_a_model_that_was_never_loaded_is_not_awaited(tmp_path: Path) -> None:
    registry = ModelRegistry()
    registry.is_awaited = lambda model: True
    registry.add(tiny.card("a", path=tmp_path))
    registry.remove(WorkerId("a"))
    with pytest.raises(NoWorkerError):
        await registry.get("tiny")


async def test_soon_after_the_start_requests_wait_for_a_worker(tmp_path: Path) -> None:
    registry = ModelRegistry()
    registry.hold_until(time.monotonic() + PATIENCE_S)
    asked = asyncio.create_task(registry.get("tiny"))
    await asyncio.sleep(0.1)
    assert not asked.done()
    registry.add(tiny.card("p", Role.PREFILL, path=tiny.save_model(tmp_path)))
    await asyncio.sleep(0.1)
    assert not asked.done(), "a worker that only prefills cannot answer"
    registry.add(tiny.card("d", Role.DECODE, path=tmp_path))
    assert (await asyncio.wait_for(asked, PATIENCE_S)).name == "tiny"


async def test_the_wait_after_the_start_ends() -> None:
    registry = ModelRegistry()
    registry.hold_until(time.monotonic() + 0.1)
    with pytest.raises(NoWorkerError, match="no worker has joined yet"):
        await asyncio.wait_for(registry.get("tiny"), PATIENCE_S)
    registry.hold_until(time.monotonic() + PATIENCE_S)
    registry.add(tiny.card("a"))
    with pytest.raises(UnknownModelError):
        await asyncio.wait_for(registry.get("other"), PATIENCE_S)


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


async def test_a_failed_load_is_retried_but_not_by_every_request(tmp_path: Path) -> None:
    now = 100.0
    registry = ModelRegistry(now=lambda: now)
    registry.add(tiny.card("a", path=tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await registry.get("tiny")
    tiny.save_model(tmp_path)
    now += RETRY_S - 0.1
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await registry.get("tiny")
    now += 0.2
    assert (await registry.get("tiny")).template is not None


async def test_a_model_that_cannot_be_loaded_is_not_ready_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RETRY_S", "RELOAD_S"):
        monkeypatch.setattr(f"kvmesh.frontend.models.{name}", 0.0)
    registry = ModelRegistry()
    card = tiny.card("a", path=tiny.save_model(tmp_path))
    tokenizer = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text("broken")
    registry.add(card)
    registry.load_early(card)
    assert registry.ready() == []  # not before its tokenizer is loaded
    with pytest.raises(ConfigError):
        await registry.get("tiny")
    assert registry.ready() == []
    assert list(registry.names()) == []
    ((worker_id, reason),) = registry.unusable()
    assert worker_id == card.worker_id
    assert "tokenizer.json is no tokenizer" in reason
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    async with asyncio.timeout(PATIENCE_S):
        while not registry.ready():  # it is loaded again, although no request asks for it
            await asyncio.sleep(0.01)
    assert list(registry.unusable()) == []


async def test_restarted_workers_with_other_settings_count_at_once(tmp_path: Path) -> None:
    registry = ModelRegistry(now=lambda: 0.0)
    registry.add(replace(tiny.card("a", path=tmp_path / "none"), tool_parser="none"))
    with pytest.raises(ConfigError):
        await registry.get("tiny")
    registry.add(replace(tiny.card("b", path=tiny.save_model(tmp_path)), tool_parser="hermes"))
    with pytest.raises(ConfigError):  # the worker that says otherwise is still there
        await registry.get("tiny")
    registry.remove(WorkerId("a"))
    assert (await registry.get("tiny")).format.tools is not None


@pytest.mark.parametrize("backend", ["hf", "fastokens"])
async def test_settings_of_tokenizer_and_cache_reach_every_model(tmp_path: Path, backend: BackendName) -> None:
    registry = ModelRegistry(backend, cache_bytes=1 << 20)
    registry.add(tiny.card("a", path=tiny.save_model(tmp_path)))
    tokenizer = (await registry.get("tiny")).tokenizer
    assert (tokenizer.backend_name, tokenizer.cache.max_bytes) == (backend, 1 << 20)


def test_a_tokenizer_that_is_not_installed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    ModelRegistry("auto")
    with pytest.raises(ConfigError, match=r"not installed; install it .*, or set --tokenizer to auto or hf"):
        ModelRegistry("fastokens")


async def test_an_unsuitable_tokenizer_is_reported_in_log_and_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = ModelRegistry("fastokens")
    card = tiny.card("a", path=tiny.save_model(tmp_path, tokenizer=tiny.word_piece()))
    registry.add(card)
    with caplog.at_level(logging.ERROR):
        registry.load_early(card)
        with pytest.raises(ConfigError, match=r"cannot be used for .*tokenizer\.json: .*; set --tokenizer to auto"):
            await registry.get("tiny")
    assert "load tiny failed: fastokens cannot be used" in caplog.text


def test_the_settings_of_the_tokenizer_have_ranges() -> None:
    config = load(FrontendConfig, ["--tokenizer", "hf", "--tokenizer-cache-mib", "0.5"], {}, prefix="X_", prog="x")
    assert (config.tokenizer, config.tokenizer_cache_mib) == ("hf", 0.5)
    for flags in (["--tokenizer", "tiktoken"], ["--tokenizer-cache-mib", "-1"]):
        with pytest.raises(ConfigError, match="tokenizer"):
            load(FrontendConfig, flags, {}, prefix="X_", prog="x")
