"""The release before this one, as a tree of its own, and meshes whose processes are of both releases."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.tiny_model import CHECKPOINT_DIR
from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.mesh import until

ROOT = Path(__file__).parents[2]
# The release before this one. Without its tag, as in most clones of CI, the commit is taken.
PREVIOUS_TAG = "v0.1.0"
PREVIOUS_COMMIT = "4390d065267ddd6cb6aeba84361afe50bb4b4eef"
WORKER_FLAGS = ("--engine", "mock", "--mock-itl-ms", "15", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny")


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


def previous_commit() -> str:
    """Return the commit of the previous release, or skip."""
    for name in (PREVIOUS_TAG, PREVIOUS_COMMIT):
        found = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if found.returncode == 0:
            commit = found.stdout.decode().strip()
            assert commit == PREVIOUS_COMMIT, f"the tag {PREVIOUS_TAG} is on {commit}, not on {PREVIOUS_COMMIT}"
            return commit
    pytest.skip(f"this clone does not have the commit of {PREVIOUS_TAG}: git fetch --unshallow")


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The previous release, in plain Python: its native code is not built."""
    try:
        commit = previous_commit()
    except FileNotFoundError:
        pytest.skip("there is no git, which has the previous release")
    folder = tmp_path_factory.mktemp("previous")
    archive = git("archive", commit)
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return Release("old", folder=folder, environ={"PYTHONPATH": str(folder), "KVMESH_NATIVE": "0"})


class MixedMesh:
    """Services of several releases that meet in one place. Each is called <role>-<release>."""

    def __init__(self, folder: Path, discovery: str, stack: ExitStack) -> None:
        self.discovery = discovery
        self._folder = folder
        self._stack = stack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}

    def start(self, role: str, release: Release, *flags: str, name: str = "") -> str:
        """Start a service and return its name. It is not waited for."""
        name = name or f"{role}-{release.name}"
        module = role if role in ("frontend", "router") else "workers"
        given = ("--discovery", self.discovery, "--name", name, *flags)
        if module == "workers":
            given += ("--role", role, *WORKER_FLAGS)
        elif module == "frontend":
            given += ("--port", "0")
        path = self._logs[name] = self._folder / f"{name}.{len(self._logs)}.log"
        environ = {**os.environ, **release.environ}
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*release.command, module, *given], cwd=release.folder, env=environ, stdout=log, stderr=log
            )
        self._processes[name] = process
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return name

    def log(self, name: str) -> str:
        return self._logs[name].read_text(errors="replace")

    def until_ready(self, *names: str) -> None:
        for name in names:
            until(lambda name=name: "ready" in self.log(name) or self._has_ended(name), what=f"{name} to be ready")
            assert not self._has_ended(name), self.log(name)

    def until_joined(self, frontend: str, workers: int) -> None:
        def seen() -> int:
            return sum(sum(counts.values()) for counts in self.health(frontend).get("workers", {}).values())

        until(lambda: seen() == workers, what=f"{workers} workers at {frontend}: {self.log(frontend)[-2000:]}")

    def _has_ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def url(self, name: str) -> str:
        found = re.search(r"\burl=(http://\S+)", self.log(name))
        assert found is not None, self.log(name)
        return found[1]

    def health(self, frontend: str) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url(frontend)}/health", timeout=10).json())

    def metric(self, name: str, metric: str) -> float:
        families = text_string_to_metric_families(httpx.get(f"{self.url(name)}/metrics", timeout=10).text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == metric)


@pytest.fixture(scope="module", params=["file", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the place where services meet."""
    folder = tmp_path_factory.mktemp("place")
    if request.param == "file":
        yield f"file:{folder}"
        return
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    etcd = EtcdProcess(folder)
    yield f"etcd:{etcd.endpoint}/mixed"
    etcd.stop()
