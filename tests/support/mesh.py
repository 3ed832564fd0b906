"""A whole mesh in processes, started by `kvmesh up` as a user would, and what a test wants to know of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import FrontendCard, WorkerCard, decode
from tests.support import mesh_tls
from tests.support.patience import PATIENCE_S

START_S = 60.0
TRUSTED = httpx.create_ssl_context()  # once: each client would read all certificates again


class Mesh:
    """`run_dir` holds discovery and logs; workers are addressed by name."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.url = ""
        limits = httpx.Limits(max_keepalive_connections=0)
        self._scraper = httpx.Client(timeout=PATIENCE_S, verify=mesh_tls.verify(), limits=limits)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, verify=TRUSTED)

    def entries(self, prefix: str) -> dict[str, bytes]:
        found = {}
        for path in (self.run_dir / "discovery").glob("*.key"):
            key = unquote(path.stem)
            if key.startswith(prefix) and path.is_file():
                with suppress(OSError):
                    found[key] = path.read_bytes()
        return {key: value for key, value in found.items() if value}  # an empty one is withdrawn

    def workers(self) -> dict[str, WorkerCard]:
        """By name; of a restarted worker the one that lives."""
        cards = []
        for value in self.entries("workers/").values():
            with suppress(WireError):
                cards.append(decode(value, WorkerCard))
        return {card.name: card for card in cards if psutil.pid_exists(card.pid)}

    def find_frontend(self) -> FrontendCard:
        """Return a frontend that answers now. Several share one URL; a restarted one may have another URL."""
        value, *_ = self.entries("frontends/").values()
        card = decode(value, FrontendCard)
        self.url = card.url
        return card

    def observed(self, url: str) -> str:
        """Return where a member of a closed mesh finds a frontend's page that is at `url` in an open one."""
        for value in self.entries("frontends/").values():
            card = decode(value, FrontendCard)
            if card.mesh_url and url.startswith(card.url):
                return card.mesh_url + url.removeprefix(card.url)
        return url

    def pid(self, name: str) -> int:
        return self.workers()[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """SIGSTOP for as long as the block runs: it hangs, its connections stay open."""
        pids = [self.pid(name) for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill(self, name: str) -> int:
        """The pid it had."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def until_replaced(self, name: str, pid: int) -> None:
        """Wait until the supervisor has started `name` again, it has rejoined, and the frontend has heard of it."""
        until(lambda: any(c.name == name and c.pid != pid for c in self.workers().values()), what=f"a new {name}")
        until(lambda: self.workers_seen() == len(self.workers()), what=f"the frontend to hear of the new {name}")

    def workers_seen(self, url: str | None = None) -> int:
        """Return how many workers the frontend knows, or the one at `url`. It reads a card with some delay."""
        seen = self._scraper.get(self.observed(f"{url or self.url}/health")).json()["workers"]
        return sum(sum(of_model.values()) for of_model in seen.values())

    def route(self, prompt: Sequence[int], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Ask the frontend where a prompt would run: as a member of the mesh, where the mesh is closed."""
        url = self.observed(f"{self.url}/kvmesh/route")
        response = self._scraper.post(url, json={"model": "tiny", "prompt": list(prompt)}, headers=dict(headers or {}))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def complete(self, prompt: str | Sequence[int], **body: Any) -> dict[str, Any]:
        """A text completion, greedy unless said otherwise."""
        fields = {"model": "tiny", "prompt": prompt, "temperature": 0, "kvmesh": {"trace": True}}
        with self.http as http:
            response = http.post("/v1/completions", json={**fields, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, messages: Sequence[Mapping[str, str]], **body: Any) -> dict[str, Any]:
        fields = {"model": "tiny", "messages": list(messages), "temperature": 0, "kvmesh": {"trace": True}}
        with self.http as http:
            response = http.post("/v1/chat/completions", json={**fields, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, worker: str | None = None, *, url: str | None = None, **labels: str) -> float:
        """The sum of a metric's samples with these labels, of the frontend, of a worker or of whoever is at `url`."""
        samples = self.samples(worker, url)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def samples(self, worker: str | None = None, url: str | None = None) -> list[Sample]:
        """All metrics of the frontend or of a worker."""
        return [s for family in text_string_to_metric_families(self.page(worker, url)) for s in family.samples]

    def page(self, worker: str | None = None, url: str | None = None) -> str:
        """Return the metrics of the frontend or of a worker as they are written."""
        if url is None:
            url = f"{self.url}/metrics" if worker is None else self.workers()[worker].metrics_url
        return self._scraper.get(self.observed(url)).text

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def logs(self) -> str:
        parts = [f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.run_dir.glob("logs/*")]
        return "\n".join(parts)


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S, what: str = "") -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)


@contextmanager
def running_mesh(
    run_dir: Path, *flags: str, env: Mapping[str, str] | None = None, module: str = "kvmesh"
) -> Iterator[Mesh]:
    """`kvmesh up` on free ports until the block ends; then it must end well and by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "up", "--port", "0", "--run-dir", str(run_dir), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    )
    mesh = Mesh(process, run_dir)
    try:
        _wait_for_banner(mesh)
        yield mesh
    except BaseException:
        print(mesh.logs())
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, mesh.logs()


def _wait_for_banner(mesh: Mesh) -> None:
    assert mesh.process.stdout is not None
    seen = []
    deadline = time.monotonic() + START_S
    for line in mesh.process.stdout:
        seen.append(line.decode())
        if b"The mesh is up" in line:
            mesh.find_frontend()
            return
        assert time.monotonic() < deadline, "".join(seen)
    raise AssertionError("kvmesh up ended: " + "".join(seen))
