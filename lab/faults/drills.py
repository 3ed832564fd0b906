"""One short schedule for each safeguard: with the safeguard the run is clean, without it the run fails."""

from collections.abc import Mapping

from kvmesh.lab.faults.kinds import DECODE, FRONTEND, PREFILL
from kvmesh.lab.faults.schedule import MeshShape, PlannedFault, Schedule, TrafficMix
from kvmesh.mesh.safeguards import SAFEGUARDS

_SMALL = MeshShape(frontends=1, routers=0, prefill=1, decode=2, etcd=False, nats=False)
_LOSSLESS_S = 8.0  # until nothing is left


def _fault(kind: str, role: str, index: int, at_s: float, for_s: float = 0.0, amount: float = 0.0) -> PlannedFault:
    return PlannedFault(at_s=at_s, kind=kind, role=role, index=index, for_s=for_s, amount=amount)


def _nonce() -> Schedule:
    """Have decode workers come late with their tickets, when the offers have ended and their blocks are used again."""
    flags = ("--offer-lease-s", "0.3", "--num-blocks", "256")
    stops = tuple(_fault("stop", DECODE, n % 2, 0.5 + 0.8 * n, 0.7) for n in range(8))
    traffic = TrafficMix(clients=16, shapes=("long",), deadline_s=15)
    mesh = MeshShape(frontends=1, routers=0, prefill=1, decode=2, etcd=False, nats=False, worker_flags=flags)
    return Schedule(seed=1, seconds=7, faults=stops, mesh=mesh, traffic=traffic, quiet_s=_LOSSLESS_S)


def _lease_expiry() -> Schedule:
    """Kill the frontend while tickets wait for decode workers that stand still: nobody releases the offers."""
    flags = ("--offer-lease-s", "2")
    stops = tuple(_fault("stop", DECODE, n, 1.0, 1.0) for n in range(2))
    kill = _fault("kill", FRONTEND, 0, 1.7)
    mesh = MeshShape(frontends=1, routers=0, prefill=1, decode=2, etcd=False, nats=False, worker_flags=flags)
    traffic = TrafficMix(clients=8, shapes=("long",), deadline_s=8)
    return Schedule(seed=1, seconds=3, faults=(*stops, kill), mesh=mesh, traffic=traffic, quiet_s=_LOSSLESS_S)


def _replay() -> Schedule:
    """Lose KV events of every worker."""
    lost = tuple(_fault("events_lost", role, index, 1.0, 1.5, 0.6) for role, index in _WORKERS)
    mesh = MeshShape(frontends=1, routers=1, prefill=1, decode=2, etcd=False, nats=False)
    traffic = TrafficMix(clients=6, shapes=("stream", "long"), deadline_s=10)
    return Schedule(seed=1, seconds=5, faults=lost, mesh=mesh, traffic=traffic, quiet_s=_LOSSLESS_S)


def _migration() -> Schedule:
    kills = tuple(_fault("kill", DECODE, n % 2, 1.0 + 3.0 * n) for n in range(2))
    traffic = TrafficMix(clients=8, shapes=("stream",), deadline_s=15)
    return Schedule(seed=1, seconds=5, faults=kills, mesh=_SMALL, traffic=traffic, quiet_s=_LOSSLESS_S)


def _avoidance() -> Schedule:
    """Kill a decode worker again and again: its card stands, and its address resets every connection."""
    kills = tuple(_fault("kill", DECODE, 0, at_s) for at_s in (1.0, 1.3, 1.6, 4.0, 4.3))
    traffic = TrafficMix(clients=12, shapes=("stream",), deadline_s=15)
    return Schedule(seed=1, seconds=6, faults=kills, mesh=_SMALL, traffic=traffic, quiet_s=_LOSSLESS_S)


def _deadline() -> Schedule:
    """Stop all decode workers for longer than any request may take."""
    stops = tuple(_fault("stop", DECODE, n, 1.5, 7.0) for n in range(2))
    traffic = TrafficMix(clients=6, shapes=("whole", "deadline"), deadline_s=2.5)
    return Schedule(seed=1, seconds=4, faults=stops, mesh=_SMALL, traffic=traffic, quiet_s=_LOSSLESS_S)


def _credit() -> Schedule:
    """Have clients read so slowly that answers pile up on their whole way."""
    mesh = MeshShape(
        frontends=1, routers=0, prefill=1, decode=2, etcd=False, nats=False, worker_flags=("--mock-itl-ms", "0.3")
    )
    traffic = TrafficMix(clients=4, shapes=("stalled", "stream"), deadline_s=40)
    return Schedule(seed=1, seconds=3, faults=(), mesh=mesh, traffic=traffic, quiet_s=_LOSSLESS_S)


def _progress_watch() -> Schedule:
    """Have an engine stall until its process ends."""
    mesh = MeshShape(
        frontends=1, routers=0, prefill=1, decode=2, etcd=False, nats=False, worker_flags=("--stall-timeout-s", "1")
    )
    traffic = TrafficMix(clients=6, shapes=("stream",), deadline_s=7)
    stall = _fault("engine_stall", DECODE, 0, 1.5, 10.0)
    return Schedule(seed=1, seconds=4, faults=(stall,), mesh=mesh, traffic=traffic, quiet_s=_LOSSLESS_S)


_WORKERS = ((PREFILL, 0), (DECODE, 0), (DECODE, 1))
_MADE = (_nonce, _lease_expiry, _replay, _migration, _avoidance, _deadline, _credit, _progress_watch)
DRILLS: Mapping[str, Schedule] = {name: make() for name, make in zip(SAFEGUARDS, _MADE, strict=True)}
