"""The processes that a worker started end with it, however it ends."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from kvmesh.workers.engines.vllm.guard import Guard, start_time
from tests.support.patience import PATIENCE_S

HOST = """
import subprocess, sys
from kvmesh.workers.engines.vllm.guard import Guard
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
guard = Guard()
guard.watch([child.pid])
print(child.pid, guard._process.pid, flush=True)
input()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_worker_that_is_killed_leaves_nothing_behind() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    left = [psutil.Process(int(pid)) for pid in host.stdout.readline().split()]
    host.kill()
    host.communicate()
    _, alive = psutil.wait_procs(left, 10)
    assert alive == []


def test_closing_ends_what_still_runs(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    guard.watch([sleeper.pid])
    guard.close()
    guard.close()
    assert sleeper.wait(PATIENCE_S) == -9


def test_a_process_with_a_reused_number_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    assert guard._process.stdin is not None
    guard._process.stdin.write(f"{sleeper.pid} {int(start_time(sleeper.pid)) - 1}\n")
    guard.close()
    assert sleeper.poll() is None


def test_a_process_that_is_gone_has_no_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    assert start_time(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert start_time(sleeper.pid) == ""
