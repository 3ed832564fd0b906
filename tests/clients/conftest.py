"""Start the meshes that all clients share, and the clients' scripts. Only `make test-clients` does this."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, Client
from tests.clients.runner import KEY, Runs
from tests.clients.scripted import obedient_frontend
from tests.support.mesh import running_mesh

collect_ignore = [] if "KVMESH_TEST_CLIENTS" in os.environ else ["test_clients.py"]
FLAGS = ("--prefill", "1", "--decode", "1", "--responses-store", "memory")
SLOW = ("--engine", "mock", "--mock-itl-ms", "50")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write the table of clients in docs/api.md")


def asked_for(session: pytest.Session) -> list[Client]:
    """Return the clients of the tests that this run has selected."""
    using = [item for item in session.items if {"client", "runs"} <= set(getattr(item, "fixturenames", ()))]
    names = {item.callspec.params["client"].name for item in using}
    return [client for client in CLIENTS if client.name in names]


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("meshes")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    keyed = ("--api-keys-file", str(keys))
    with (
        running_mesh(folder / "tiny", *FLAGS, *keyed) as tiny,
        running_mesh(folder / "slow", *FLAGS, *SLOW, *keyed) as slow,
        obedient_frontend() as (agents, _),
    ):
        yield {"KVMESH_URL": tiny.url, "KVMESH_SLOW_URL": slow.url, "KVMESH_AGENT_URL": agents}


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, urls: dict[str, str]) -> Iterator[Runs]:
    # A shell's background job ignores SIGINT, and so would all that it starts; a handler of one's own is not inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = Runs(asked_for(request.session), urls)
    yield runs
    runs.close()
    signal.signal(signal.SIGINT, before)
