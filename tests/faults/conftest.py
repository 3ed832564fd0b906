"""Meshes that the fault tests share. After every test all workers are there and nothing is left in flight."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvmesh.kvcache.transfer.nixl import why_unavailable
from tests.support.mesh import Mesh, running_mesh, until

PATIENT = "tests.support.patient_mesh"
LEASE_S = 10.0  # of a KV offer, where a test does not say otherwise; far longer than a slow machine takes to release
PAIR = ("prefill-0", "decode-0", "decode-1")
LONE = ("prefill-0", "decode-0")
IN_FLIGHT = {
    "kvmesh_frontend_inflight",
    "kvmesh_router_in_flight",
    "kvmesh_router_waiting",
    "kvmesh_worker_running_requests",
    "kvmesh_worker_waiting_requests",
    "kvmesh_worker_used_blocks",
    "kvmesh_worker_kv_offers",
}


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a short path: where TMPDIR is too long for sockets, `up` uses another one."""
    with tempfile.TemporaryDirectory(prefix="kvm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--offer-lease-s", str(LEASE_S)]
    with running_mesh(tmp_path_factory.mktemp("mesh"), *flags, module=PATIENT) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def _lone_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--decode", "1", "--offer-lease-s", "3"]
    with running_mesh(tmp_path_factory.mktemp("lone"), *flags, module=PATIENT) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def _nixl_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    if reason := why_unavailable():
        pytest.skip(f"NIXL: {reason}")
    with running_mesh(
        tmp_path_factory.mktemp("nixl"), "--kv-transfer", "nixl", "--offer-lease-s", str(LEASE_S), module=PATIENT
    ) as mesh:
        yield mesh


@pytest.fixture
def mesh(_mesh: Mesh) -> Iterator[Mesh]:
    """Mock engines: one prefill worker, two decode workers."""
    yield from watched(_mesh, PAIR)


@pytest.fixture
def lone_mesh(_lone_mesh: Mesh) -> Iterator[Mesh]:
    """Mock engines: one prefill worker, one decode worker. Offers last for 3 s."""
    yield from watched(_lone_mesh, LONE)


@pytest.fixture
def nixl_mesh(_nixl_mesh: Mesh) -> Iterator[Mesh]:
    """The tiny model, KV over NIXL: one prefill worker, two decode workers."""
    yield from watched(_nixl_mesh, PAIR)


def watched(mesh: Mesh, names: tuple[str, ...]) -> Iterator[Mesh]:
    until(lambda: all_there(mesh, names), what=f"{names} to be there")
    said = {path: path.stat().st_size for path in (mesh.run_dir / "logs").iterdir()}
    yield mesh
    for process in mesh.processes():
        process.send_signal(signal.SIGCONT)
    until(lambda: all_there(mesh, names), what=f"{names} to be there again")
    try:
        until(lambda: not in_flight(mesh))
    finally:
        assert in_flight(mesh) == {}
    for path, size in said.items():
        check_log(path, size)


def check_log(path: Path, start: int) -> None:
    """Faults of others are expected, and so in the log no more than a line each."""
    with path.open("rb") as log:
        log.seek(start)
        said = log.read().decode(errors="replace")
    for bug in ("Traceback", "never retrieved", "never awaited", "engine failed"):
        assert bug not in said, f"{path.name}: {said[max(0, said.index(bug) - 1000) : said.index(bug) + 3000]}"


def all_there(mesh: Mesh, names: tuple[str, ...]) -> bool:
    """Return whether the workers are in discovery and known to the running frontend."""
    workers = mesh.workers()
    if set(workers) != set(names) or not mesh.entries("frontends/"):
        return False
    mesh.find_frontend()
    log = (mesh.run_dir / "logs" / "frontend.log").read_text()  # also of frontends before this one
    if not all(f"worker joined worker={card.worker_id}" in log for card in workers.values()):
        return False
    try:
        return mesh.workers_seen() == len(names)
    except httpx.TransportError:  # it has died, and its entry stands
        return False


def in_flight(mesh: Mesh) -> dict[str, float]:
    """The gauges that are not zero."""
    return {
        f"{process or 'frontend'} {sample.name}": sample.value
        for process in (None, *mesh.workers())
        for sample in mesh.samples(process)
        if sample.name in IN_FLIGHT and sample.value
    }
