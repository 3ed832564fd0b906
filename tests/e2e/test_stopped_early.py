"""A signal before a program is ready: it ends in seconds, with no traceback, and never shows a card."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

LOADS_FOR_EVER = """
import runpy, sys, time
import kvmesh.workers.engines.mock.executor as mock
def load(self):
    print("loading", flush=True)
    time.sleep(600)
mock.MockExecutor.load = load
sys.argv[0] = "kvmesh.workers"
runpy.run_module("kvmesh.workers", run_name="__main__", alter_sys=True)
"""
NO_DISCOVERY_YET = """
import runpy, sys
from kvmesh.mesh.discovery.place import Contact
Contact.on_read = lambda self: print("loading", flush=True)
sys.argv[0] = "{0}"
runpy.run_module("{0}", run_name="__main__", alter_sys=True)
"""
WORKER = ["--role", "decode", "--engine", "mock", "--kv-transfer", "shm", "--model-path", str(CHECKPOINT_DIR)]
STARTS = {
    "worker": [LOADS_FOR_EVER, *WORKER, "--model", "tiny"],
    "frontend": [NO_DISCOVERY_YET.format("kvmesh.frontend"), "--port", "0"],
    "router": [NO_DISCOVERY_YET.format("kvmesh.router")],
}


@pytest.mark.parametrize("service", STARTS)
def test_a_service_that_is_stopped_while_it_starts_ends_soon(service: str, tmp_path: Path) -> None:
    code, *flags = STARTS[service]
    said = tmp_path / "said"
    with said.open("wb") as out:
        command = [sys.executable, "-c", code, *flags, "--discovery", f"file:{tmp_path / 'discovery'}"]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        until(lambda: "loading" in said.read_text(), what="the start")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    text = said.read_text()
    assert "Traceback" not in text and ": ready " not in text and "stopped" in text, text
    assert not list((tmp_path / "discovery").glob("*.key"))


SIGNALLED_IN_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may be a background job, which ignores it
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == "{at}":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Signal())
sys.argv[0] = "{module}"
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""
IMPORTED = {  # module that is imported in the middle of the start, flags
    "up": ("kvmesh", "kvmesh.cluster.running", "up"),
    "demo": ("kvmesh", "kvmesh.cluster.running", "demo"),
    "worker": ("kvmesh.workers", "kvmesh.workers.service", *WORKER),
    "frontend": ("kvmesh.frontend", "kvmesh.frontend.service", "--port", "0"),
    "router": ("kvmesh.router", "uvloop"),
    "planner": ("kvmesh.planner", "kvmesh.planner.service"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("program", IMPORTED)
def test_a_signal_during_the_imports_ends_a_program_with_one_line(program: str, number: signal.Signals) -> None:
    module, at, *flags = IMPORTED[program]
    code = SIGNALLED_IN_IMPORT.format(module=module, at=at, number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"stopped by {number.name} while starting\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_mesh_that_is_stopped_while_its_processes_start_leaves_none(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvmesh", "up", "--port", "0", "--engine", "mock", "--run-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        mesh = psutil.Process(process.pid)
        until(lambda: len(mesh.children()) == 4, what="the processes of the mesh")
        children = mesh.children()
        process.send_signal(number)
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "Traceback" not in said and said.endswith("stopped\n"), said
    assert not any(child.is_running() for child in children)
    assert not any("Traceback" in log.read_text() for log in (tmp_path / "logs").glob("*.log"))
