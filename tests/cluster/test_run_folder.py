"""The folder of a mesh that was killed is removed by the next one, and no other folder."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.cluster.run_folder import OWNER, claim, hold, let_go, remove_left_folders
from kvmesh.protocol.errors import ConfigError

HOLD = """
import sys
from pathlib import Path
from kvmesh.cluster import run_folder
getattr(run_folder, sys.argv[2])(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    (made / "logs").mkdir(parents=True)
    (made / "logs" / "worker.log").write_text("x")
    return made


@contextmanager
def mesh_in(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder by the function `how`."""
    command = [sys.executable, "-c", HOLD, str(folder), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mesh:
        assert mesh.stdout is not None and mesh.stdout.readline() == "held\n"
        yield mesh


def test_only_the_folder_of_a_killed_mesh_is_removed(tmp_path: Path) -> None:
    running, killed = folder(tmp_path, "kvmesh-a"), folder(tmp_path, "kvmesh-b")
    kept, other = folder(tmp_path, "kvmesh-kept"), folder(tmp_path, "other")
    (other / OWNER).touch()
    claim(running)
    claim(kept)
    let_go(kept, keep=True)  # a mesh that failed leaves its logs on purpose
    with mesh_in(killed, "claim") as mesh:
        assert remove_left_folders(tmp_path) == [], "both run"
        mesh.kill()
        mesh.wait()
    assert remove_left_folders(tmp_path) == [killed]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvmesh-a", "kvmesh-kept", "other"]
    let_go(running, keep=False)
    assert not running.exists() and remove_left_folders(tmp_path) == []


def test_a_second_mesh_in_a_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with mesh_in(tmp_path, "hold") as mesh:
        with pytest.raises(ConfigError, match=f"as process {mesh.pid}; stop it, or give another --run-dir"):
            hold(tmp_path)
        command = [sys.executable, "-m", "kvmesh", "up", "--port", "0", "--engine", "mock", "--run-dir", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (second.returncode, f"as process {mesh.pid};" in second.stderr) == (2, True), second
        assert second.stderr.count("\n") == 1 and not (tmp_path / "control").exists()
        mesh.kill()
        mesh.wait()
    hold(tmp_path)  # the system lets go of the lock of a killed mesh
    let_go(tmp_path, keep=False)
    hold(tmp_path)
    assert (tmp_path / ".lock").read_text() == str(os.getpid())
    let_go(tmp_path, keep=False)


def test_a_file_system_without_locks_is_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    hold(tmp_path)
    let_go(tmp_path, keep=False)
