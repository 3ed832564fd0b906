"""Carry faults out on a running mesh, each at its time, and say what was done when."""

import asyncio
import math
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvmesh.lab.faults.bombs import send_bombs
from kvmesh.lab.faults.certificates import SHORT_LIFE_S
from kvmesh.lab.faults.kinds import KINDS
from kvmesh.lab.faults.memory_limit import MemoryLimit, why_unavailable
from kvmesh.lab.faults.mesh import FaultsMesh
from kvmesh.lab.faults.operator import Operator
from kvmesh.lab.faults.recovery import Happened
from kvmesh.lab.faults.room import PacketFault, PrivateRoom
from kvmesh.lab.faults.schedule import PlannedFault, Schedule
from kvmesh.lab.faults.twice import start_twice
from kvmesh.lab.faults.weights import ORIGINAL, OVERWRITTEN, ROLLED_OUT, Served, WeightsHistory, overwrite, roll_out
from kvmesh.lab.faults.zmtp import EventTrouble
from kvmesh.protocol.errors import MeshError

RESTARTED_S = 30.0  # a process that got a SIGTERM has started again by then
STARTED_S = 10.0  # a process that read its certificate before it was renewed has ended by then
POLL_S = 0.05
FILLER_BYTES = 1 << 16
ENDS_PROCESSES = ("kill", "memory_limit", "restart", "rolling", "engine_raise", "engine_stall")
RESTARTS_TWICE = ("other_weights",)
KILLS_ABOVE = 0.5  # amount of other_weights
VERDICTS = {  # of nftables, for the kinds that lose packets in the kernel
    "cut": "drop",
    "packets_lost": "numgen random mod 1000 < {share} drop",
    "refused": "reject with tcp reset",
}
Begin = Callable[[PlannedFault], Awaitable[None]]


