"""Run the mesh of `kvmesh lab metrics-check`: mock workers with real timing, a frontend, a router, a planner."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from kvmesh.cluster.notices import OwnerNotices
from kvmesh.lab.faults.certificates import MeshCertificates
from kvmesh.lab.faults.clients import Clients
from kvmesh.lab.faults.mesh import CLIENTS, HTTP, METRICS, FaultsMesh, Tell
from kvmesh.lab.faults.schedule import MeshShape
from kvmesh.lab.faults.traffic import MODEL, Ask, ask
from kvmesh.mesh.discovery import Discovery, open_discovery
from kvmesh.mesh.supervisor import ProcessSpec
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import DownCard, Role

USUAL = ("stream", "long", "whole", "chat")  # shapes of requests, see lab/faults/traffic.py
USUAL_CLIENTS, FLOOD_CLIENTS = 3, 60
PLANNER, CLOSED, ASTRAY = "planner", "router-closed", "decode-1"
VIRTUAL = 8090
DAY_S = 86_400.0
LONG_TEXT = "Tell me of the green house by the river, and why it is so. " * 80
TALK_S = 1.0
ORDERS_S = 0.3  # between two looks whether the planner has an order
SHAPE = MeshShape(
    frontends=1,
    routers=1,
    prefill=1,
    decode=2,
    etcd=False,
    nats=False,
    frontend_flags=("--slo-ttft-s", "0.5", "--slo-itl-s", "0.2", "--gen-ai-metrics", "--responses-store", "memory"),
    worker_flags=("--num-blocks", "600", "--max-num-seqs", "8"),
)


class WatchedMesh:
    """Owns all processes, and the clients that ask them."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        self.faults = FaultsMesh(folder, SHAPE, 1, tell)
        self.faults.on_down = self._on_down
        self._certificates = MeshCertificates(folder / "closed")
        self._signpost = folder / "signpost"  # a link to the folder of discovery, by which one worker finds it
        self.faults.places[ASTRAY] = f"file:{self._signpost}"
        self._notices = OwnerNotices()
        self._discovery: Discovery | None = None
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[Any]] = []
        self._ends_s = time.monotonic()  # of the flood
        self.carries_out_orders = False
        self.is_kept_down = False  # a worker
        self._began_s = time.monotonic()

    # --- its life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything and the usual load. Two faults are there from the start: nobody carries out the planner's
        orders, and a certificate expires soon.
        """
        self.lead_astray(False)
        await self.faults.start()
        self._discovery = open_discovery(self.faults.discovery)
        self.faults.supervisor.start(self._planner())
        self.faults.supervisor.start(self._closed_router())
        usual = self._load(USUAL_CLIENTS, self._usual)
        jobs = (self._notices.run(self._discovery), self._be_orchestrator(), usual, self._talk())
        self._tasks += [asyncio.create_task(job) for job in jobs]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.faults.close()
        if self._discovery is not None:
            await self._discovery.close()

    def jobs(self) -> Iterator[Mapping[str, Any]]:
        """Yield the scrape configurations of Prometheus, with the names of deploy/prometheus/prometheus.yml."""
        mesh = self.faults
        ports = {"frontend": CLIENTS, "router": HTTP, "prefill": METRICS, "decode": METRICS}
        targets: dict[str, list[str]] = {"planner": [f"{self._host(1)}:{METRICS}"]}
        for name in mesh.names:
            role = name.rpartition("-")[0]
            job = "worker" if role in ("prefill", "decode") else role
            targets.setdefault(job, []).append(f"{mesh.host(name)}:{ports[role]}")
        for job, addresses in targets.items():
            yield {"job_name": f"kvmesh-{job}", "static_configs": [{"targets": addresses}]}
        folder = self._certificates.operator().folder
        tls = {"cert_file": f"{folder}/cert.pem", "key_file": f"{folder}/key.pem", "insecure_skip_verify": True}
        closed = {"job_name": "kvmesh-closed", "scheme": "https", "tls_config": tls}
        yield closed | {"static_configs": [{"targets": [f"{self._host(2)}:{HTTP}"]}]}

    def _host(self, number: int) -> str:
        network = self.faults.host(self.faults.names[0]).split(".")
        return f"{network[0]}.{network[1]}.3.{number}"

    def _planner(self) -> ProcessSpec:
        mesh, host = self.faults, self._host(1)
        flags = ["--discovery", mesh.discovery, "--frontends", mesh.urls[0], "--host", host, "--metrics-port"]
        flags += [str(METRICS), "--connector", "virtual", "--virtual-host", host, "--virtual-port", str(VIRTUAL)]
        flags += ["--virtual-timeout-s", "2", "--prefill-profile", "mock", "--min-decode", "3", "--record-file", ""]
        flags += ["--predictive-interval-s", "4", "--reactive-interval-s", "1", "--max-gpus", "8", "--no-flips"]
        return ProcessSpec(PLANNER, ["-m", "kvmesh.planner", *flags])

    def _closed_router(self) -> ProcessSpec:
        """Return a router of another, closed mesh, whose certificate is about to expire."""
        host = self._host(2)
        folder = self._certificates.issue(CLOSED, [host])
        self._certificates.renew(CLOSED, DAY_S / 2)
        place = f"file:{self.faults.folder / 'closed-discovery'}"
        flags = ["--name", CLOSED, "--host", host, "--http-port", str(HTTP), "--discovery", place]
        return ProcessSpec(CLOSED, ["-m", "kvmesh.router", *flags, "--mesh-tls", str(folder)])

    async def renew_certificate(self) -> None:
        await asyncio.to_thread(self._certificates.renew, CLOSED, 30 * DAY_S)

    def lead_astray(self, is_astray: bool) -> None:
        """Have one worker renew its card where nobody looks, as behind a network that is split, or where all do."""
        folder = self.faults.folder / ("elsewhere" if is_astray else "disk/discovery")
        folder.mkdir(parents=True, exist_ok=True)
        fresh = self._signpost.with_suffix(".new")
        fresh.symlink_to(folder)
        fresh.replace(self._signpost)

    # --- what an owner does ---------------------------------------------------------------------------

    def _on_down(self, name: str, failure: MeshError, retry_s: float) -> bool:
        """Report a worker that is kept down, as the owner of a mesh does, until it is tried again."""
        self.is_kept_down = True
        self._notices.show_down(DownCard(name=name, role=Role(name.rpartition("-")[0]), retry_s=retry_s))
        asyncio.get_running_loop().call_later(retry_s, self._notices.withdraw_down, name)
        return True

    async def _be_orchestrator(self) -> None:
        """Acknowledge the planner's orders, once that is wanted."""
        while True:
            await asyncio.sleep(ORDERS_S)
            if self.carries_out_orders:
                with suppress(aiohttp.ClientError, TimeoutError, KeyError, ValueError):
                    await self._acknowledge()

    async def _acknowledge(self) -> None:
        url = f"http://{self._host(1)}:{VIRTUAL}/decision"
        async with self.faults.http.get(url) as response:
            order = json.loads(await response.read() or b"{}")
        done = {"prefill": order["prefill"], "decode": order["decode"], "done": True}
        async with self.faults.http.post(f"{url}/{order['decision_id']}/acknowledge", json=done):
            pass

    # --- load -----------------------------------------------------------------------------------------

    def _clock(self) -> float:
        return time.monotonic() - self._began_s

    def _usual(self) -> Ask | None:
        return ask(1, next(self._numbers), 1, USUAL, deadline_s=20.0)

    def _flooding(self) -> Ask | None:
        if time.monotonic() > self._ends_s:
            return None
        return ask(1, next(self._numbers), 1, ("stream",), deadline_s=30.0)

    async def _load(self, count: int, next_ask: Callable[[], Ask | None]) -> None:
        clients = Clients(self.faults.urls, next_ask, self._clock)
        await clients.run(count)

    async def _talk(self) -> None:
        """Send a long chat now and then, whose pieces a tokenizer keeps."""
        for number in itertools.count():
            messages = [{"role": "user", "content": LONG_TEXT}, {"role": "user", "content": f"And {number}?"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self.faults.http.post(f"{self.faults.urls[0]}/v1/chat/completions", json=body) as response:
                    await response.read()
            await asyncio.sleep(TALK_S)

    def flood(self, seconds: float) -> None:
        """Send far more than the workers can do, more with every second."""
        self._ends_s = time.monotonic() + seconds
        self._tasks.append(asyncio.create_task(self._flood(seconds), name="flood"))

    async def _flood(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(FLOOD_CLIENTS):
                group.create_task(self._load(1, self._flooding), name=f"flood {number}")
                await asyncio.sleep(seconds / FLOOD_CLIENTS)

    # --- what is exported -----------------------------------------------------------------------------

    async def pages(self) -> dict[str, str]:
        """Return the page of metrics of each process."""
        found = {name: await self.faults.metrics(name) for name in self.faults.names}
        async with self.faults.http.get(f"http://{self._host(1)}:{METRICS}/metrics") as response:
            found[PLANNER] = await response.text()
        return found
