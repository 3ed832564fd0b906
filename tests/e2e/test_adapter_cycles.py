"""An adapter that is loaded and unloaded again and again leaves nothing behind in any process."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.messages import Control, ControlAction, ControlReply
from tests.support import mesh_tls
from tests.support.held import Held, held_by
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S

NAME = "poet"
MOST_MIB = 8.0  # that may be more after the last cycle than after the first tenth


@contextmanager
def adapter_worker(mesh: Mesh) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "tests.support.adapter_worker",
        "kvmesh.workers",
        "--name",
        "cycles",
        "--role",
        "decode",
    ]
    command += ["--engine", "mock", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny", "--kv-transfer", "shm"]
    command += ["--discovery", f"file:{mesh.run_dir / 'discovery'}", "--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            until(lambda: mesh.workers_seen() == 2, what="the frontend to know the worker")
            yield process
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


async def control(mesh: Mesh, action: ControlAction) -> None:
    plane = PlaneClient(mesh_tls.operator())
    request = Control(action=action, arguments={"name": NAME, "path": "/p"})
    await plane.ask(mesh.workers()["cycles"].address, "control", request, ControlReply, 10)
    await plane.close()


def status_of(http: httpx.Client) -> int:
    return http.post("/v1/completions", json={"model": NAME, "prompt": [5, 6, 7], "max_tokens": 2}).status_code


@pytest.mark.parametrize("cycles", [20, pytest.param(2000, marks=[pytest.mark.weekly, pytest.mark.timeout(1800)])])
def test_cycles_of_load_and_unload_leave_threads_descriptors_and_memory_flat(tmp_path: Path, cycles: int) -> None:
    flags = ["--engine", "mock", "--kv-transfer", "shm", "--prefill", "0", "--decode", "1", "--log-level", "warning"]
    with running_mesh(tmp_path, *flags) as mesh, adapter_worker(mesh) as worker, mesh.http as http:
        frontend = mesh.find_frontend().pid
        before: Mapping[int, Held] = {}
        for cycle in range(cycles):
            asyncio.run(control(mesh, ControlAction.LOAD_LORA))
            until(lambda: status_of(http) == 200, what="the adapter to answer")
            asyncio.run(control(mesh, ControlAction.UNLOAD_LORA))
            until(lambda: status_of(http) == 404, what="the adapter to be gone")
            if cycle == cycles // 10:
                before = {pid: held_by(pid) for pid in (worker.pid, frontend)}
        for pid, then in before.items():
            now = held_by(pid)
            print(psutil.Process(pid).cmdline()[:5], then, now)
            assert now.threads <= then.threads + 2
            assert now.fds <= then.fds + 4
            assert now.private_mib <= then.private_mib + MOST_MIB
