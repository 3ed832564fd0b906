"""Sections of docs/cluster.md for several hosts: their commands, run on three hosts, lead to the first token."""

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.hosts.lab import HostProcess, Lab, LabError, lab, why_not
from tests.support.guide import commands_of
from tests.support.patience import PATIENCE_S

SERVICES = ("etcd ", "nats-server ", "kvmesh frontend ", "kvmesh worker ")
_ADDRESS = re.compile(r"--(?:advertise-)?host 10\.0\.0\.(\d)")


@pytest.fixture
def three_hosts(tmp_path: Path) -> Iterator[Lab]:
    if not os.environ.get("KVMESH_TEST_HOSTS"):
        pytest.skip("hosts: run `make test-hosts`")
    if problem := why_not():
        pytest.fail(problem)
    with lab(tmp_path, ("one", "two", "three"), "10.0.0") as made:
        yield made
    assert made.leftovers() == []


class Guide:
    """Runs commands where the guide says: a service on the host that it advertises, all others on the first."""

    def __init__(self, made: Lab) -> None:
        self.lab = made
        self.folder = made.folder / "work"
        self.folder.mkdir()
        self.models = made.folder / "models"
        for name in ("tiny", "llama-3.1-8b"):
            shutil.copytree(CHECKPOINT_DIR, self.models / name)
        self.services: list[HostProcess] = []

    def run(self, command: str) -> str:
        found = _ADDRESS.search(command)
        host = list(self.lab.hosts.values())[int(found[1]) - 1 if found else 0]
        programs = Path(sys.executable).parent
        ours = command.replace("/models/", f"{self.models}/")
        script = f"cd {shlex.quote(str(self.folder))}; export PATH={programs}:$PATH HOME={self.lab.folder}; {ours}"
        if not command.startswith(SERVICES):
            return host.run("bash", "-c", script)
        script = script.replace(f"; {ours}", f"; exec {ours}")
        self.services.append(host.start(f"service-{len(self.services)}", "bash", "-c", script))
        return ""

    def wait_for_workers(self, url: str, workers: int) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                health = json.loads(self.lab.hosts["one"].run("curl", "-s", f"{url}/health"))
            except (LabError, json.JSONDecodeError):
                health = {}
            if sum(sum(counts.values()) for counts in health.get("workers", {}).values()) >= workers:
                return
            dead = [service for service in self.services if service.process.poll() is not None]
            assert not dead, dead[0].log()
            assert time.monotonic() < ends_s, health
            time.sleep(0.1)


@pytest.mark.parametrize(("section", "workers"), [("Hosts", 3), ("A list of addresses", 2)])
def test_the_commands_lead_to_the_first_token(three_hosts: Lab, section: str, workers: int) -> None:
    guide = Guide(three_hosts)
    answers: list[str] = []
    for command in commands_of("cluster.md", section):
        if command.startswith("curl") and "/v1/" in command:
            guide.wait_for_workers("http://10.0.0.1:8000", 2)
            answers.append(json.loads(guide.run(command))["choices"][0]["message"]["content"])
        elif "--cluster" in command:
            assert "all pairs are well" in guide.run(command)
        else:
            guide.run(command)
    guide.wait_for_workers("http://10.0.0.1:8000", workers)
    assert len(answers) == 1
    assert answers[0]
