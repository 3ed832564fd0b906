"""A mesh behind a real Envoy: three endpoints, a prefill worker, an endpoint picker. `make test-envoy` runs it.

Each endpoint is what a pod would be: a worker, and beside it a frontend that runs what the picker's headers say.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.address import join_address
from tests.envoy.proxy import HOST, EnvoyPort, Mode, find_envoy, free_ports, running_envoy
from tests.support.patience import PATIENCE_S

MODES: tuple[Mode, ...] = ("buffered", "duplex")
LARGE, SMALL = "large", "small"  # models: one with two decode workers, one whose worker runs one request at a time


@pytest.fixture(autouse=True, scope="session")
def _asked_for() -> None:
    if not os.environ.get("KVMESH_TEST_ENVOY"):
        pytest.skip("needs a real Envoy: make test-envoy")
    assert find_envoy() is not None, "make test-envoy installs it"


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def service(folder: Path, name: str, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of ours until the block ends; its log is kept in the folder."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=Path.cwd()
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class GatewayMesh:
    """A mesh and its gateway. `urls`: of Envoy, by the mode in which it asks the picker."""

    folder: Path
    urls: dict[Mode, str]
    open_url: str  # of Envoy, where it lets a failure of the picker pass; buffered
    picker_url: str
    picker_argv: list[str]
    stack: ExitStack
    picker: subprocess.Popen[bytes] = field(init=False)
    endpoints: dict[str, str] = field(default_factory=dict)  # by worker

    def start_picker(self) -> None:
        self.picker = self.stack.enter_context(service(self.folder, "picker", *self.picker_argv))

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.picker_url}/health").json()
        return found

    def until_idle(self) -> None:
        until(lambda: self.health()["in_flight"] == 0, "no request may stay booked")

    def chat(self, mode: Mode, text: str, model: str = LARGE, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields
        return httpx.post(f"{self.urls[mode]}/v1/chat/completions", json=body, timeout=PATIENCE_S)

    def trace(self, mode: Mode, text: str, model: str = LARGE, **kvmesh: Any) -> dict[str, Any]:
        """Return what happened to a chat, as the endpoint tells it."""
        reply = self.chat(mode, text, model, kvmesh={"trace": True} | kvmesh)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()["kvmesh"]
        return found

    def until_routed(self) -> None:
        """Wait until each model is answered."""

        def answers() -> bool:
            try:
                return all(self.chat("buffered", "hi", model).status_code == 200 for model in (LARGE, SMALL))
            except httpx.TransportError:
                return False

        until(answers, "the gateway answers")


def worker_argv(name: str, role: str, model: str, discovery: str, *more: str) -> list[str]:
    known = ["kvmesh.workers", "--engine", "mock", "--name", name, "--role", role, "--model", model]
    return [*known, "--model-path", str(CHECKPOINT_DIR), "--discovery", discovery, *more]


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayMesh]:
    folder = tmp_path_factory.mktemp("gateway")
    discovery = f"file:{folder / 'discovery'}"
    ext_proc, http_port, open_port, *ports = free_ports(8)
    picker_argv = [
        "kvmesh.router",
        "--ext-proc-port",
        str(ext_proc),
        "--http-port",
        str(http_port),
        "--discovery",
        discovery,
    ]
    picker_argv += ["--ext-proc-wait-s", "1", "--saturation-requests-share", "1", "--ramp-s", "0"]
    urls = {mode: f"http://{join_address(HOST, port)}" for mode, port in zip(MODES, ports[:2], strict=True)}
    with ExitStack() as stack:
        found = GatewayMesh(
            folder,
            urls,
            f"http://{join_address(HOST, open_port)}",
            f"http://{join_address(HOST, http_port)}",
            picker_argv,
            stack,
        )
        found.start_picker()
        prefill = worker_argv("p1", "prefill", LARGE, discovery)
        stack.enter_context(service(folder, "p1", *prefill))
        workers = [("d1", LARGE, []), ("d2", LARGE, []), ("one", SMALL, ["--max-num-seqs", "1", "--mock-itl-ms", "50"])]
        for (name, model, more), port in zip(workers, ports[2:], strict=True):
            endpoint = found.endpoints[name] = join_address(HOST, port)
            role = "decode" if model == LARGE else "aggregated"
            argv = worker_argv(name, role, model, discovery, "--http-endpoint", endpoint, *more)
            stack.enter_context(service(folder, name, *argv))
            sidecar = ["kvmesh.frontend", "--router", "direct", "--port", str(port), "--discovery", discovery]
            stack.enter_context(service(folder, f"sidecar-{name}", *sidecar, "--name", f"sidecar-{name}"))
        listeners = [EnvoyPort(port, mode) for mode, port in zip(MODES, ports[:2], strict=True)]
        listeners.append(EnvoyPort(open_port, "buffered", fails_open=True))
        stack.enter_context(running_envoy(folder, ext_proc, listeners))
        found.until_routed()
        yield found
