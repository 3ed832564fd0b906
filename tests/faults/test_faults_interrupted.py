"""An interrupted `kvmesh lab faults` leaves no process: neither its servers nor one that a fault has stopped."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.mesh import until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.long


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("how", [(signal.SIGINT,) * 3, (signal.SIGTERM, signal.SIGINT), (signal.SIGKILL,)])
def test_nothing_runs_after_an_interrupted_run(tmp_path: Path, how: tuple[signal.Signals, ...]) -> None:
    command = [sys.executable, "-m", "kvmesh", "faults", "--seed", "2", "--seconds", "60", "--only", "delay"]
    told = tmp_path / "out"
    with told.open("wb") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "TMPDIR": str(tmp_path)})
    children: dict[int, psutil.Process] = {}

    def has_all() -> bool:
        children.update({child.pid: child for child in psutil.Process(run.pid).children(recursive=True)})
        return (
            len([child for child in children.values() if is_alive(child)]) >= 8
        )  # no etcd or NATS where it is missing

    try:
        until(lambda: has_all() and "delay" in told.read_text(), what="the first fault")
        for child in [child for child in children.values() if is_alive(child)][::3]:
            child.suspend()
        for number in how:
            run.send_signal(number)
            time.sleep(0.05)
        run.wait(PATIENCE_S)
        until(lambda: not any(is_alive(child) for child in children.values()), what="the processes to end")
    finally:
        for child in [run, *children.values()]:
            with suppress(psutil.NoSuchProcess):
                child.kill()
