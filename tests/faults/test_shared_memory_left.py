"""Shared memory that a run leaves is found, and what other programs leave is not blamed on the run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from kvmesh.lab.faults.quiet import left_on_machine
from kvmesh.lab.hosts.check import left_in_shared_memory

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
PRIVATE = """
import os, sys
from pathlib import Path
from kvmesh.lab.faults.quiet import left_on_machine
from kvmesh.lab.faults.room import PrivateRoom
room = PrivateRoom(Path(sys.argv[1]))
if not room.has_shared_memory:
    sys.exit("a /dev/shm of its own needs root")
assert os.listdir("/dev/shm") == []
Path("/dev/shm/sem.mp-ours").touch()
print(left_on_machine(["no such process"], set(), is_private=True))
room.close()
"""


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A semaphore that another program has left, as Python's multiprocessing names it."""
    path = SHM / f"sem.mp-{uuid4().hex[:8]}"
    path.touch()
    yield path
    path.unlink()


def test_a_semaphore_in_a_common_folder_is_not_blamed_on_the_run(foreign: Path) -> None:
    before = set(os.listdir(SHM)) - {foreign.name}
    assert str(foreign) not in left_in_shared_memory(before)


def test_a_new_file_that_no_process_uses_is_a_leak() -> None:
    before = set(os.listdir(SHM))
    path = SHM / f"kvmesh-test-{uuid4().hex[:8]}"
    path.touch()
    try:
        assert str(path) in left_on_machine(["no such process"], before, is_private=False)
    finally:
        path.unlink()


def test_a_run_with_its_own_folder_sees_its_own_semaphores_alone(tmp_path: Path, foreign: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE, str(tmp_path)], capture_output=True, text=True, env={**os.environ}, timeout=60
    )
    if "needs root" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "['/dev/shm/sem.mp-ours']\n", done.stderr
