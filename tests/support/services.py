"""Services in processes of their own, of this release or of another one, that meet in one place."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support import mesh_tls
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
WORKER_FLAGS = ("--engine", "mock", "--mock-itl-ms", "15", "--model", "tiny")


def quiet_port() -> int:
    """Return a free port that no client gets by chance before a service listens there: those have higher ones."""
    while True:
        port = random.randint(10_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(frozen=True)
class Release:
    """Describe how a service of a release is started."""

    name: str  # in the names of its services
    command: Sequence[str] = (sys.executable, "-m")
    folder: Path = ROOT
    environ: Mapping[str, str] = field(default_factory=dict)


NEW = Release("new")


def claiming(protocol: int, oldest: int, release: str) -> Release:
    """Return this release, except that it says that it speaks another protocol."""
    return Release("other", (sys.executable, "-m", "tests.support.other_release", str(protocol), str(oldest), release))


class Services:
    """Services that meet in one place. Each is called <role>-<release> unless it is given a name."""

    def __init__(self, folder: Path, discovery: str, stack: ExitStack) -> None:
        self.discovery = discovery
        self._folder = folder
        self._stack = stack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}

    def start(
        self,
        role: str,
        release: Release,
        *flags: str,
        name: str = "",
        model_path: Path = CHECKPOINT_DIR,
        engine: Sequence[str] = WORKER_FLAGS,
    ) -> str:
        """Start a service and return its name. It is not waited for."""
        name = name or f"{role}-{release.name}"
        command = role if role in ("frontend", "router") else "worker"
        given = ("--discovery", self.discovery, "--name", name, *flags)
        if command == "worker":
            given += ("--role", role, "--model-path", str(model_path), *engine)
        elif command == "frontend":
            given += ("--port", "0")
        path = self._logs[name] = self._folder / f"{name}.{len(self._logs)}.log"
        environ = {**os.environ, **release.environ}
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*release.command, "kvmesh", command, *given], cwd=release.folder, env=environ, stdout=log, stderr=log
            )
        self._processes[name] = process
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return name

    def log(self, name: str) -> str:
        return self._logs[name].read_text(errors="replace")

    def until_ready(self, *names: str) -> None:
        for name in names:
            until(lambda name=name: "ready" in self.log(name) or self.has_ended(name), what=f"{name} to be ready")
            assert not self.has_ended(name), self.log(name)

    def error_of(self, name: str) -> str:
        """Wait until a service has ended because of an error, and return it: the one and last line that tells of it."""
        assert self._processes[name].wait(PATIENCE_S) in (1, 2), self.log(name)
        lines = self.log(name).strip().splitlines()
        assert [line.startswith("error: ") for line in lines].index(True) == len(lines) - 1, lines
        assert "Traceback" not in self.log(name), lines
        return lines[-1]

    def until_joined(self, frontend: str, workers: int) -> None:
        def seen() -> int:
            return sum(sum(counts.values()) for counts in self.health(frontend).get("workers", {}).values())

        until(lambda: seen() == workers, what=f"{workers} workers at {frontend}: {self.log(frontend)[-2000:]}")

    def has_ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self, name: str) -> None:
        """Let a service drain, and wait until it has ended well."""
        self._processes[name].terminate()
        assert self._processes[name].wait(PATIENCE_S) == 0, self.log(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def url(self, name: str) -> str:
        found = re.search(r"\burl=(https?://\S+)", self.log(name))
        assert found is not None, self.log(name)
        return found[1]

    def health(self, frontend: str) -> dict[str, Any]:
        return dict(self._get(frontend, "/health").json())

    def _get(self, name: str, path: str) -> httpx.Response:
        """Return a page of a service, from its port for members if it has one."""
        found = re.search(r"\bmetrics=(https?://\S+)/metrics", self.log(name))
        assert found is not None, self.log(name)
        return httpx.get(found[1] + path, timeout=10, verify=mesh_tls.verify())

    def metric(self, name: str, metric: str) -> float:
        families = text_string_to_metric_families(self._get(name, "/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == metric)
