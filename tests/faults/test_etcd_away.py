"""A mesh whose discovery is a real etcd: without it, and with one that has forgotten all, no request fails."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.mesh import until
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)
LEASE_S = 2


class EtcdMesh:
    """A frontend and two mock workers that meet in etcd."""

    def __init__(self, etcd: EtcdProcess, folder: Path, stack: ExitStack) -> None:
        self.etcd, self._folder, self._stack = etcd, folder, stack
        self._discovery = f"etcd:{etcd.endpoint}/site?lease-s={LEASE_S}"
        self.start("frontend", "kvmesh.frontend", "--port", "0")
        for name in ("a", "b"):
            self.worker(name)
        until(lambda: "ready" in self.log("frontend"))
        found = re.search(r"url=(http://\S+)", self.log("frontend"))
        assert found is not None
        self.url = found[1]
        until(lambda: self.joined() == 2, what="the workers")

    def worker(self, name: str) -> subprocess.Popen[bytes]:
        model = ("--model-path", str(CHECKPOINT_DIR), "--model", "tiny", "--kv-transfer", "shm")
        return self.start(name, "kvmesh.workers", "--name", name, "--role", "aggregated", "--engine", "mock", *model)

    def start(self, name: str, module: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", module, "--discovery", self._discovery, *flags]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def joined(self) -> int:
        return self.log("frontend").count("worker joined") - self.log("frontend").count("worker left")

    def answers(self, seconds: float) -> None:
        """Assert that requests are answered for a while."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            for worker in ("a", "b"):
                check_mock_answer(Stream(self.url, list(range(100, 140)), 5, kvmesh={"worker": worker}).join())
            time.sleep(0.1)

    def keys(self) -> list[str]:
        return sorted(self.etcd.ctl("get", "/site/workers/", "--prefix", "--keys-only").split())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[EtcdMesh]:
    with ExitStack() as stack:
        etcd = EtcdProcess(tmp_path)
        stack.callback(etcd.stop)
        yield EtcdMesh(etcd, tmp_path, stack)


@pytest.mark.long
def test_the_mesh_serves_while_etcd_is_away(mesh: EtcdMesh) -> None:
    keys = mesh.keys()
    mesh.etcd.kill()
    mesh.answers(3 * LEASE_S)
    mesh.etcd.forget()
    mesh.etcd.start()
    until(lambda: mesh.keys() == keys, what="the workers to register again")
    mesh.answers(1.5 * LEASE_S)
    mesh.etcd.pause()
    mesh.answers(3 * LEASE_S)
    mesh.etcd.resume()
    until(lambda: mesh.keys() == keys, what="the leases to be renewed or taken again")
    mesh.answers(1.5 * LEASE_S)
    assert (mesh.joined(), mesh.log("frontend").count("worker joined")) == (2, 2), "nobody has left or come twice"


def test_workers_that_die_meanwhile_are_noticed(mesh: EtcdMesh) -> None:
    third = mesh.worker("c")
    until(lambda: mesh.joined() == 3)
    mesh.etcd.kill()
    third.kill()
    third.wait()
    mesh.answers(LEASE_S)
    mesh.etcd.start()
    until(lambda: mesh.joined() == 2, what="the dead worker to leave")
    assert httpx.get(f"{mesh.url}/health").status_code == 200
    mesh.answers(1.0)
