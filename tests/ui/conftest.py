"""The live page in a real Chromium. `make test-ui` installs what that needs, and runs these tests."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Browser, chromium
from tests.support.mesh import Mesh, running_mesh

collect_ignore = [] if os.environ.get("KVMESH_TEST_UI") else ["test_live_page.py"]
MOCK = ("--engine", "mock", "--kv-transfer", "shm", "--mock-itl-ms", "20")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("ui")
    with running_mesh(folder, *MOCK, "--prefill", "2", "--decode", "3") as mesh:
        yield mesh


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"
