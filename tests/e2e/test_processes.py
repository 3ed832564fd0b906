"""Several frontends on one port: requests go to all of them, and their metrics are those of one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kvmesh.protocol.messages import FrontendCard, decode
from tests.support.mesh import TRUSTED, Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.long]
BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}


def cards(mesh: Mesh) -> list[FrontendCard]:
    return [decode(value, FrontendCard) for value in mesh.entries("frontends/many").values()]


@contextmanager
def many_frontends(mesh: Mesh, processes: int) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--processes", str(processes), "--name", "many", "--port", "0", "--drain-notice-s", "0.5"]
    discovery = f"file:{mesh.run_dir / 'discovery'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmesh.frontend", *flags, "--discovery", discovery, "--log-level", "warning"]
    )
    try:
        until(lambda: len(cards(mesh)) == processes, what="all frontends")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    one = ["--prefill", "0", "--decode", "0", "--aggregated", "1"]
    flags = ["--engine", "mock", "--mock-speedup", "0", "--kv-transfer", "shm", *one]
    with running_mesh(tmp_path_factory.mktemp("mesh"), *flags) as running:
        yield running


def complete(url: str, prompt: str = "Once") -> str:
    """Over a connection of its own, which the kernel gives to any of the processes."""
    response = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": prompt}, timeout=30, verify=TRUSTED)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_requests_spread_and_every_process_counts_all(mesh: Mesh) -> None:
    with many_frontends(mesh, 2) as parent:
        first, second = cards(mesh)
        assert first.url == second.url
        assert first.pid != second.pid
        health = f"{first.url}/health"
        until(lambda: httpx.get(health, verify=TRUSTED).status_code == 200, what="a frontend that is ready")
        assert len({complete(first.url) for _ in range(30)}) == 1
        labels = {"endpoint": "completions", "outcome": "ok"}

        def done() -> float:
            return mesh.metric("kvmesh_frontend_requests_total", url=f"{first.url}/metrics", **labels)

        until(lambda: done() == 30, what="the end of all requests")
        assert [done() for _ in range(4)] == [30] * 4, "each process gives the sum"
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: {card.pid for card in cards(mesh)} - {first.pid, second.pid} != set(), what="its successor")
        assert complete(first.url) == complete(second.url)
    assert parent.returncode == 128 + signal.SIGTERM or parent.returncode == 0
    assert cards(mesh) == []


def test_new_processes_take_over_and_no_client_notices(mesh: Mesh) -> None:
    """SIGHUP: each new process listens on the port before an old one leaves it."""
    with many_frontends(mesh, 2) as parent:
        url, before = cards(mesh)[0].url, {card.pid for card in cards(mesh)}
        until(lambda: httpx.get(f"{url}/health", verify=TRUSTED).status_code == 200, what="a frontend that is ready")
        kept = httpx.Client(verify=TRUSTED, timeout=PATIENCE_S)
        parent.send_signal(signal.SIGHUP)
        texts: set[str] = set()
        while before & {card.pid for card in cards(mesh)} or len(cards(mesh)) != 2:
            texts.add(complete(url))
            texts.add(kept.post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["text"])
        assert len(texts) == 1
        until(lambda: not any(psutil.pid_exists(pid) for pid in before), what="the old processes to end")
        assert complete(url) in texts
        kept.close()


def test_gauges_of_several_processes_say_what_one_would(mesh: Mesh) -> None:
    """The frontend of the mesh is one process, and knows the same workers."""
    alike = ("router_workers", "router_index_blocks", "router_index_orphan_blocks", "frontend_models_ready")
    own = ("router_in_flight", "router_waiting", "frontend_inflight")
    with many_frontends(mesh, 2):
        url = cards(mesh)[0].url
        until(lambda: httpx.get(f"{url}/health", verify=TRUSTED).status_code == 200, what="a frontend that is ready")
        for number in range(12):
            complete(url, f"{number} " + "Once upon a time there was a mesh. " * 8)

        def read(name: str, of: str) -> float:
            return mesh.metric(f"kvmesh_{name}", url=f"{of}/metrics")

        # KV events arrive after the answers: before the first one, both indexes are equal and empty.
        until(lambda: read("router_index_blocks", url) >= 12, what="the blocks of 12 prompts in the index")
        for name in alike:
            until(lambda name=name: read(name, url) == read(name, mesh.url), what=f"equal {name}")
        assert read("router_workers", url) == 1
        until(lambda: [read(name, url) for name in own] == [0, 0, 0], what="the end of all requests")
        counts = ("router_place_seconds_count", "router_wait_seconds_count")
        assert [read(name, url) for name in counts] == [12, 12]
        assert mesh.metric("kvmesh_frontend_ttft_seconds_count", url=f"{url}/metrics", endpoint="completions") == 12
        until(lambda: read("router_peers", url) == 2, what="two peers: a sibling and the frontend of the mesh")


def test_a_taken_port_is_an_error_and_leaves_no_process(mesh: Mesh, tmp_path: Path) -> None:
    port = mesh.url.rpartition(":")[2]
    flags = ["--processes", "2", "--port", port, "--discovery", f"file:{tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "kvmesh.frontend", *flags], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert b"choose another port" in done.stderr


def test_up_with_several_frontend_processes_is_up(tmp_path: Path) -> None:
    flags = ["--engine", "mock", "--mock-speedup", "0", "--kv-transfer", "shm", "--prefill", "0", "--decode", "1"]
    with running_mesh(tmp_path / "mesh", *flags, env={"KVMESH_FRONTEND_PROCESSES": "2"}) as mesh:
        until(lambda: len(mesh.entries("frontends/")) == 2, what="both frontends")
        assert complete(mesh.url)
