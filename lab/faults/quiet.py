"""Look at a mesh that has become quiet: whether something is left of the requests, and whether caches are known."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.lab.faults.mesh import FaultsMesh
from kvmesh.lab.hosts.check import left_in_shared_memory
from kvmesh.lab.hosts.compare import CacheView, cards_of, compare_one
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import RouterCard, WorkerCard

IN_FLIGHT = frozenset(
    {
        "kvmesh_frontend_inflight",
        "kvmesh_router_in_flight",
        "kvmesh_router_waiting",
        "kvmesh_worker_running_requests",
        "kvmesh_worker_waiting_requests",
        "kvmesh_worker_queued_tokens",
        "kvmesh_worker_used_blocks",
        "kvmesh_worker_kv_offers",
    }
)
POLL_S = 0.25
GONE_S = 1.0
MORE_FDS = 40  # than before the faults: every process may have connected to every other one since
MORE_TASKS = 24
TRIES = 3


@dataclass(slots=True)
class Sizes:
    """Hold what a process holds. Taken when the mesh is quiet, before the faults and after them."""

    fds: int
    tasks: int
    rss_mib: float
    files: Mapping[str, int] = field(default_factory=dict)  # file descriptors by what they lead to


@dataclass(slots=True)
class Remains:
    """List what is left when all should be over. Each entry is a line for people."""

    leaked: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    took_s: float = 0.0


def sizes(mesh: FaultsMesh) -> dict[str, Sizes]:
    found = {}
    for name, pid in mesh.pids().items():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            rss_mib = process.memory_info().rss / 2**20
            found[name] = Sizes(process.num_fds(), mesh.switches[name].tasks, rss_mib, open_files(pid))
    return found


def open_files(pid: int) -> Mapping[str, int]:
    """Count the file descriptors of a process by what they lead to; {} where that cannot be seen."""
    counts = Counter[str]()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            counts[os.readlink(link).partition(":")[0]] += 1
    return counts


async def in_flight(mesh: FaultsMesh) -> list[str]:
    """Return the gauges that are not zero, and the processes that do not answer."""
    pages = await asyncio.gather(*(mesh.metrics(name) for name in mesh.names))
    left = []
    for name, page in zip(mesh.names, pages, strict=True):
        if not page:
            left.append(f"{name} does not answer")
            continue
        for family in text_string_to_metric_families(page):
            left += [f"{name}: {s.name} {s.value:g}" for s in family.samples if s.name in IN_FLIGHT and s.value]
    return left


def grown(before: Mapping[str, Sizes], after: Mapping[str, Sizes]) -> list[str]:
    """Return which processes hold more file descriptors or tasks than before."""
    found = []
    for name, now in after.items():
        if (then := before.get(name)) is None:
            continue
        if now.fds > then.fds + MORE_FDS:
            more = {what: count - then.files.get(what, 0) for what, count in now.files.items()}
            grew = ", ".join(f"{count} {what}" for what, count in sorted(more.items(), key=lambda one: -one[1])[:3])
            found.append(f"{name}: {now.fds} file descriptors, {then.fds} before; {grew} more")
        if now.tasks > then.tasks + MORE_TASKS:
            found.append(f"{name}: {now.tasks} tasks, {then.tasks} before")
    return found


async def until_quiet(mesh: FaultsMesh, before: Mapping[str, Sizes], timeout_s: float) -> Remains:
    """Wait until nothing is left, and return what is left after `timeout_s`."""
    started_s = time.monotonic()
    remains = Remains()
    while True:
        remains.leaked = [*await in_flight(mesh), *grown(before, sizes(mesh))]
        problem = await mesh.missing()
        remains.diverged = [problem] if problem else await diverged(mesh)
        remains.took_s = time.monotonic() - started_s
        if not (remains.leaked or remains.diverged) or remains.took_s > timeout_s:
            return remains
        await asyncio.sleep(POLL_S)


async def diverged(mesh: FaultsMesh) -> list[str]:
    """Return the routers' views of caches that are not what the workers hold."""
    if not mesh.shape.routers:
        return []
    try:
        workers, routers = await cards_of(mesh.discovery)
        views = await compare_all(mesh, workers, routers)
    except (MeshError, aiohttp.ClientError, OSError, TimeoutError) as error:
        return [f"no comparison: {error!r}"]
    return [
        f"{view.router} believes {view.believed_blocks} blocks of {view.worker}, which holds {view.blocks}"
        for view in views
        if not view.is_equal
    ]


async def compare_all(
    mesh: FaultsMesh, workers: Sequence[WorkerCard], routers: Sequence[RouterCard]
) -> list[CacheView]:
    """Compare without the proxies: nothing that is left of a fault may disturb the judge."""
    alive = set(mesh.pids().values())
    plane = PlaneClient(mesh.credentials)
    try:
        return [
            await compare_one(
                msgspec.structs.replace(router, http_url=direct(mesh, router.http_url, router.name)),
                msgspec.structs.replace(worker, address=direct(mesh, worker.address, worker.name)),
                plane,
                mesh.http,
            )
            for router in routers
            for worker in workers
            if router.http_url and worker.kv_events and router.pid in alive and worker.pid in alive
        ]
    finally:
        await plane.close()


def direct(mesh: FaultsMesh, address: str, name: str) -> str:
    return address.replace(mesh.shown_host(name), mesh.host(name))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def left_on_machine(marks: Sequence[str], shm_before: set[str], *, is_private: bool) -> list[str]:
    """Return what is left after the mesh has ended: its processes, and shared memory that nobody uses.

    `is_private`: no other program uses this /dev/shm.
    """
    found = left_in_shared_memory(shm_before, is_private=is_private)
    if found:  # other programs make names that are gone at once
        time.sleep(GONE_S)
        found = [line for line in left_in_shared_memory(shm_before, is_private=is_private) if line in found]
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and any(mark in line for mark in marks):
            found.append(f"process {process.pid}: {line[:100]}")
    return found
