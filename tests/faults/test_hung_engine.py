"""An engine that makes no progress while its process answers: its streams go on elsewhere, its process ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.faults.prompts import LENGTHS, prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_mock_answer

HANGING = {
    "a thread in a step": ("tests.support.stuck_worker", "--mock-speedup", "0"),
    "a step of half an hour": ("kvmesh.workers", "--mock-itl-ms", "1800000"),
}


@contextmanager
def third_worker(mesh: Mesh, module: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Run another decode worker in the mesh, which hangs while it decodes."""
    command = [sys.executable, "-m", module, "--name", "decode-hung", "--role", "decode", "--engine", "mock"]
    command += ["--model-path", str(CHECKPOINT_DIR), "--model", "tiny", "--kv-transfer", "shm"]
    command += ["--discovery", f"file:{mesh.run_dir / 'discovery'}", "--stall-timeout-s", "1", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: mesh.workers_seen() == 4, what="the frontend to know the third decode worker")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", HANGING)
def test_its_streams_continue_elsewhere_and_its_process_ends(tmp_path: Path, kind: str) -> None:
    with (
        running_mesh(tmp_path, "--engine", "mock", "--kv-transfer", "shm") as mesh,
        third_worker(mesh, *HANGING[kind]) as hung,
    ):
        streams = [Stream(mesh.url, prompt_of(n, seed), 40) for n in LENGTHS for seed in (1, 2, 3)]
        for stream in streams:
            check_mock_answer(stream.join())
        moved = [stream for stream in streams if stream.trace["migrations"]]
        assert moved, "no request came to the worker that hangs"
        assert hung.wait(PATIENCE_S) == 1
        assert hung.stderr is not None
        assert "hangs: a step of" in hung.stderr.read()
        until(lambda: mesh.metric("kvmesh_router_in_flight") == 0)
