"""Plan faults: a pure function from a seed to a list of faults with their times, targets and lengths."""

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.lab.faults.kinds import DECODE, FRONTEND, KINDS, PREFILL, ROUTER, SHARED, FaultKind
from kvmesh.protocol.errors import ConfigError

MEAN_GAP_S = 1.4  # between the beginnings of two faults
FIRST_S = 1.0
LAST_S = 3.0  # before the end no fault begins any more
QUIET_S = 45.0  # for all to be over: offers have a lease of 30 s, followers look for lost events every 30 s
LATER_S = 0.25  # a fault whose targets are all needed begins later by this step


class MeshShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say how many processes of each role a mesh has, and their settings. Defaults are the product's."""

    frontends: Annotated[int, Meta(ge=1, le=8)] = 2
    routers: Annotated[int, Meta(ge=0, le=4)] = 2  # 0: inside the frontends
    prefill: Annotated[int, Meta(ge=0, le=16)] = 2
    decode: Annotated[int, Meta(ge=1, le=16)] = 3
    etcd: bool = True  # where the program is found; else discovery is a folder
    nats: bool = True  # carries the events of one worker, where the program is found
    tls: bool = False  # all ports of the mesh are closed: --mesh-tls
    torch: bool = False  # besides, a pair of workers with the tiny model
    worker_flags: tuple[str, ...] = ()
    frontend_flags: tuple[str, ...] = ()

    def count(self, role: str) -> int:
        counts = {FRONTEND: self.frontends, ROUTER: self.routers, PREFILL: self.prefill, DECODE: self.decode}
        return counts.get(role, 1)


class TrafficMix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say what the clients of a run ask for."""

    clients: Annotated[int, Meta(ge=1, le=256)] = 8  # requests at once
    shapes: tuple[str, ...] = ()  # of lab/faults/traffic.py; empty: all
    deadline_s: Annotated[float, Meta(gt=0, le=600)] = 30.0  # of a request that has no shorter one


class PlannedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    at_s: Annotated[float, Meta(ge=0)]
    kind: str
    role: str
    index: Annotated[int, Meta(ge=0)] = 0
    for_s: Annotated[float, Meta(ge=0)] = 0.0
    amount: float = 0.0

    @property
    def target(self) -> str:
        return self.role if self.role in SHARED else f"{self.role}-{self.index}"

    def in_words(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.kind} {self.target} at {self.at_s:.1f} s{lasts}"


class Schedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold all that a run is made from. A file of it repeats the run."""

    seed: int
    seconds: Annotated[float, Meta(gt=0)]
    faults: tuple[PlannedFault, ...]
    mesh: MeshShape = MeshShape()
    traffic: TrafficMix = TrafficMix()
    quiet_s: Annotated[float, Meta(ge=0)] = QUIET_S


def plan(
    seed: int,
    seconds: float,
    *,
    mesh: MeshShape | None = None,
    kinds: Collection[str] = (),
    traffic: TrafficMix | None = None,
) -> Schedule:
    """Return the schedule of a seed. Equal arguments give an equal schedule.

    Without `mesh`, the ports of the mesh are closed by TLS if the seed is odd. Kinds come in turns, each as often as
    the others. At no time does a fault hit the last process of a role that no other fault hits: with nobody left to
    answer there is nothing to find out.
    """
    shape = mesh or MeshShape(tls=seed % 2 == 1)
    chosen = [KINDS[name] for name in sorted(kinds)] if kinds else list(KINDS.values())
    usable = [kind for kind in chosen if roles_of(kind, shape)]
    draw = random.Random(f"faults {seed}")
    faults: list[PlannedFault] = []
    deck: list[FaultKind] = []
    busy = _Busy(shape)
    at_s = FIRST_S
    while usable and at_s < max(seconds - LAST_S, FIRST_S + 0.1):
        if not deck:
            cards = [*usable, *(kind for kind in usable if kind.closed)]
            deck = draw.sample(cards, len(cards))
        kind = deck.pop()
        for_s = round(draw.uniform(*kind.for_s), 2)
        amount = round(draw.uniform(*kind.amount), 3)
        begins_s = at_s
        while not (targets := busy.free_for(kind, begins_s, for_s)) and begins_s < seconds - LAST_S:
            begins_s += LATER_S
        if targets:
            role, index = draw.choice(targets)
            fault = PlannedFault(
                at_s=round(begins_s, 2), kind=kind.name, role=role, index=index, for_s=for_s, amount=amount
            )
            busy.take(kind, fault)
            faults.append(fault)
        at_s += round(draw.expovariate(1 / MEAN_GAP_S), 2)
    ordered = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return Schedule(seed=seed, seconds=seconds, faults=ordered, mesh=shape, traffic=traffic or TrafficMix())


def roles_of(kind: FaultKind, mesh: MeshShape) -> list[str]:
    """Return the roles that a kind of fault can hit in this mesh, without its last process."""
    if kind.closed and not mesh.tls:
        return []
    return [role for role in kind.roles if role in SHARED or mesh.count(role) > 1]


class _Busy:
    """Remember which targets are hit when."""

    def __init__(self, mesh: MeshShape) -> None:
        self._mesh = mesh
        self._hits: list[tuple[str, int, str, float, float]] = []  # role, index, kind, from, until

    def free_for(self, kind: FaultKind, at_s: float, for_s: float) -> list[tuple[str, int]]:
        """Return the targets that the fault may hit then."""
        until_s = at_s + for_s + kind.takes_s + kind.settles_s
        found = []
        for role in roles_of(kind, self._mesh):
            meanwhile = [hit for hit in self._hits if hit[0] == role and hit[3] < until_s and at_s < hit[4]]
            if role in SHARED:
                found += [] if meanwhile else [(role, 0)]
                continue
            if kind.name == "rolling":  # it hits all of a role, one after the other
                found += [] if meanwhile else [(role, 0)]
                continue
            if any(hit[2] == "rolling" for hit in meanwhile):
                continue
            hit_ones = {hit[1] for hit in meanwhile}
            twice = {hit[1] for hit in meanwhile if hit[2] == kind.name}
            for index in range(self._mesh.count(role)):
                if index not in twice and len(hit_ones | {index}) < self._mesh.count(role):
                    found.append((role, index))
        return found

    def take(self, kind: FaultKind, fault: PlannedFault) -> None:
        until_s = fault.at_s + fault.for_s + kind.takes_s + kind.settles_s
        self._hits.append((fault.role, fault.index, kind.name, fault.at_s, until_s))


def counts_of(faults: Sequence[PlannedFault]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for fault in faults:
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
    return dict(sorted(counts.items()))


def read_schedule(path: Path) -> Schedule:
    """Raises ConfigError for a file that is no schedule."""
    try:
        schedule = msgspec.json.decode(path.read_bytes(), type=Schedule)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="--schedule takes a JSON file") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no schedule: {error}", hint="`kvmesh lab faults --shrink` prints one") from error
    for fault in schedule.faults:
        kind = KINDS.get(fault.kind)
        if kind is None:
            raise ConfigError(f"{path}: no kind of fault {fault.kind!r}", hint=f"there are: {', '.join(KINDS)}")
        if fault.role not in kind.roles or fault.index >= schedule.mesh.count(fault.role):
            raise ConfigError(f"{path}: {fault.kind} cannot hit {fault.target}", hint=f"it hits {kind.roles}")
    return schedule


def written(schedule: Schedule) -> bytes:
    """Return the file of a schedule, which `read_schedule` reads."""
    return msgspec.json.format(msgspec.json.encode(schedule), indent=1) + b"\n"
