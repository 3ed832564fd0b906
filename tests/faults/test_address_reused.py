"""A worker of another model starts at the address of a worker that was killed, while the old card still stands."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_mock_answer


@contextmanager
def worker(mesh: Mesh, port: int, model: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "kvmesh.workers",
        "--name",
        f"of-{model}",
        "--role",
        "aggregated",
        "--engine",
        "mock",
    ]
    command += ["--model-path", str(CHECKPOINT_DIR), "--model", model, "--kv-transfer", "shm", "--port", str(port)]
    command += ["--discovery", f"file:{mesh.run_dir / 'discovery'}"]

    def number_seen() -> int:
        return sum(httpx.get(f"{mesh.url}/health").json()["workers"].get(model, {}).values())

    before = number_seen()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: number_seen() == before + 1, what=f"the frontend to know the worker of {model}")
            yield process
        finally:
            process.kill()


def test_no_request_for_the_killed_worker_fails(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--engine", "mock", "--kv-transfer", "shm") as mesh, worker(mesh, 0, "tiny") as first:
        port = int(mesh.workers()["of-tiny"].address.rpartition(":")[2])
        first.kill()
        first.wait()
        with worker(mesh, port, "other"):
            streams = [Stream(mesh.url, prompt_of(60, seed), 10) for seed in range(30)]
            for stream in streams:
                check_mock_answer(stream.join())
