"""Run a mesh on four hosts of the lab: etcd, NATS, frontend and two routers, a prefill worker, two decode workers."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.hosts.compare import CacheView
from kvmesh.lab.hosts.lab import HostProcess, Lab, LabError

BLOCK_SIZE = 16
PROMPT_TOKENS = 300
ANSWER_TOKENS = 8
LEASE_S = 3  # of etcd
PREFILL_PORT = 7000  # of the prefill worker's request plane
UNTIL_S = 60.0
CLIENT_TIMEOUT_S = 30
SERVERS = ("etcd", "nats-server")


class HostsAnswer(Struct, frozen=True, kw_only=True):
    """Hold what a client saw of one request. `error` is "" if it was answered."""

    took_s: float
    text: str = ""
    tokens: list[str] = []
    error: str = ""
    trace: dict[str, Any] = {}
    cached_tokens: int = 0

    @property
    def pulled_bytes(self) -> int:
        return int(self.trace.get("kv_bytes_pulled") or 0)


class HostsMesh:
    """A mesh whose hosts share no memory, pids or files. Clients call the frontend from its own host.

    `discovery` is a `--discovery` for all services; "": etcd on the host infra.
    """

    def __init__(self, lab: Lab, *, discovery: str = "") -> None:
        self.lab = lab
        self.asked = 0
        infra, front = lab.hosts["infra"], lab.hosts["front"]
        data = lab.folder / "infra"
        data.mkdir()
        etcd = (
            "--listen-client-urls",
            "http://0.0.0.0:2379",
            "--advertise-client-urls",
            f"http://{infra.address}:2379",
        )
        self._commands: dict[str, tuple[str, ...]] = {
            "etcd": ("etcd", "--data-dir", str(data / "etcd"), "--log-level", "error", "--unsafe-no-fsync", *etcd),
            "nats": ("nats-server", "-js", "-sd", str(data / "nats")),
        }
        self._servers = {name: infra.start(name, *command) for name, command in self._commands.items()}
        self._servers["nats"].until_logged("Server is ready")
        self.nats_url = f"nats://{infra.address}:4222"
        self.discovery = discovery or f"etcd:{infra.address}:2379/site?lease-s={LEASE_S}"
        for name in ("router-0", "router-1"):
            router = self.service(front.name, name, "router", "--name", name, "--advertise-host", front.address)
            router.until_logged("ready")
        self.url = f"http://{front.address}:8000"
        cache = ("--model-cache", str(lab.folder / "cache"))
        frontend = self.service(front.name, "frontend", "frontend", "--port", "8000", "--router", "remote", *cache)
        workers = [
            self.worker("prefill", "prefill-0", "prefill", "--port", str(PREFILL_PORT)),
            self.worker("decode", "decode-0", "decode"),
            self.worker("decode", "decode-1", "decode", "--kv-events-transport", "nats", "--nats-url", self.nats_url),
        ]
        for process in (*workers, frontend):
            process.until_logged("ready")
        self.until(
            lambda: self.health().get("workers", {}).get("tiny") == {"aggregated": 0, "prefill": 1, "decode": 2},
            "the frontend knows all workers",
        )

    def service(self, host: str, name: str, folder: str, *flags: str) -> HostProcess:
        command = (
            sys.executable,
            "-P",
            "-m",
            f"kvmesh.{folder}",
            "--host",
            "0.0.0.0",
            "--discovery",
            self.discovery,
            *flags,
        )
        return self.lab.hosts[host].start(name, *command)

    def worker(self, host: str, name: str, role: str, *flags: str) -> HostProcess:
        model = ("--model", "tiny", "--model-path", str(CHECKPOINT_DIR), "--block-size", str(BLOCK_SIZE))
        where = ("--advertise-host", self.lab.hosts[host].address, "--kv-transfer", "nixl")
        return self.service(host, name, "workers", "--name", name, "--role", role, *model, *where, *flags)

    def stop_server(self, name: str) -> None:
        """Kill etcd or NATS: to them, and to their clients, it is a crash."""
        self._servers[name].kill()

    def start_server(self, name: str) -> None:
        """Start etcd or NATS again, with its data."""
        self._servers[name] = self.lab.hosts["infra"].start(name, *self._commands[name])

    def restart_server(self, name: str, *, away_s: float = 0.0) -> None:
        self.stop_server(name)
        time.sleep(away_s)
        self.start_server(name)

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Return after how many seconds the condition held. Raises LabError if it does not hold in time."""
        started_s = time.monotonic()
        while not condition():
            if time.monotonic() > started_s + UNTIL_S:
                raise LabError(f"after {UNTIL_S:.0f} s it is still not so: {what}", hint=f"logs: {self.lab.folder}")
            time.sleep(0.1)
        return time.monotonic() - started_s

    def health(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._curl(f"{self.url}/health")))
        except (LabError, json.JSONDecodeError):
            return {}

    def ask(self, number: int, **fields: Any) -> HostsAnswer:
        """Ask prompt `number`, under a salt that nobody has used: nothing of it is cached, so KV has to move."""
        self.asked += 1
        prompt = [(7 * number + n) % 2000 + 5 for n in range(PROMPT_TOKENS)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 0}
        body |= {"kvmesh": {"trace": True}, "cache_salt": f"salt {self.asked}"} | fields
        started_s = time.monotonic()
        try:
            reply = json.loads(
                self._curl(f"{self.url}/v1/completions", "-H", "content-type: application/json", "-d", json.dumps(body))
            )
        except (LabError, json.JSONDecodeError) as error:
            return HostsAnswer(took_s=time.monotonic() - started_s, error=str(error))
        took_s = time.monotonic() - started_s
        if "choices" not in reply:
            return HostsAnswer(took_s=took_s, error=str(reply.get("error", reply)))
        return HostsAnswer(
            took_s=took_s,
            text=reply["choices"][0]["text"],
            tokens=reply["choices"][0]["logprobs"]["tokens"],
            trace=reply.get("kvmesh") or {},
            cached_tokens=(reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )

    def compare(self) -> list[CacheView]:
        """Return what each router believes of each worker's cache, and whether it is so."""
        text = self.lab.hosts["front"].run(sys.executable, "-P", "-m", "kvmesh.lab.hosts.compare", self.discovery)
        return msgspec.json.decode(text, type=list[CacheView])

    def _curl(self, url: str, *flags: str) -> str:
        return self.lab.hosts["front"].run("curl", "-sS", "-m", str(CLIENT_TIMEOUT_S), url, *flags)
