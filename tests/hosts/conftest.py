"""A mesh on four hosts, each a network namespace: etcd and NATS, frontend and routers, prefill, decode."""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.tiny_model import CHECKPOINT_DIR
from tests.hosts.lab import Lab, lab, why_not
from tests.support.patience import PATIENCE_S

BLOCK_SIZE = 16


class HostsMesh:
    """Calls go to the frontend from its own host. No two hosts share memory, pids or files that services read."""

    def __init__(self, made: Lab) -> None:
        self.lab = made
        self.asked = 0
        infra, front = made.hosts["infra"], made.hosts["front"]
        data = made.folder / "infra"
        data.mkdir()
        etcd = (
            "--listen-client-urls",
            "http://0.0.0.0:2379",
            "--advertise-client-urls",
            f"http://{infra.address}:2379",
        )
        self._etcd = ("etcd", "--data-dir", str(data / "etcd"), "--log-level", "error", "--unsafe-no-fsync", *etcd)
        self._nats = ("nats-server", "-js", "-sd", str(data / "nats"))
        self.etcd, self.nats = infra.start("etcd", *self._etcd), infra.start("nats", *self._nats)
        self.nats.until_logged("Server is ready")
        self._nats_url = f"nats://{infra.address}:4222"
        self._discovery = ("--discovery", f"etcd:{infra.address}/site?lease-s=3")
        for name in ("router-0", "router-1"):
            router = self.service(front.name, name, "router", "--name", name, "--advertise-host", front.address)
            router.until_logged("ready")
        cache = ("--model-cache", str(made.folder / "cache"))
        self.frontend = self.service(front.name, "frontend", "frontend", "--port", "8000", "--router", "remote", *cache)
        workers = [
            self.worker("prefill", "prefill-0", "prefill"),
            self.worker("decode", "decode-0", "decode"),
            self.worker("decode", "decode-1", "decode", "--kv-events-transport", "nats", "--nats-url", self._nats_url),
        ]
        for worker in workers:
            worker.until_logged("ready")
        self.frontend.until_logged("ready")
        self.url = f"http://{front.address}:8000"
        self.until(lambda: self.health()["workers"].get("tiny") == {"aggregated": 0, "prefill": 1, "decode": 2})

    def service(self, host: str, name: str, module: str, *flags: str) -> Any:
        command = (sys.executable, "-m", module, "--host", "0.0.0.0", *self._discovery, *flags)
        return self.lab.hosts[host].start(name, *command)

    def worker(self, host: str, name: str, role: str, *flags: str) -> Any:
        model = ("--model", "tiny", "--model-path", str(CHECKPOINT_DIR), "--block-size", str(BLOCK_SIZE))
        where = ("--advertise-host", self.lab.hosts[host].address, "--kv-transfer", "nixl")
        return self.service(host, name, "workers", "--name", name, "--role", role, *model, *where, *flags)

    def restart_infra(self, name: str, *, away_s: float = 0.0) -> None:
        """Kill etcd or NATS, and start it again with its data."""
        process, command = (self.etcd, self._etcd) if name == "etcd" else (self.nats, self._nats)
        process.kill()
        time.sleep(away_s)
        setattr(self, name, self.lab.hosts["infra"].start(name, *command))

    def until(self, condition: Any) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_s, "it did not happen in time"
            time.sleep(0.1)

    def health(self) -> dict[str, Any]:
        return json.loads(self.lab.hosts["front"].run("curl", "-s", f"{self.url}/health"))

    def ask(self, number: int, **fields: Any) -> "Answered":
        """Ask prompt `number`, under a salt that nobody has used: nothing of it is cached, so KV has to move."""
        self.asked += 1
        prompt = [(7 * number + n) % 2000 + 5 for n in range(300)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "kvmesh": {"trace": True}}
        body |= {"cache_salt": f"salt {self.asked}"} | fields
        command = ("curl", "-s", "-m", "30", f"{self.url}/v1/completions", "-H", "content-type: application/json")
        started_s = time.monotonic()
        try:
            text = self.lab.hosts["front"].run(*command, "-d", json.dumps(body))
        except RuntimeError as error:
            text = json.dumps({"error": str(error)})
        return Answered(json.loads(text), time.monotonic() - started_s)


class Answered:
    def __init__(self, body: dict[str, Any], took_s: float) -> None:
        self.took_s = took_s
        assert "choices" in body, body
        self.text: str = body["choices"][0]["text"]
        self.trace: dict[str, Any] = body["kvmesh"]
        self.cached_tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def pulled_bytes(self) -> int:
        return int(self.trace["kv_bytes_pulled"] or 0)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsMesh]:
    if not os.environ.get("KVMESH_TEST_HOSTS"):
        pytest.skip("hosts: run `make test-hosts`")
    if problem := why_not():
        pytest.fail(problem)
    with lab(tmp_path_factory.mktemp("hosts")) as made:
        yield HostsMesh(made)
    assert made.leftovers() == []


@pytest.fixture
def mesh(hosts: HostsMesh) -> Iterator[HostsMesh]:
    yield hosts
    hosts.lab.heal()
    hosts.until(lambda: hosts.ask(0).pulled_bytes > 0)
