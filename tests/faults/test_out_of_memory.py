"""The kernel kills a worker in mid-stream, because its cgroup is at its memory limit."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_mock_answer

LIMIT_BYTES = 512 << 20
FOLDERS = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}  # v1, v2
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
JOIN_AS_VICTIM = f"echo 1000 > /proc/self/oom_score_adj && {JOIN}"  # the kernel kills this process first
EATER = f"held = b'x' * {LIMIT_BYTES}"

ENGINE = ("--engine", "mock", "--kv-transfer", "shm", "--mock-itl-ms", "10")
STREAMS, TOKENS = 8, 600


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Make a cgroup with a memory limit; skip the test where that is not allowed."""
    for folder, limit in FOLDERS.items():
        group = folder / "kvmesh-test-out-of-memory"
        try:
            group.mkdir(exist_ok=True)
            (group / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            until(partial(is_removed, group), what="the cgroup to be empty")
        return
    pytest.skip("no cgroup with a memory limit can be made here")


def is_removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@contextmanager
def inside(cgroup: Path, *argv: str, join: str = JOIN) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python in the cgroup until the block ends."""
    command = ["sh", "-c", join, str(cgroup), sys.executable, *argv]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def worker(mesh: Mesh) -> tuple[str, ...]:
    served = ("--name", "limited", "--role", "aggregated", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny")
    return ("-m", "kvmesh.workers", *served, *ENGINE, "--discovery", f"file:{mesh.run_dir / 'discovery'}")


@pytest.mark.e2e
@pytest.mark.long
def test_streams_continue_when_the_kernel_kills_their_worker_for_memory(tmp_path: Path, cgroup: Path) -> None:
    one = ("--prefill", "0", "--decode", "0", "--aggregated", "1")
    with running_mesh(tmp_path, *one, *ENGINE) as mesh, inside(cgroup, *worker(mesh), join=JOIN_AS_VICTIM) as limited:
        until(lambda: mesh.workers_seen() == 2, what="the frontend to know the limited worker")
        streams = [Stream(mesh.url, prompt_of(200, seed), TOKENS) for seed in range(STREAMS)]
        for stream in streams:
            stream.until_tokens(5)
        assert mesh.metric("kvmesh_worker_running_requests", "limited") > 0
        with inside(cgroup, "-c", EATER):
            assert limited.wait(PATIENCE_S) == -signal.SIGKILL
        for stream in streams:
            check_mock_answer(stream.join())
        assert any(stream.trace["migrations"] for stream in streams)
