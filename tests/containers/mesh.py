"""The mesh of docker-compose.yml in containers, under a project of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine
from tests.containers.images import ROOT, Images
from tests.support.guide import commands_of
from tests.support.ports import free_port

PROJECT = f"kvmesh-test-{os.getpid()}"
WAIT_S = 180.0
EAGER_PLANNER = ROOT / "tests" / "containers" / "eager-planner.yml"
READ_METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"

SHIM = """\
#!/bin/sh
# `docker` as docs/cluster.md says it, for the engine and the project of this test. The images are built already.
if [ "$1" != compose ]; then exec {cli} "$@"; fi
shift
case "$1" in
  build) exit 0 ;;
  exec) shift; set -- exec -T "$@" ;;
esac
exec {compose} -p {project} "$@"
"""


class ComposedMesh:
    """Runs the guide's commands, and says what the containers do."""

    def __init__(self, engine: Engine, images: Images, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self.ports = {"8000": free_port(), "8090": free_port(), "9090": free_port()}
        self._environ = {
            **engine.environ,
            **images.environ,
            "KVMESH_PORT": str(self.ports["8000"]),
            "KVMESH_PLANNER_PORT": str(self.ports["8090"]),
            "KVMESH_PROMETHEUS_PORT": str(self.ports["9090"]),
            "KVMESH_SECRETS": str(folder / "secrets"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        shim = folder / "bin" / "docker"
        shim.parent.mkdir()
        words = {"cli": shlex.join(engine.cli), "compose": shlex.join(engine.compose), "project": PROJECT}
        shim.write_text(SHIM.format(**words))
        shim.chmod(0o755)

    # --- commands of the guide ------------------------------------------------------------------------

    def guided(self, command: str) -> str:
        """Run a command of the guide, and return what it prints. `command` is all of it, or ends with "..."."""
        return self.shell(guide_line(command))

    def shell(self, line: str, timeout_s: float = 300.0) -> str:
        done = subprocess.run(
            self._bash(line), **self._surroundings(), capture_output=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return str(done.stdout)

    def start(self, line: str, log: Path) -> "subprocess.Popen[str]":
        """Start a command of the guide that goes on until it is stopped."""
        with log.open("w") as out:
            return subprocess.Popen(self._bash(f"exec {line}"), **self._surroundings(), stdout=out, stderr=out)

    def _bash(self, line: str) -> list[str]:
        """Return the command with this test's ports, secrets and Python."""
        for port, here in self.ports.items():
            line = re.sub(rf"127\.0\.0\.1:{port}\b", f"127.0.0.1:{here}", line)
        if "planner apply" in line:
            line += f" --url http://127.0.0.1:{self.ports['8090']}"
        line = line.replace("secrets/", f"{self._folder}/secrets/")
        line = line.replace(".venv/bin/kvmesh", f"{sys.executable} -m kvmesh")
        return ["bash", "-c", line]

    def _surroundings(self) -> dict[str, Any]:
        return {"cwd": ROOT, "env": self._environ, "stdin": subprocess.DEVNULL, "text": True}

    def compose(self, *words: str, **environ: str) -> str:
        return self.engine.run_compose("-p", PROJECT, *words, environ={**self._environ, **environ})

    # --- what runs ------------------------------------------------------------------------------------

    def containers(self, *services: str) -> list[dict[str, Any]]:
        return self.engine.inspect(*self.engine.ids(PROJECT, *services))

    def are_healthy(self, service: str, count: int) -> bool:
        found = self.containers(service)
        return len(found) == count and all(one["State"].get("Health", {}).get("Status") == "healthy" for one in found)

    def health(self) -> Mapping[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['8000']}/health", timeout=5) as answer:
                report: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            report = json.load(error)
        except OSError:
            return {"workers": {}}
        return report

    def workers(self) -> dict[str, int]:
        """Return how many workers of each role the frontend knows."""
        known: dict[str, int] = self.health()["workers"].get("tiny", {})
        return known

    def ask(self, prompt: str, max_tokens: int = 24, **more: Any) -> dict[str, Any]:
        """Return the answer. Raises urllib.error.HTTPError."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "tiny", "max_tokens": max_tokens, "messages": messages, "kvmesh": {"trace": True}, **more}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['8000']}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            reply: dict[str, Any] = json.load(answer)
        return reply

    def counted(self, container: str, port: int, name: str, labels: str = "") -> float:
        """Return the sum of a metric of a container. `labels`: a part of the text between the braces."""
        page = self.engine.run("exec", container, "python", "-c", READ_METRICS.format(port=port))
        found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
        return sum(float(value) for given, value in found if labels in given)

    def pulls(self) -> dict[str, float]:
        """Return the sums of all decode workers' pulls over NIXL: their number and bytes."""
        workers = self.engine.ids(PROJECT, "decode")
        names = ("kv_pulls_total", "kv_pulled_bytes_total")
        nixl = 'backend="nixl"'
        return {name: sum(self.counted(one, 9100, f"kvmesh_worker_{name}", nixl) for one in workers) for name in names}

    def until(self, condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> float:
        """Wait, and return for how long."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < wait_s, f"{what}: not within {wait_s:g} s\n{self.logs()}"
            time.sleep(0.5)
        return time.monotonic() - began

    def logs(self) -> str:
        parts = []
        for container in self.containers():
            said = self.engine.logs(container["Id"])
            parts.append(f"--- {container['Name']} {container['State']['Status']}\n{said}")
        return "\n".join(parts)

    def down(self) -> None:
        self.compose("--profile", "observability", "down", "--volumes", "--remove-orphans")


def guide_lines() -> list[str]:
    return [line.partition(" # ")[0] for line in commands_of("cluster.md", "Compose")]


def guide_line(command: str) -> str:
    """Return the one line of the guide that is `command`, or begins with it if it ends with "..."."""
    lines = guide_lines()
    beginning, dots, _ = command.partition("...")
    found = [line for line in lines if line == command or (dots and line.startswith(beginning))]
    assert len(found) == 1, f"docs/cluster.md, Compose, has {len(found)} commands {command!r}"
    return found[0]
