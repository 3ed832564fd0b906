"""Name the fault behind each alert, and make it in a running mesh: begin, and end."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvmesh.lab.faults.zmtp import EventTrouble
from kvmesh.lab.observability.watched_mesh import WatchedMesh

KILLS, KILL_GAP_S = 60, 0.25
FLOOD_S = 14.0
Action = Callable[[WatchedMesh], Awaitable[None]]


async def _nothing(mesh: WatchedMesh) -> None:
    return None


@dataclass(frozen=True, slots=True)
class NamedFault:
    """A fault and the alerts that tell of it."""

    what: str
    alerts: tuple[str, ...]
    begin: Action = _nothing  # the fault is there from the start
    end: Action = _nothing  # it ends by itself

    @property
    def is_new(self) -> bool:
        """Return whether there was no fault before `begin`."""
        return self.begin is not _nothing


def _signalled(number: signal.Signals, *names: str) -> Action:
    async def act(mesh: WatchedMesh) -> None:
        for name in names:
            mesh.faults.signal(name, number)

    return act


def _stopped(what: str, alerts: tuple[str, ...], *names: str) -> NamedFault:
    return NamedFault(what, alerts, _signalled(signal.SIGSTOP, *names), _signalled(signal.SIGCONT, *names))


async def _renew(mesh: WatchedMesh) -> None:
    await mesh.renew_certificate()


async def _carry_out(mesh: WatchedMesh) -> None:
    mesh.carries_out_orders = True


def _ordered(name: str, **changes: bool) -> Action:
    async def act(mesh: WatchedMesh) -> None:
        mesh.faults.order(name, replace(mesh.faults.orders[name], **changes))

    return act


def _stalls(name: str) -> Action:
    async def act(mesh: WatchedMesh) -> None:
        pid = mesh.faults.supervisor.pid(name) or 0
        mesh.faults.order(name, replace(mesh.faults.orders[name], stalls=pid))

    return act


def _events(name: str, trouble: EventTrouble) -> Action:
    async def act(mesh: WatchedMesh) -> None:
        events = mesh.faults.weather[name].events
        events.kind, events.share = trouble.kind, trouble.share

    return act


async def _fill_and_flood(mesh: WatchedMesh) -> None:
    for name in ("decode-0", "decode-1"):
        await _ordered(name, holds_blocks=True)(mesh)
    mesh.flood(FLOOD_S)


async def _let_go(mesh: WatchedMesh) -> None:
    for name in ("decode-0", "decode-1"):
        await _ordered(name, holds_blocks=False)(mesh)


async def _lose_discovery(mesh: WatchedMesh) -> None:
    mesh.lead_astray(True)


async def _find_discovery(mesh: WatchedMesh) -> None:
    mesh.lead_astray(False)


async def _crash_often(mesh: WatchedMesh) -> None:
    """Kill a worker whenever it runs, until its owner keeps it down."""
    for _ in range(KILLS):
        if not mesh.faults.signal("prefill-0", signal.SIGKILL) and mesh.is_kept_down:
            return
        await asyncio.sleep(KILL_GAP_S)


FAULTS: tuple[NamedFault, ...] = (
    NamedFault("nobody carries out the planner's orders", ("KvmeshPlannerOrdersFail",), end=_carry_out),
    NamedFault("a certificate has half a day left", ("KvmeshCertificateExpires",), end=_renew),
    NamedFault(
        "bits of the KV events of decode-1 are flipped",
        ("KvmeshIndexDiverged",),
        _events("decode-1", EventTrouble("events_flipped", 0.5)),
        _events("decode-1", EventTrouble()),
    ),
    NamedFault(
        "decode-1 can fetch no KV",
        ("KvmeshPullsFail",),
        _ordered("decode-1", fails_pulls=True),
        _ordered("decode-1", fails_pulls=False),
    ),
    NamedFault(
        "the engine of decode-0 stands still",
        ("KvmeshWorkerHangs",),
        _stalls("decode-0"),
        _ordered("decode-0", stalls=False),
    ),
    _stopped("the router is stopped", ("KvmeshRoutersSilent", "KvmeshServiceDown"), "router-0"),
    NamedFault(
        "more requests come than the workers can do, whose KV caches are full",
        ("KvmeshKvCacheFull", "KvmeshSloMissed", "KvmeshRequestsWait", "KvmeshQueueGrows"),
        _fill_and_flood,
        _let_go,
    ),
    NamedFault("decode-1 cannot reach discovery", ("KvmeshWorkersLapsed",), _lose_discovery, _find_discovery),
    NamedFault("prefill-0 crashes again and again", ("KvmeshWorkerKeptDown",), _crash_often),
    _stopped("both decode workers are stopped", ("KvmeshNoModel", "KvmeshRequestsFail"), "decode-0", "decode-1"),
    _stopped("the frontend is stopped", ("KvmeshPlannerOnHold", "KvmeshPlannerSeesNoTraffic"), "frontend-0"),
)
