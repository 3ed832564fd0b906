"""A rolling restart of a mesh with two of each service: no client notices, not even one that reads no /health."""

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.faults.prompts import prompt_of
from tests.support.mesh import TRUSTED, until
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port
from tests.support.streams import Stream, check_mock_answer

POLL_S = 1.0  # between looks of the load balancer at /health
CLIENTS = 4


class Services:
    """The processes of a mesh, each of which can be ended by SIGTERM and started again in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.argv: dict[str, list[str]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = itertools.count()

    def add(self, name: str, module: str, *flags: str) -> None:
        self.argv[name] = [sys.executable, "-m", module, "--name", name, "--discovery", f"file:{self.folder}/d", *flags]
        self.start(name)

    def start(self, name: str) -> None:
        path = self.folder / f"{name}.{next(self.starts)}.log"
        with path.open("wb") as log:
            self.running[name] = subprocess.Popen(self.argv[name], stdout=log, stderr=log)
        until(lambda: ": ready " in path.read_text(), what=f"{name} to be ready")

    def stop(self, name: str) -> None:
        self.running[name].terminate()
        assert self.running[name].wait(PATIENCE_S) == 0


class Balancer:
    """Sends requests in turn to the frontends whose /health was 200 at the last look, and as many to all of them."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.up = list(urls)
        self.outcomes: Counter[str] = Counter()
        self.stop = threading.Event()
        self._turn = itertools.count()
        self._first = itertools.count()
        self.threads = [
            threading.Thread(target=self._poll),
            *(threading.Thread(target=self._ask) for _ in range(CLIENTS)),
            *(threading.Thread(target=self._ask_anyone) for _ in range(CLIENTS)),
        ]

    def _poll(self) -> None:
        while not self.stop.wait(POLL_S):
            self.up = [url for url in self.urls if is_up(url)]

    def _ask(self) -> None:
        while not self.stop.is_set():
            up = self.up
            if not up:
                self.outcomes["no frontend is up"] += 1
                time.sleep(0.1)
                continue
            self._note("by health", self._stream(up[next(self._turn) % len(up)]))

    def _ask_anyone(self) -> None:
        """Ask all in turn, whatever their /health is; only where no connection is made, ask the next one."""
        while not self.stop.is_set():
            first = next(self._turn)
            for number in range(len(self.urls)):
                stream = self._stream(self.urls[(first + number) % len(self.urls)])
                if "ConnectionRefused" not in stream.broken:
                    break
            self._note("blindly", stream)

    def _stream(self, url: str) -> Stream:
        return Stream(url, prompt_of(20, next(self._first)), 30, kvmesh={}).join()

    def _note(self, how: str, stream: Stream) -> None:
        try:
            check_mock_answer(stream)
            self.outcomes[how] += 1
        except AssertionError:
            self.outcomes[f"{how}: {stream.status} {stream.error} {stream.broken}"] += 1


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, verify=TRUSTED).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(params=["embedded", "remote"])
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    worker = ["--engine", "mock", "--model-path", str(CHECKPOINT_DIR), "--model", "tiny", "--kv-transfer", "shm"]
    try:
        for number in range(2):
            services.add(f"decode-{number}", "kvmesh.workers", "--role", "decode", *worker)
            services.add(f"prefill-{number}", "kvmesh.workers", "--role", "prefill", *worker)
            if request.param == "remote":
                services.add(f"router-{number}", "kvmesh.router")
        for number in range(2):
            services.add(f"frontend-{number}", "kvmesh.frontend", "--port", str(free_port()), "--router", request.param)
        yield services
    finally:
        for process in services.running.values():
            process.kill()
            process.wait()


@pytest.mark.long
def test_no_client_notices_a_rolling_restart(services: Services) -> None:
    frontends = [name for name in services.argv if name.startswith("frontend")]
    urls = [f"http://127.0.0.1:{services.argv[name][services.argv[name].index('--port') + 1]}" for name in frontends]
    for url in urls:
        until(lambda url=url: is_up(url), what=f"{url} to be up")
    balancer = Balancer(urls)
    for thread in balancer.threads:
        thread.start()
    try:
        for name in services.argv:
            services.stop(name)
            services.start(name)
            if name in frontends:
                until(lambda: len(balancer.up) == len(urls), what=f"{name} to be up")
    finally:
        balancer.stop.set()
        for thread in balancer.threads:
            thread.join()
    assert balancer.outcomes.keys() == {"by health", "blindly"}, balancer.outcomes
    assert min(balancer.outcomes.values()) > 50
