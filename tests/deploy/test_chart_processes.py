"""Services that run with the chart's own commands listen on the ports that its policies open, and on no other."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvcache.transfer.backend import choose_backend
from tests.support.chart import container_of, flags_of, in_a_pod, needs_helm, rendered
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

pytestmark = [needs_helm, pytest.mark.e2e]

OWN_PORTS = (
    "--port",
    "--metrics-port",
    "--http-port",
    "--ext-proc-port",
    "--gossip-port",
)  # one number each: replaced by free ones


class Service:
    """A container of the chart as a process here. Replaced is what its pod would give it, and single ports."""

    def __init__(self, folder: Path, workload: str, settings: tuple[str, ...] = (), name: str = "") -> None:
        container = container_of(rendered("values-tiny.yaml", *settings), workload, name)
        flags = flags_of(container)
        here = {"--host": "127.0.0.1", "--advertise-host": "127.0.0.1", "--model-path": str(CHECKPOINT_DIR)}
        here |= {"--name": workload, "--discovery": f"file:{folder}", "--model-cache": str(folder / "cache")}
        here |= {flag: str(free_port()) for flag in OWN_PORTS}
        _, environ = in_a_pod(container)
        environ = {key: text for key, text in environ.items() if not key.startswith(("KVMESH_POD_", "LWS_"))}
        if "KVMESH_ROUTER_GOSSIP_PORT" in environ:
            environ |= {"KVMESH_ROUTER_GOSSIP_PORT": str(free_port()), "KVMESH_ROUTER_HOST": "127.0.0.1"}
            environ["KVMESH_ROUTER_ADVERTISE_HOST"] = "127.0.0.1"
        own = {flag: text for flag, text in here.items() if flag in flags}
        self.flags, self.environ = flags | own, environ
        program = [sys.executable, "-m", *container["command"]]  # `kvmesh worker` is `python -m kvmesh worker`
        program += [f"{flag}={text}" for flag, text in self.flags.items()]
        self.process = psutil.Popen(program, env=os.environ | environ, stdin=subprocess.DEVNULL)

    def port(self, flag: str) -> int:
        return int(self.flags[flag])

    def answers(self, flag: str, path: str) -> bool:
        """Return whether a probe of this path succeeds."""
        assert self.process.poll() is None, "it has ended"
        try:
            with urlopen(f"http://127.0.0.1:{self.port(flag)}{path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def listens_on(self) -> set[int]:
        found = self.process.net_connections(kind="tcp")
        return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for one in started:
        one.stop()


def ports(text: str) -> set[int]:
    first, last = text.split("-")
    return set(range(int(first), int(last) + 1))


def test_a_worker_listens_where_others_may_reach_it(tmp_path: Path, services: list[Service]) -> None:
    worker = Service(tmp_path, "demo-decode")
    services.append(worker)
    until(lambda: worker.answers("--metrics-port", "/health"), what="the readiness probe")
    events, transfer = ports(worker.flags["--kv-events-ports"]), ports(worker.environ["UCX_TCP_PORT_RANGE"])
    found = worker.listens_on()
    assert found <= {worker.port("--port"), worker.port("--metrics-port")} | events | transfer
    assert len(found & events) == 2
    assert found & transfer or choose_backend("auto") != "nixl"
    assert worker.answers("--metrics-port", "/metrics"), "the liveness probe"


def test_a_frontend_listens_where_others_may_reach_it(tmp_path: Path, services: list[Service]) -> None:
    frontend = Service(tmp_path, "demo-frontend")
    services.append(frontend)
    until(lambda: frontend.answers("--port", "/live"), what="the liveness probe")
    gossip = int(frontend.environ["KVMESH_ROUTER_GOSSIP_PORT"])
    assert frontend.listens_on() == {frontend.port("--port"), gossip}
    assert not frontend.answers("--port", "/health"), "no model can be asked yet"


def test_a_router_and_a_picker_listen_where_others_may_reach_them(tmp_path: Path, services: list[Service]) -> None:
    apart = ("router.separate=true", "endpointPicker.enabled=true")
    for workload, flags in (
        ("demo-router", ("--port", "--http-port")),
        ("demo-picker", ("--ext-proc-port", "--http-port")),
    ):
        service = Service(tmp_path, workload, apart)
        services.append(service)
        until(lambda: service.answers("--http-port", "/live"), what="the liveness probe")  # noqa: B023
        assert not service.answers("--http-port", "/health"), "no worker is known yet"
        assert service.listens_on() == {service.port(flag) for flag in (*flags, "--gossip-port")}
