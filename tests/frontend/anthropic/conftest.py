"""A frontend whose model thinks and calls tools."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.models import ModelRegistry
from kvmesh.mesh.http.server import listening
from kvmesh.protocol.messages import Feature
from tests.frontend import tiny
from tests.frontend.anthropic.serving import TEMPLATE, Served, words
from tests.support.generator import ScriptedGenerator
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("thinking-model"), TEMPLATE)


@pytest.fixture
async def served(thinking_model: Path) -> AsyncIterator[Served]:
    generator, models = ScriptedGenerator(words("Once", " upon", " a time")), ModelRegistry()
    card = tiny.card("w", path=thinking_model, context_tokens=8192)
    models.add(replace(card, tool_parser="hermes", reasoning_parser="qwen3", features=(Feature.GUIDED,)))
    api = FrontendApi(HttpSettings(max_body_bytes=64 * 1024, max_inflight=2), models, generator)
    async with (
        listening(api.app, "127.0.0.1", 0) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
    ):
        yield Served(url, api, session, models, generator)
