"""A mesh whose services are listed in a file: workers die, return on their ports, hang, drain, and are added."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.mesh import until
from tests.support.services import NEW, Services, quiet_port
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.long


class StaticMesh(Services):
    """A frontend, a router by itself and two workers. The frontend listens for those that ask what it shows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.list_path = folder / "mesh.txt"
        self._ports = {name: quiet_port() for name in ("frontend", "router", "a", "b", "c")}
        super().__init__(folder, f"static:{self.list_path}", stack)
        self.write_list("frontend", "router", "a", "b")
        self.frontend = self.start_frontend()
        self.router = self.start("router", NEW, "--port", str(self._ports["router"]))
        for name in ("a", "b"):
            self.worker(name)
        self.until_ready(self.frontend, self.router, "a", "b")
        self.until_joined(self.frontend, 2)

    def start_frontend(self) -> str:
        """Start it with the option that only it needs."""
        self.discovery, plain = f"{self.discovery}?listen=127.0.0.1:{self._ports['frontend']}", self.discovery
        name = self.start("frontend", NEW)
        self.discovery = plain
        return name

    def write_list(self, *names: str) -> None:
        beside = self.list_path.with_suffix(".new")
        beside.write_text("".join(f"127.0.0.1:{self._ports[name]}  # {name}\n" for name in names))
        beside.replace(self.list_path)

    def worker(self, name: str) -> None:
        self.start("aggregated", NEW, "--port", str(self._ports[name]), name=name)

    def answers(self, *workers: str) -> None:
        for worker in workers:
            pin = {"x-kvmesh-worker": worker}
            check_mock_answer(Stream(self.url(self.frontend), list(range(100, 140)), 5, headers=pin).join())

    def asked(self) -> dict[str, str]:
        return {one["address"]: one["said"] for one in self.health(self.frontend)["discovery"]["asked"]}

    def said_of(self, name: str) -> str:
        return self.asked()[f"127.0.0.1:{self._ports[name]}"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticMesh]:
    with ExitStack() as stack:
        yield StaticMesh(tmp_path_factory.mktemp("static"), stack)


def test_services_find_each_other_through_a_list(mesh: StaticMesh) -> None:
    mesh.answers("a", "b")
    for service in (mesh.router, mesh.frontend):
        until(lambda service=service: mesh.metric(service, "kvmesh_router_workers") == 2, what=f"workers at {service}")
        until(lambda service=service: mesh.metric(service, "kvmesh_router_peers") == 1, what=f"the peer of {service}")
    report = mesh.health(mesh.frontend)["discovery"]
    assert (report["place"], report["status"]) == (mesh.discovery, "reached")
    assert mesh.said_of("a") == "answers and shows 1 key"


def test_a_worker_that_is_killed_is_replaced_on_its_port(mesh: StaticMesh) -> None:
    streams = [Stream(mesh.url(mesh.frontend), [n * 50 + i for i in range(1, 40)], 100) for n in range(1, 7)]
    for stream in streams:
        stream.until_tokens(5)
    mesh.kill("a")
    mesh.until_joined(mesh.frontend, 1)
    assert "cannot connect" in mesh.said_of("a")
    for stream in streams:
        check_mock_answer(stream.join())
    assert any(stream.trace["migrations"] for stream in streams)
    mesh.worker("a")
    mesh.until_ready("a")
    mesh.until_joined(mesh.frontend, 2)
    mesh.answers("a", "b")


def test_a_worker_that_hangs_leaves_and_returns(mesh: StaticMesh) -> None:
    mesh.signal("b", signal.SIGSTOP)
    mesh.until_joined(mesh.frontend, 1)
    mesh.answers("a")
    mesh.signal("b", signal.SIGCONT)
    mesh.until_joined(mesh.frontend, 2)
    mesh.answers("b")


def test_a_line_that_is_added_brings_a_worker(mesh: StaticMesh) -> None:
    mesh.worker("c")
    mesh.until_ready("c")
    mesh.write_list("frontend", "router", "a", "b", "c")
    mesh.until_joined(mesh.frontend, 3)
    mesh.answers("c")
    mesh.write_list("frontend", "router", "a", "b")
    mesh.until_joined(mesh.frontend, 2)
    assert mesh.log(mesh.frontend).count("static discovery asks") == 2


def test_a_worker_that_drains_leaves_without_a_wait(mesh: StaticMesh) -> None:
    mesh.stop("b")
    mesh.until_joined(mesh.frontend, 1)
    mesh.answers("a")
    log = mesh.log(mesh.frontend)
    assert "Traceback" not in log, log


def test_without_workers_the_log_says_what_each_address_said(mesh: StaticMesh) -> None:
    mesh.kill("a")

    def lines() -> list[str]:
        """Return the lines of a time when neither worker could be asked."""
        found = [line for line in mesh.log(mesh.frontend).splitlines() if "no worker can be used" in line]
        return [line for line in found if line.count("cannot connect to") == 2]

    until(lambda: bool(lines()), what="the line")
    assert f"searched in {mesh.discovery} (reached), found 0; asked 127.0.0.1:" in lines()[-1]
