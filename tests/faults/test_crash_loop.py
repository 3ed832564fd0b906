"""One worker that ends again and again does not end the mesh."""

import os
import signal
import time
from pathlib import Path

import httpx
import psutil

from kvmesh.mesh.supervisor import MAX_QUICK_EXITS
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_failed_loudly


def kill_again_and_again(mesh: Mesh, name: str) -> None:
    """Kill a worker each time that its owner has started it, until the owner stops trying."""
    killed: set[int] = set()

    def is_down() -> bool:
        pids = [process.pid for process in mesh.processes() if name in process_arguments(process)]
        for pid in pids:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return bool(health(mesh)["discovery"].get("down"))

    until(is_down, what=f"{name} to be reported as down")
    assert len(killed) >= MAX_QUICK_EXITS


def process_arguments(process: psutil.Process) -> list[str]:
    try:
        return [argument.removeprefix("--name=") for argument in process.cmdline()]
    except psutil.Error:
        return []


def health(mesh: Mesh) -> dict:
    return httpx.get(f"{mesh.url}/health").json()


def test_the_others_serve_and_everybody_can_see_which_worker_is_down(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--engine", "mock", "--kv-transfer", "shm") as mesh:
        kill_again_and_again(mesh, "decode-1")
        report = health(mesh)
        assert report["status"] == "ready"
        assert [down["key"] for down in report["discovery"]["down"]] == ["decode-1"]
        assert mesh.metric("kvmesh_frontend_workers_down") == 1
        answer = mesh.complete("Hello", max_tokens=8)
        assert answer["usage"]["completion_tokens"] == 8


def test_a_request_waits_no_longer_for_a_worker_that_keeps_ending(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--engine", "mock", "--kv-transfer", "shm", "--decode", "1") as mesh:
        stream = Stream(mesh.url, list(range(100, 140)), 400).until_tokens(3)
        kill_again_and_again(mesh, "decode-0")
        down_s = time.monotonic()
        check_failed_loudly(stream.join())
        assert stream.error is not None and stream.error["code"] == "no_worker", stream
        assert "127.0.0.1" not in stream.error["message"]
        assert stream.ended_s - down_s < 5, "its deadline is 600 s away"
