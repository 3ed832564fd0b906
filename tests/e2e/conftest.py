"""Meshes that tests share: one per KV transfer, started once a session."""

from collections.abc import Iterator

import pytest

from kvmesh.kvcache.transfer.nixl import why_unavailable
from tests.support.mesh import Mesh, running_mesh

FLAGS = ["--max-step-tokens", "128"]  # prompts of the tests shall need several chunks


@pytest.fixture(scope="session")
def shm_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("shm"), "--kv-transfer", "shm", *FLAGS) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def nixl_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    if reason := why_unavailable():
        pytest.skip(f"NIXL: {reason}")
    with running_mesh(tmp_path_factory.mktemp("nixl"), "--kv-transfer", "nixl", *FLAGS) as mesh:
        yield mesh


@pytest.fixture(params=["nixl", "shm"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return request.getfixturevalue(f"{request.param}_mesh")
