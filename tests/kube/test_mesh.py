"""A mesh whose services meet in a real API server: requests are answered, also while the server is away."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.kube.conftest import Space
from tests.support.kube_apiserver import ApiRefusedError
from tests.support.mesh import TRUSTED, until
from tests.support.ports import free_port

IDLE_S = 60.0
SERVICES = {"frontend", "worker"}


class KubeMesh:
    """A frontend with the router inside, a prefill and a decode worker. Each is a process and a pod of its name.

    A thread does what a kubelet would: it asks each process for its /health and sets its pod ready, or not.
    """

    def __init__(self, space: Space, folder: Path, stack: ExitStack) -> None:
        self.space, self._folder, self._stack = space, folder, stack
        self._probes: dict[str, str] = {}
        self._ready: dict[str, bool] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ends = threading.Event()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.start("frontend-0", "frontend", "kvmesh.frontend", f"{self.url}/health", "--port", str(port))
        self.worker("prefill-0", "prefill")
        self.worker("decode-0", "decode")
        kubelet = threading.Thread(target=self._probe, name="kubelet", daemon=True)
        kubelet.start()
        stack.callback(kubelet.join)
        stack.callback(self._ends.set)

    def worker(self, pod: str, role: str) -> None:
        port = free_port()
        model = ("--model-path", str(CHECKPOINT_DIR), "--model", "tiny", "--engine", "torch", "--kv-transfer", "shm")
        flags = ("--name", pod, "--role", role, "--metrics-port", str(port), *model)
        self.start(pod, "worker", "kvmesh.workers", f"http://127.0.0.1:{port}/health", *flags)

    def start(self, pod: str, service: str, module: str, probe: str, *flags: str) -> None:
        environ = os.environ | self.space.pod(pod, is_ready=False)
        with (self._folder / f"{pod}.log").open("ab") as log:
            command = [sys.executable, "-m", module, "--discovery", self.space.url(service), *flags]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.processes[pod] = process
        self._ready[pod], self._probes[pod] = False, probe

    def fail_probe(self, pod: str) -> None:
        del self._probes[pod]
        self.space.set_ready(pod, False)

    def kill(self, pod: str) -> None:
        """End a process and its pod, as if its node had lost power."""
        del self._probes[pod]
        self.processes[pod].kill()
        self.processes[pod].wait()
        self.space.server.remove_pod(self.space.namespace, pod)

    def _probe(self) -> None:
        with httpx.Client(timeout=2.0, verify=TRUSTED) as http:
            while not self._ends.wait(0.5):
                for pod, url in list(self._probes.items()):
                    try:
                        is_ready = http.get(url).status_code == 200
                    except httpx.HTTPError:
                        is_ready = False
                    if is_ready != self._ready[pod]:
                        try:
                            self.space.set_ready(pod, is_ready)
                            self._ready[pod] = is_ready
                        except (OSError, ApiRefusedError):
                            continue

    def log(self, pod: str) -> str:
        return (self._folder / f"{pod}.log").read_text()

    def health(self) -> dict:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, verify=TRUSTED).json()
        except httpx.HTTPError:
            return {}

    def roles(self) -> dict[str, int]:
        found: dict[str, int] = self.health().get("workers", {}).get("tiny", {})
        return {role: count for role, count in found.items() if count}

    def chat(self, text: str = "Once upon a time") -> str:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
            "kvmesh": {"disaggregate": True},
        }
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30.0, verify=TRUSTED)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def answers(self, seconds: float) -> int:
        """Assert that every request is answered for a while, each with a prompt of its own. Return how many."""
        ends_s, count = time.monotonic() + seconds, 0
        while time.monotonic() < ends_s:
            self.chat(f"{count} and {seconds}")
            count += 1
            time.sleep(0.2)
        return count


@pytest.fixture
def mesh(space: Space, tmp_path: Path) -> Iterator[KubeMesh]:
    with ExitStack() as stack:
        made = KubeMesh(space, tmp_path, stack)
        until(lambda: made.roles() == {"prefill": 1, "decode": 1}, what="both workers")
        yield made


def test_a_mesh_meets_in_the_api_server_and_outlives_it(mesh: KubeMesh) -> None:
    answer = mesh.chat()
    assert mesh.chat() == answer
    mesh.space.server.kill()
    assert mesh.answers(5.0) > 3
    assert mesh.roles() == {"prefill": 1, "decode": 1}
    mesh.space.server.start()
    assert mesh.answers(3.0) > 3
    until(lambda: mesh.health()["discovery"]["status"] == "reached", what="the API server")
    mesh.kill("decode-0")
    mesh.worker("decode-1", "decode")
    until(lambda: "worker left worker=decode-0" in mesh.log("frontend-0"), what="the dead worker to leave")
    until(lambda: mesh.roles() == {"prefill": 1, "decode": 1}, what="its successor")
    assert mesh.chat() == answer
    assert "Traceback" not in "".join(mesh.log(pod) for pod in mesh.processes)


def test_a_worker_whose_pod_is_not_ready_is_reported(mesh: KubeMesh) -> None:
    """A worker that answers stays, and /health says what Kubernetes thinks of it."""
    mesh.fail_probe("decode-0")
    until(lambda: "its pod decode-0 is not ready" in str(mesh.health()["discovery"]["ignored"]), what="the report")
    until(lambda: "cannot renew its lease, but it answers: it stays" in mesh.log("frontend-0"), what="the router")
    assert mesh.chat()
    assert mesh.health()["discovery"]["workers_found"] == 2


def test_an_idle_mesh_writes_nothing(mesh: KubeMesh) -> None:
    mesh.chat()
    until(lambda: mesh.health().get("status") == "ready", what="the frontend")
    time.sleep(2.0)
    began_s = time.time()
    time.sleep(IDLE_S)
    users = {mesh.space.user(service) for service in SERVICES}
    asked = mesh.space.server.requests_since(began_s, users)
    print(f"requests of a frontend and two workers in {IDLE_S:g} s: {asked}")
    assert [verb for _, verb, _ in asked if verb not in ("watch", "list", "get")] == []
    assert len(asked) <= 4
