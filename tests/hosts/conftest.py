"""A mesh on four hosts, each a network namespace: etcd and NATS, frontend and routers, prefill, decode."""

import os
import shutil
from collections.abc import Iterator

import pytest

from kvmesh.lab.hosts.lab import lab, why_not
from kvmesh.lab.hosts.mesh import SERVERS, HostsMesh


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsMesh]:
    if not os.environ.get("KVMESH_TEST_HOSTS"):
        pytest.skip("hosts: run `make test-hosts`")
    if problem := why_not():
        pytest.fail(problem)
    if missing := [server for server in SERVERS if shutil.which(server) is None]:
        pytest.fail(f"missing: {', '.join(missing)}; apt-get install etcd-server nats-server")
    with lab(tmp_path_factory.mktemp("hosts")) as made:
        yield HostsMesh(made)
    assert made.leftovers() == []


@pytest.fixture
def mesh(hosts: HostsMesh) -> Iterator[HostsMesh]:
    yield hosts
    hosts.lab.heal()
    hosts.until(lambda: hosts.ask(0).pulled_bytes > 0, "KV moves again")