class Machine:
    """Does the faults of a schedule. `happened` holds those that are over."""

    def __init__(
        self,
        mesh: FaultsMesh,
        clock: Callable[[], float],
        tell: Callable[[str], None],
        room: PrivateRoom | None = None,
    ) -> None:
        """Take `room`, the namespaces of the run; None: it has none."""
        self._mesh = mesh
        self._clock = clock
        self._tell = tell
        self.happened: list[Happened] = []
        self.skipped: dict[str, str] = {}  # reasons, by kind
        self.complaints: list[str] = []  # what faults themselves found wrong
        self.weights = WeightsHistory()
        self._has_others: dict[str, tuple[Served, Served]] = {}  # workers with other weights
        self._operator = Operator(mesh, clock, self.complaints)
        self._has_disk = room is not None and room.has_disk
        self._has_network = room is not None and room.has_network
        self._packet_faults = 0
        self.provoked: dict[str, int] = {}  # how often each process was made to end, or may have ended itself

    def why_not(self, kind: str) -> str:
        """Return why this kind of fault cannot be made in this mesh; "" if it can."""
        mesh = self._mesh
        if kind == "discovery_full" and mesh.etcd is None:
            return "discovery is a folder; disk_full fills it"
        if kind.startswith("nats") and mesh.nats is None:
            return "there is no nats-server"
        if kind == "disk_full" and not self._has_disk:
            return "a file system of its own needs root"
        if kind in VERDICTS and not self._has_network:
            return "a network of its own needs root, iproute2 and nftables"
        return why_unavailable() if kind == "memory_limit" else ""

    async def run(self, schedule: Schedule) -> None:
        """Carry out all faults; return when the last one is over."""
        async with self._operator, asyncio.TaskGroup() as group:
            for fault in schedule.faults:
                if reason := self.why_not(fault.kind):
                    self.skipped[fault.kind] = reason
                    continue
                group.create_task(self._at_its_time(fault), name=fault.in_words())

    async def _at_its_time(self, fault: PlannedFault) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - self._clock()))
        began_s = self._clock()
        note = ""
        begin, end = self._actions(fault)
        try:
            await begin()
            if fault.for_s:
                await asyncio.sleep(fault.for_s)
            await end()
        except (OSError, RuntimeError, MeshError) as error:
            note = f"not carried out: {error}"
        self.happened.append(Happened(fault, began_s, self._clock(), note))
        self._tell(f"{fault.in_words()}{f': {note}' if note else ''}")

    def _actions(self, fault: PlannedFault) -> tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]:
        """Return what begins a fault and what ends it."""
        name = fault.target
        if fault.kind in ENDS_PROCESSES:
            names = self._mesh.of_role(fault.role) if fault.kind == "rolling" else [name]
            for one in names:
                self.provoked[one] = self.provoked.get(one, 0) + 1
        if fault.kind in RESTARTS_TWICE:
            self.provoked[name] = self.provoked.get(name, 0) + 2
        table: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "kill": (partial(self._mesh.signal, name, signal.SIGKILL), _nothing),
            "stop": (
                partial(self._mesh.signal, name, signal.SIGSTOP),
                partial(self._mesh.signal, name, signal.SIGCONT),
            ),
            **self._memory(name, f"{round(fault.at_s * 100)}"),
            "restart": (partial(self._restart, name), _nothing),
            "rolling": (partial(self._roll, fault.role), _nothing),
            "reset": (partial(self._mesh.reset, name), _nothing),
            "half_open": (partial(self._mesh.forget, name), _nothing),
            **self._weather_of(fault),
            **self._packets_of(fault),
            **self._shared(),
            **self._engine(name, fault.amount),
            **self._others(name, fault.amount),
            "orders": (partial(self._operator.any_sequence, name, f"orders {fault.at_s} {name}"), _nothing),
            "guide_bombs": (partial(self._bomb, f"bombs {fault.at_s}"), _nothing),
            "run_dir_twice": (partial(self._start_twice, f"twice-{round(fault.at_s * 100)}"), _nothing),
            "expired": (partial(self._expire, name), partial(self._renew, name)),
        }
        begin, end = table[fault.kind]
        return partial(_do, begin), partial(_do, end)

    # --- processes ------------------------------------------------------------------------------------

    async def _restart(self, name: str) -> None:
        before = self._mesh.supervisor.pid(name)
        self._mesh.signal(name, signal.SIGCONT)
        self._mesh.signal(name, signal.SIGTERM)
        ends_s = self._clock() + RESTARTED_S
        while True:
            if self._mesh.supervisor.pid(name) not in (before, None) or self._clock() > ends_s:
                return
            await asyncio.sleep(POLL_S)

    async def _roll(self, role: str) -> None:
        """Restart all of a role, each when the one before it is there again."""
        for name in self._mesh.of_role(role):
            await self._restart(name)
            ends_s = self._clock() + RESTARTED_S
            while True:
                if await self._mesh.metrics(name) or self._clock() > ends_s:
                    break
                await asyncio.sleep(POLL_S)

    def _memory(self, name: str, number: str) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        limits: list[MemoryLimit] = []

        def begin() -> None:
            if (pid := self._mesh.supervisor.pid(name)) is not None:
                limits.append(MemoryLimit(number))
                limits[0].begin(pid)
                self._mesh.order(name, replace(self._mesh.orders[name], hoards=pid))

        def end() -> None:
            self._mesh.order(name, replace(self._mesh.orders[name], hoards=0))
            for limit in limits:
                limit.end()

        return {"memory_limit": (begin, end)}

    # --- the network ----------------------------------------------------------------------------------

    def _weather_of(self, fault: PlannedFault) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        weather = self._mesh.weather.get(fault.target)
        if weather is None:
            return {}

        def becomes(field: str, value: float) -> Callable[[], object]:
            return lambda: setattr(weather, field, value)

        def troubles(kind: str, share: float) -> None:
            weather.events.kind, weather.events.share = kind, share

        table: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "partition": (weather.cut, weather.heal),
            "delay": (becomes("delay_s", fault.amount), becomes("delay_s", 0.0)),
            "loss": (becomes("loss", fault.amount), becomes("loss", 0.0)),
            "flipped": (becomes("flips", fault.amount), becomes("flips", 0.0)),
        }
        for kind in KINDS:
            if kind.startswith("events_"):
                table[kind] = (partial(troubles, kind, fault.amount), partial(troubles, EventTrouble().kind, 0.0))
        return table

    def _packets_of(self, fault: PlannedFault) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        if fault.kind not in VERDICTS:
            return {}
        self._packet_faults += 1
        verdict = VERDICTS[fault.kind].format(share=round(fault.amount * 1000))
        made = PacketFault(self._packet_faults, self._mesh.shown_host(fault.target), verdict)
        return {fault.kind: (partial(asyncio.to_thread, made.begin), partial(asyncio.to_thread, made.end))}

    # --- what all share -------------------------------------------------------------------------------

    def _shared(self) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        mesh = self._mesh
        table: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "disk_full": (self._fill_disk, self._empty_disk)
        }
        if mesh.etcd is not None:
            etcd = mesh.etcd
            table |= {
                "discovery_away": (partial(etcd.signal, signal.SIGSTOP), partial(etcd.signal, signal.SIGCONT)),
                "discovery_empty": (etcd.lose_data, _nothing),
                "discovery_full": (etcd.fill, etcd.empty_again),
            }
        else:
            folder = mesh.folder / "disk" / "discovery"
            table |= {
                "discovery_away": (partial(_move, folder, "away"), partial(_move_back, folder, "away")),
                "discovery_empty": (partial(shutil.rmtree, folder, True), _nothing),
            }
        if mesh.nats is not None:
            table |= {"nats_away": (mesh.nats.kill, mesh.nats.start), "nats_empty": (mesh.nats.lose_data, _nothing)}
        return table

    def _fill_disk(self) -> None:
        path = self._mesh.folder / "disk" / "filler"
        with path.open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(FILLER_BYTES))

    def _empty_disk(self) -> None:
        (self._mesh.folder / "disk" / "filler").unlink(missing_ok=True)

    # --- certificates ---------------------------------------------------------------------------------

    async def _expire(self, name: str) -> None:
        """Give a process a certificate that expires soon; then have all its connections made again."""
        certificates = self._mesh.certificates
        assert certificates is not None, "only a closed mesh is planned to have this fault"
        self._mesh.expired_until_s[name] = math.inf
        await asyncio.to_thread(certificates.renew, name, SHORT_LIFE_S)
        await asyncio.sleep(SHORT_LIFE_S + 1.0)  # an expiry is in whole seconds
        self._mesh.reset(name)

    async def _renew(self, name: str) -> None:
        if self._mesh.certificates is not None:
            await asyncio.to_thread(self._mesh.certificates.renew, name)
        self._mesh.expired_until_s[name] = time.monotonic() + STARTED_S

    # --- weights --------------------------------------------------------------------------------------

    def _others(self, name: str, amount: float) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        return {
            "other_weights": (partial(self._roll_out, name, amount > KILLS_ABOVE), partial(self._roll_back, name)),
            "weights_in_place": (partial(self._overwrite, name), partial(self._overwrite_back, name)),
        }

    async def _roll_out(self, name: str, kills: bool) -> None:
        """Have a worker come back at its address with other weights; if it is killed, pulls from it are under way."""
        served = self._begin_others(name, ROLLED_OUT)
        roll_out(self._mesh.models[name], ROLLED_OUT)
        if kills:
            self._mesh.signal(name, signal.SIGKILL)
        await self._restart_until(name, ROLLED_OUT)
        self._has_others[name] = (served, self.weights.loaded(served, self._clock()))

    async def _roll_back(self, name: str) -> None:
        self._has_others[name][1].until_s = self._clock()
        roll_out(self._mesh.models[name], ORIGINAL)
        await self._restart_until(name, ORIGINAL)
        self._has_others.pop(name)[0].until_s = self._clock()

    async def _restart_until(self, name: str, weights: int) -> None:
        """Restart a worker, and wait until it has read its weights."""
        await self._restart(name)
        ends_s = self._clock() + RESTARTED_S
        while self._mesh.switches[name].weights != weights and self._clock() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _overwrite(self, name: str) -> None:
        served = self._begin_others(name, OVERWRITTEN)
        overwrite(self._mesh.models[name], OVERWRITTEN)
        await self._operator.nap_until(name, OVERWRITTEN)
        self._has_others[name] = (served, self.weights.loaded(served, self._clock()))
        await self._operator.bring_back(name, "with other weights after sleep, wake")

    async def _overwrite_back(self, name: str) -> None:
        self._has_others[name][1].until_s = self._clock()
        overwrite(self._mesh.models[name], ORIGINAL)
        await self._operator.nap_until(name, ORIGINAL)
        self._has_others.pop(name)[0].until_s = self._clock()
        await self._operator.bring_back(name, "with its old weights after sleep, wake")

    def _begin_others(self, name: str, weights: int) -> Served:
        """Note that a worker gets other weights. Raise RuntimeError if it has others already."""
        if name in self._has_others:
            raise RuntimeError(f"{name} has other weights already")
        served = self.weights.begin(name, weights, self._clock())
        self._has_others[name] = (served, served)
        return served

    # --- clients and operators ------------------------------------------------------------------------

    async def _bomb(self, seed: str) -> None:
        self.complaints += await send_bombs(self._mesh.urls, seed, self._clock)

    async def _start_twice(self, folder: str) -> None:
        self.complaints += await start_twice(self._mesh.folder / folder)

    # --- engines and clocks ---------------------------------------------------------------------------

    def _engine(self, name: str, amount: float) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        mesh = self._mesh

        def orders(**changes: float | bool | int) -> Callable[[], object]:
            return lambda: mesh.order(name, replace(mesh.orders[name], **changes))  # type: ignore[arg-type]

        def stalls() -> None:
            mesh.order(name, replace(mesh.orders[name], stalls=mesh.supervisor.pid(name) or 0))

        def raises() -> None:
            mesh.order(name, replace(mesh.orders[name], raises=mesh.orders[name].raises + 1))

        return {
            "clock_jump": (orders(clock_offset_s=amount), orders(clock_offset_s=0.0)),
            "engine_stall": (stalls, orders(stalls=0)),
            "engine_raise": (raises, _nothing),
            "engine_babble": (orders(babbles=True), orders(babbles=False)),
            "engine_blocks": (orders(holds_blocks=True), orders(holds_blocks=False)),
        }


def _nothing() -> None:
    return None


async def _do(action: Callable[[], object]) -> None:
    result = action()
    if asyncio.iscoroutine(result):
        await result


def _move(folder: Path, suffix: str) -> None:
    with suppress(FileNotFoundError):
        os.rename(folder, folder.with_suffix(f".{suffix}"))


def _move_back(folder: Path, suffix: str) -> None:
    """Bring a folder back, also where the mesh has made another one meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(folder.with_suffix(f".{suffix}"), folder)
