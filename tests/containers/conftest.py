"""docker-compose.yml for real: `make test-containers`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.engine import Engine, container_engine
from tests.containers.images import Images, make_images
from tests.containers.mesh import ComposedMesh


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("containers")


@pytest.fixture(scope="session")
def engine(scratch: Path) -> Iterator[Engine]:
    if not os.environ.get("KVMESH_TEST_CONTAINERS"):
        pytest.skip("containers: run `make test-containers`")
    cache = Path(os.environ.get("KVMESH_CACHE") or Path.home() / ".cache" / "kvmesh")
    try:
        with container_engine(cache, scratch) as found:
            yield found
    except LookupError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def images(engine: Engine, scratch: Path) -> Images:
    return make_images(engine, scratch)


@pytest.fixture(scope="session")
def mesh(engine: Engine, images: Images, scratch: Path) -> Iterator[ComposedMesh]:
    """The mesh, as the first commands of the guide start it. The last test takes it down."""
    made = ComposedMesh(engine, images, scratch)
    try:
        yield made
    finally:
        made.down()
