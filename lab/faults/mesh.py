"""Run the mesh that is put through faults: processes of the product, each behind proxies of its own.

Every process listens at an address of the loopback network of its own and advertises another one, where a proxy
listens at the same ports. So peers meet the proxy, on any Linux machine and without rights.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.faults.certificates import MeshCertificates
from kvmesh.lab.faults.kinds import DECODE, FRONTEND, PREFILL, ROUTER, WORKERS
from kvmesh.lab.faults.proxies import TroubledProxy, Weather
from kvmesh.lab.faults.schedule import MeshShape
from kvmesh.lab.faults.servers import EtcdProgram, NatsProgram, program
from kvmesh.lab.faults.switches import Orders, Switches
from kvmesh.lab.faults.traffic import LORAS, MODEL, REAL_MODEL
from kvmesh.lab.faults.weights import make_model_folder
from kvmesh.mesh.member_session import member_session
from kvmesh.mesh.supervisor import ProcessSpec, Supervisor
from kvmesh.protocol.errors import EngineError, MeshError

PLANE, METRICS, HTTP, GOSSIP, CLIENTS = 7000, 7001, 7002, 7003, 7080
EVENTS = range(7010, 7014)  # publisher and replay, and two more for a restart that comes too early
START_S = 60.0
POLL_S = 0.1
PACE = ("--engine", "mock", "--mock-itl-ms", "10", "--kv-transfer", "shm", "--loras", ",".join(LORAS))
Tell = Callable[[str], None]


class FaultsMesh:
    """Owns the processes, their proxies and servers. `logs` is where each process writes its log."""

    def __init__(self, folder: Path, shape: MeshShape, seed: int, tell: Tell, without: str = "") -> None:
        self.places: dict[str, str] = {}  # where a process meets the others, if not where they all do
        self.on_down: Callable[[str, MeshError, float], bool] = lambda name, failure, retry_s: True
        self.folder, self.shape, self.tell = folder, shape, tell
        self.logs = folder / "disk" / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._network = f"127.{random.Random(os.getpid() ^ time.time_ns()).randrange(10, 250)}"
        self._seed = seed
        self._without = without
        self.ended: list[str] = []  # processes that ended, oldest first: what the supervisor says of each
        # When a process may still start with a certificate that has expired.
        self.expired_until_s: dict[str, float] = {}
        self.supervisor = Supervisor(self.logs, self._on_line)
        self.names = [name for role in (ROUTER, PREFILL, DECODE, FRONTEND) for name in self.of_role(role)]
        self.models = {
            name: make_model_folder(folder / "models" / name) for role in WORKERS for name in self.of_role(role)
        }
        self.real_names = [f"real-{role}-0" for role in WORKERS] if shape.torch else []
        self.names += self.real_names  # no fault hits these two: it is the others' faults that must not harm them
        self.weather = {name: Weather() for name in self.names}
        self.switches: dict[str, Switches] = {}
        self.orders = dict.fromkeys(self.names, Orders())
        self._proxies: dict[str, list[TroubledProxy]] = {}
        self.certificates = MeshCertificates(folder / "certificates") if shape.tls else None
        self.credentials = self.certificates.operator() if self.certificates is not None else None
        self.etcd: EtcdProgram | None = None
        self.nats: NatsProgram | None = None
        self.http: aiohttp.ClientSession

    def of_role(self, role: str) -> list[str]:
        return [f"{role}-{index}" for index in range(self.shape.count(role))]

    def host(self, name: str) -> str:
        """Return the address where a process listens."""
        return f"{self._network}.1.{self.names.index(name) + 1}"

    def shown_host(self, name: str) -> str:
        """Return the address that peers use: that of its proxies, if it has any."""
        return f"{self._network}.2.{self.names.index(name) + 1}" if name in self._proxies else self.host(name)

    @property
    def urls(self) -> list[str]:
        return [f"http://{self.host(name)}:{CLIENTS}" for name in self.of_role(FRONTEND)]

    @property
    def _scheme(self) -> str:
        return "https" if self.shape.tls else "http"

    @property
    def discovery(self) -> str:
        return self.etcd.url if self.etcd is not None else f"file:{self.folder / 'disk' / 'discovery'}"

    # --- its life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything, and return when every frontend sees every worker. Raises EngineError."""
        self.http = member_session(self.credentials, timeout=aiohttp.ClientTimeout(total=5))
        if self.shape.etcd and program("etcd") and program("etcdctl"):
            self.etcd = EtcdProgram(self.folder)
            await self.etcd.start()
        if self.shape.nats and program("nats-server"):
            self.nats = NatsProgram(self.folder)
            await self.nats.start()
        for name in self.names:
            await self._open_proxies(name)
            self.switches[name] = Switches.make(self.folder / f"{name}.switches")
        for name in self.names:
            self.supervisor.start(self._spec(name), on_down=partial(self._is_down, name))
        await self.until_whole(START_S)

    async def close(self) -> None:
        for name in self.names:
            self.signal(name, signal.SIGCONT)
        await self.supervisor.kill_all()
        for proxies in self._proxies.values():
            for proxy in proxies:
                await proxy.close()
        for server in (self.etcd, self.nats):
            if server is not None:
                await server.kill()
        for switches in self.switches.values():
            switches.close()
        await self.http.close()

    async def _open_proxies(self, name: str) -> None:
        role = name.rpartition("-")[0]
        if role == FRONTEND or name in self.real_names:
            return
        ports = (PLANE, HTTP, GOSSIP) if role == ROUTER else (PLANE, *EVENTS)
        host = f"{self._network}.2.{self.names.index(name) + 1}"
        made = [
            TroubledProxy(
                host, port, self.host(name), self.weather[name], zmtp=port in EVENTS, seed=f"{self._seed} {name} {port}"
            )
            for port in ports
        ]
        for proxy in made:
            await proxy.start()
        self._proxies[name] = made

    def _spec(self, name: str) -> ProcessSpec:
        role = name.rpartition("-")[0]
        module = {FRONTEND: "kvmesh.frontend", ROUTER: "kvmesh.router"}.get(role, "kvmesh.workers")
        flags = ["--name", name, "--host", self.host(name), "--discovery", self.places.get(name, self.discovery)]
        if self.certificates is not None:
            hosts = (self.host(name), self.shown_host(name))
            flags += ["--mesh-tls", str(self.certificates.issue(name, hosts))]
            flags += ["--mesh-port", str(METRICS)] if role == FRONTEND else []
        if role == FRONTEND:
            router = "remote" if self.shape.routers else "embedded"
            flags += ["--port", str(CLIENTS), "--router", router, "--model-cache", str(self.folder / "disk" / "cache")]
            flags += ["--access-log-file", str(self.folder / "disk" / f"{name}.access"), "--access-log-mib", "1"]
            flags += self.shape.frontend_flags
        else:
            flags += ["--advertise-host", self.shown_host(name), "--port", str(PLANE)]
        if role == ROUTER:
            flags += ["--http-port", str(HTTP), "--gossip-port", str(GOSSIP)]
            flags += ["--nats-url", self.nats.url] if self.nats is not None else []  # a closed mesh believes no other
        if name in self.real_names:
            flags += ["--role", role.removeprefix("real-"), "--model", REAL_MODEL, "--model-path", str(CHECKPOINT_DIR)]
            flags += ["--metrics-port", str(METRICS)]
        if role in WORKERS:
            flags += ["--role", role, "--model", MODEL, "--model-path", str(self.models[name]), *PACE]
            flags += ["--metrics-port", str(METRICS), "--kv-events-ports", f"{EVENTS[0]}-{EVENTS[-1]}"]
            if self.nats is not None and name == f"{DECODE}-{self.shape.decode - 1}":
                flags += ["--kv-events-transport", "nats", "--nats-url", self.nats.url]
            flags += self.shape.worker_flags
        env = {"KVMESH_WITHOUT": self._without} if self._without else {}
        if self.nats is not None and role == FRONTEND and not self.shape.routers:
            env["KVMESH_ROUTER_NATS_URL"] = self.nats.url
        return ProcessSpec(
            name, ["-m", "kvmesh.lab.faults.inside", str(self.folder / f"{name}.switches"), module, *flags], env
        )

    def _is_down(self, name: str, failure: MeshError, retry_s: float) -> bool:
        return self.on_down(name, failure, retry_s)

    def _on_line(self, line: str) -> None:
        name, _, what = line.partition(" ")
        is_expired = time.monotonic() < self.expired_until_s.get(name, 0.0)
        if not (is_expired and what.startswith("ended with exit code 1,")):  # it refuses to start, rightly
            self.ended.append(line)
        self.tell(line)

    # --- what faults use ------------------------------------------------------------------------------

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Send a signal to a process. Return whether it runs."""
        if (pid := self.supervisor.pid(name)) is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def order(self, name: str, orders: Orders) -> None:
        self.orders[name] = orders
        self.switches[name].write(orders)

    def reset(self, name: str) -> None:
        for proxy in self._proxies.get(name, ()):
            proxy.reset()

    def forget(self, name: str) -> None:
        for proxy in self._proxies.get(name, ()):
            proxy.forget()

    # --- what is seen ---------------------------------------------------------------------------------

    async def until_whole(self, timeout_s: float) -> None:
        """Wait until every frontend is ready and sees all workers. Raises EngineError."""
        ends_s = time.monotonic() + timeout_s
        while problem := await self.missing():
            if time.monotonic() > ends_s:
                raise EngineError(
                    f"the mesh is not whole after {timeout_s:.0f} s: {problem}", hint=f"logs: {self.logs}"
                )
            await asyncio.sleep(POLL_S)

    async def missing(self) -> str:
        """Return what keeps the mesh from being whole; "" if it is."""
        want = {PREFILL: self.shape.prefill, DECODE: self.shape.decode}
        for name in (*self.of_role(FRONTEND), *self.of_role(ROUTER)):
            health = await self.health(name)
            if health.get("status") != "ready":
                return f"{name} is not ready: {health}"
            seen = health.get("workers", {})
            if isinstance(seen, int):  # a router gives the number alone
                if seen != sum(want.values()) + len(self.real_names):
                    return f"{name} sees {seen} workers"
                continue
            is_whole = all(seen.get(MODEL, {}).get(role, 0) == count for role, count in want.items())
            if not is_whole or sum(seen.get(REAL_MODEL, {}).values()) != len(self.real_names):
                return f"{name} sees {seen}"
        return ""

    async def health(self, name: str) -> Mapping[str, Any]:
        port = (METRICS if self.shape.tls else CLIENTS) if name.startswith(FRONTEND) else HTTP
        try:
            async with self.http.get(f"{self._scheme}://{self.host(name)}:{port}/health") as response:
                found: Mapping[str, Any] = json.loads(await response.read())
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return {"status": repr(error)}

    async def metrics(self, name: str) -> str:
        """Return the metrics of a process as it writes them; "" if it does not answer."""
        role = name.rpartition("-")[0]
        port = {FRONTEND: METRICS if self.shape.tls else CLIENTS, ROUTER: HTTP}.get(role, METRICS)
        try:
            async with self.http.get(f"{self._scheme}://{self.host(name)}:{port}/metrics") as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    def pids(self) -> Mapping[str, int]:
        return self.supervisor.pids()


def make_folder(base: Path, names: Sequence[str] = ("disk",)) -> Path:
    """Make the folders of a run. Raises MeshError if nothing can be written there."""
    try:
        for name in names:
            (base / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MeshError(
            f"cannot write to {base}: {error}", hint="set TMPDIR to a folder that you may write to"
        ) from error
    return base


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
