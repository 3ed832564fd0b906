"""The commands of docs/cluster.md, "A list of addresses", lead to a first token."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.guide import commands_of
from tests.support.mesh import until
from tests.support.services import quiet_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]
MODEL = "llama-3.1-8b"


def test_the_commands_of_the_guide_lead_to_a_first_token(tmp_path: Path) -> None:
    """The three hosts are three addresses of this one, and the engine is the mock one."""
    (tmp_path / MODEL).symlink_to(CHECKPOINT_DIR)
    ports = {port: str(quiet_port()) for port in ("7001", "7002", "8000")}
    environ = os.environ | {
        "KVMESH_WORKER_ENGINE": "mock",
        "KVMESH_WORKER_MODEL": MODEL,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    def here(command: str) -> str:
        for said, meant in {**ports, "10.0.0.": "127.0.0.", "/models/": f"{tmp_path}/"}.items():
            command = command.replace(said, meant)
        words = command.split(" ", 1)
        return " ".join([{"kvmesh": f"{sys.executable} -m kvmesh"}.get(words[0], words[0]), *words[1:]])

    write, *services, doctor, ask = [here(command) for command in commands_of("cluster.md", "A list of addresses")]
    subprocess.run(["bash", "-c", write], cwd=tmp_path, check=True)
    with ExitStack() as stack:
        logs = [tmp_path / f"{number}.log" for number in range(len(services))]
        for command, path in zip(services, logs, strict=True):
            with path.open("wb") as log:
                process = subprocess.Popen(command.split(), cwd=tmp_path, env=environ, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        until(lambda: all(" ready " in path.read_text() for path in logs), what="the services")
        until(lambda: logs[-1].read_text().count("worker joined") == 2, what="both workers at the frontend")
        answer = json.loads(subprocess.check_output(["bash", "-c", ask], env=environ, stderr=subprocess.DEVNULL))
        assert answer["choices"][0]["message"]["content"]
        said = subprocess.run(
            ["bash", "-c", f"{doctor} --json"], cwd=tmp_path, env=environ, capture_output=True, check=False
        )
        found = {one["name"]: one["found"] for one in json.loads(said.stdout)["findings"]}
        assert found["discovery"] == "2 of 2 addresses of static:mesh.txt answer"
        assert "registered services: 2 of kvmesh" in found["versions"]
