"""Shutting down politely: what is in flight finishes, nothing new begins, nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmesh.cluster.control import CONTROL_PREFIX
from kvmesh.cluster.run_folder import LEFT_SUFFIX
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, _wait_for_banner, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_failed_loudly, check_mock_answer


class OwnMesh:
    """Start `kvmesh up`, which makes its run directory itself, below `tmp`."""

    def __init__(self, tmp: Path, *flags: str) -> None:
        self.tmp = tmp
        before = set(tmp.glob("kvmesh-*"))
        command = [sys.executable, "-m", "kvmesh", "up", "--port", "0", "--engine", "mock", "--kv-transfer", "shm"]
        self.process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(tmp)}
        )

        def run_dirs() -> set[Path]:  # without sockets, and what is being removed
            others = {*tmp.glob(f"{CONTROL_PREFIX}*"), *tmp.glob(f"*{LEFT_SUFFIX}")}
            return set(tmp.glob("kvmesh-*")) - before - others

        until(lambda: run_dirs() or self.process.poll() is not None)
        [run_dir] = run_dirs()
        self.mesh = Mesh(self.process, run_dir)
        _wait_for_banner(self.mesh)
        self.processes = self.mesh.processes()

    def check_nothing_is_left(self) -> None:
        assert [p for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        assert list(self.tmp.iterdir()) == []


@pytest.fixture
def own(short_tmp: Path) -> Iterator[OwnMesh]:
    own = OwnMesh(short_tmp)
    yield own
    if own.process.poll() is None:
        own.process.kill()
    own.process.wait()


def test_ctrl_c_lets_streams_finish_and_takes_no_new_clients(own: OwnMesh) -> None:
    mesh = own.mesh
    streams = [Stream(mesh.url, prompt_of(n, n), 100) for n in LENGTHS]
    waiting = [Stream(mesh.url, prompt_of(n, 5 + n), 30, kvmesh={"trace": True, "disaggregate": True}) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    own.process.send_signal(signal.SIGINT)
    until(lambda: "draining" in (mesh.run_dir / "logs" / "frontend.log").read_text(), what="the drain to begin")
    until(lambda: "ConnectionRefused" in Stream(mesh.url, prompt_of(20), 5).join().broken, what="clients to be refused")
    for stream in streams + waiting:
        check_mock_answer(stream.join())
        assert stream.trace["migrations"] == 0, "workers stay until the frontend is done"
    assert own.process.wait(PATIENCE_S) == 0
    own.check_nothing_is_left()


def test_streams_longer_than_the_drain_end_with_an_error(short_tmp: Path) -> None:
    own = OwnMesh(short_tmp, "--drain-timeout-s", "0.3")
    streams = [Stream(own.mesh.url, prompt_of(n, n), 5000) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(PATIENCE_S) == 0
    for stream in streams:
        check_failed_loudly(stream.join())
    own.check_nothing_is_left()


def test_a_second_ctrl_c_does_not_wait(own: OwnMesh) -> None:
    stream = Stream(own.mesh.url, prompt_of(20), 20000).until_tokens(5)
    own.process.send_signal(signal.SIGINT)
    until(lambda: "draining" in (own.mesh.run_dir / "logs" / "frontend.log").read_text(), what="the drain to begin")
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(15) == 128 + signal.SIGINT
    assert not stream.join().is_done
    own.check_nothing_is_left()


def test_a_terminated_decode_worker_finishes_its_streams_and_is_replaced(mesh: Mesh) -> None:
    streams = [Stream(mesh.url, prompt_of(n, n), 300) for n in LENGTHS]
    for stream in streams:
        stream.until_tokens(5)
    old = mesh.workers()["decode-0"]
    assert mesh.metric("kvmesh_worker_running_requests", "decode-0") > 0
    os.kill(old.pid, signal.SIGTERM)
    until(lambda: f"workers/{old.worker_id}" not in mesh.entries("workers/"), what="its card to be withdrawn")
    new = [Stream(mesh.url, prompt_of(n, 3 + n), 20, kvmesh={"trace": True, "disaggregate": True}) for n in LENGTHS]
    for stream in new:
        check_mock_answer(stream.join())
    assert psutil.pid_exists(old.pid), "it still works"
    for stream in streams:
        check_mock_answer(stream.join())
        assert stream.trace["migrations"] == 0
    assert {stream.trace["decode_worker"] for stream in streams} == {"decode-0", "decode-1"}
    assert {stream.trace["decode_worker"] for stream in new} == {"decode-1"}
    mesh.until_replaced("decode-0", old.pid)


def test_a_terminated_prefill_worker_hands_over_what_it_offers(mesh: Mesh) -> None:
    pinned = {"kvmesh": {"trace": True, "disaggregate": True, "worker": "decode-0"}, "cache_salt": "leaving"}
    with mesh.stopped("decode-0"):
        streams = [Stream(mesh.url, prompt_of(n, n), 20, **pinned) for n in LENGTHS]
        until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(streams), what="offers")
        old = mesh.pid("prefill-0")
        mesh.signal("prefill-0", signal.SIGTERM)
        until(lambda: "prefill-0" not in mesh.workers(), what="its card to be withdrawn")
    for stream in streams:
        check_mock_answer(stream.join())
        assert (stream.trace["pull_error"], stream.trace["migrations"]) == ("", 0)
        assert stream.trace["kv_bytes_pulled"] > 0
    mesh.until_replaced("prefill-0", old)


def test_a_rolling_restart_under_load_fails_no_request(mesh: Mesh) -> None:
    stop = threading.Event()
    done: list[Stream] = []

    def client(number: int) -> None:
        for i in range(10**6):
            if stop.is_set():
                return
            stream = Stream(mesh.url, prompt_of(20 + 10 * number, 100 * number + i), 20)
            done.append(stream.join())

    clients = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in clients:
        thread.start()
    for name in ("decode-0", "decode-1", "prefill-0"):
        pid = mesh.pid(name)
        mesh.signal(name, signal.SIGTERM)
        mesh.until_replaced(name, pid)
    stop.set()
    for thread in clients:
        thread.join()
    assert len(done) > 10
    for stream in done:
        check_mock_answer(stream)
