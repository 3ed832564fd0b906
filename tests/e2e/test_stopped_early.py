"""SIGTERM before a service is ready: it ends in seconds, with code 0 and no traceback, and never shows a card."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.tiny_model import CHECKPOINT_DIR
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

LOADS_FOR_EVER = """
import runpy, sys, time
import workers.engines.mock.executor as mock
def load(self):
    print("loading", flush=True)
    time.sleep(600)
mock.MockExecutor.load = load
sys.argv[0] = "workers"
runpy.run_module("workers", run_name="__main__", alter_sys=True)
"""
NO_DISCOVERY_YET = """
import runpy, sys
from mesh.discovery.place import Contact
Contact.on_read = lambda self: print("loading", flush=True)
sys.argv[0] = "{0}"
runpy.run_module("{0}", run_name="__main__", alter_sys=True)
"""
WORKER = ["--role", "decode", "--engine", "mock", "--kv-transfer", "shm", "--model-path", str(CHECKPOINT_DIR)]
STARTS = {
    "worker": [LOADS_FOR_EVER, *WORKER, "--model", "tiny"],
    "frontend": [NO_DISCOVERY_YET.format("frontend"), "--port", "0"],
    "router": [NO_DISCOVERY_YET.format("router")],
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
