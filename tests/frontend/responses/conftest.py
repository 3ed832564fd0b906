"""A frontend whose model thinks and calls tools."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.frontend import tiny
from tests.frontend.responses.serving import TEMPLATE, Served, serving


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("thinking-model"), TEMPLATE)


@pytest.fixture
async def served(thinking_model: Path) -> AsyncIterator[Served]:
    async with serving(thinking_model) as served:
        yield served
