"""A frontend whose model thinks and calls tools, before workers that can do everything."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.frontend import tiny
from tests.frontend.serving import TEMPLATE, Served, able_card, serving


@pytest.fixture(scope="session")
def able_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("able-model"), TEMPLATE)


@pytest.fixture
async def able(able_folder: Path) -> AsyncIterator[Served]:
    async with serving(able_card(able_folder)) as served:
        yield served
