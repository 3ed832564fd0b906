"""Check a mesh on four hosts under every fault of the network, of etcd and of NATS. Each figure is measured here."""

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvmesh.lab.hosts.compare import CacheView
from kvmesh.lab.hosts.delay import why_no_delay
from kvmesh.lab.hosts.lab import HOSTS, Lab, lab
from kvmesh.lab.hosts.mesh import LEASE_S, HostsAnswer, HostsMesh
from kvmesh.lab.hosts.report import FaultResult, Measured, is_too_slow, late, result_of, tried_again

TRIES = 3  # a machine that stands still for a second is slow once, a broken promise is slow every time
REQUESTS = 6  # during each fault
PROMPTS = range(1, 9)
LATE_S = 1.5  # a fault with which no request can be answered ends after so long
AWAY_S = LEASE_S + 2.0
DIVERGED_S = 30.0  # for routers to know all caches again
# With these, the frontend reaches no decode worker at all: requests wait for the end of the fault, or get a 503.
NOBODY_DECODES = {frozenset({"front", "decode"}), frozenset({"decode"}), frozenset({"front"})}
Tell = Callable[[str], None]


class NetworkFault(NamedTuple):
    """A fault, the hosts that it concerns, and what begins it."""

    name: str
    kind: str
    hosts: Sequence[str]
    begin: Callable[[], None]

    @property
    def lets_nobody_decode(self) -> bool:
        return self.kind in ("cut", "unplugged", "reset") and frozenset(self.hosts) in NOBODY_DECODES


class HostsCheck:
    """Puts a running mesh through the faults, one after the other."""

    def __init__(self, mesh: HostsMesh, measured: Measured, tell: Tell) -> None:
        self.mesh, self.measured, self._tell = mesh, measured, tell
        self._random = random.Random(measured.seed)
        self.right: Mapping[int, Sequence[str]] = {}

    def run(self) -> None:
        self.measure_undisturbed()
        for fault in network_faults(self.mesh.lab):
            if fault.kind == "delay" and (reason := why_no_delay()):
                self.measured.skipped.append(f"{fault.name}: {reason}")
                self._tell(f"skipped: {fault.name}: {reason}")
                continue
            way = self.wait_through if fault.lets_nobody_decode else self.ask_during
            result = way(fault.name, fault.kind, fault.begin)
            while is_too_slow(result) and result.tries < TRIES:
                self._tell(f"{fault.name}: slower than promised, trying again")
                result = tried_again(result, way(fault.name, fault.kind, fault.begin))
            self.take(result)
        self.take(self.lose_server("etcd"))
        self.take(self.ask_during("etcd cut off from decode", "server", self.outlive_leases))
        self.check_nats()
        self.measured.requests = self.mesh.asked

    def take(self, result: FaultResult) -> None:
        self.measured.faults.append(result)
        seen = (
            f"answered {result.waited_s:.2f} s after healing began"
            if result.worst_extra_s is None
            else f"at most {result.worst_extra_s:.2f} s more"
        )
        wrong = (
            f", {result.failed} failed, {result.wrong_tokens} wrong tokens {result.errors}"
            if result.failed or result.wrong_tokens
            else ""
        )
        self._tell(f"{result.fault}: {seen}, first request after healing {result.heal_first_request_s:.2f} s{wrong}")

    # --- requests --------------------------------------------------------------------------------------

    def ask_some(self, count: int = REQUESTS) -> list[tuple[int, HostsAnswer]]:
        numbers = [self._random.choice(PROMPTS) for _ in range(count)]
        return [(number, self.mesh.ask(number)) for number in numbers]

    def measure_undisturbed(self) -> None:
        """Take the answers of single workers as the right ones; then let KV move, and count it on the link."""
        alone = {"disaggregate": False, "trace": True}
        self.right = {number: self.mesh.ask(number, kvmesh=alone).tokens for number in PROMPTS}
        sender = self.mesh.lab.hosts["prefill"]
        before_bytes = sender.sent_bytes()
        answers = [(number, self.mesh.ask(number)) for number in PROMPTS]
        measured = self.measured
        measured.kv_bytes_link = sender.sent_bytes() - before_bytes
        measured.kv_bytes_pulled = sum(answer.pulled_bytes for _, answer in answers)
        measured.kv_transfers = {str(answer.trace.get("transfer")) for _, answer in answers}
        measured.usual_s = statistics.median(answer.took_s for _, answer in answers)
        self.take(result_of("none", "none", answers, self.right, measured.usual_s, measured.usual_s))
        self.until_compared("undisturbed")

    # --- faults ----------------------------------------------------------------------------------------

    def ask_during(self, fault: str, kind: str, begin: Callable[[], None]) -> FaultResult:
        begin()
        answers = self.ask_some()
        self.mesh.lab.heal()
        return self.healed(fault, kind, answers)

    def healed(self, fault: str, kind: str, answers: list[tuple[int, HostsAnswer]]) -> FaultResult:
        """Ask once more after healing, then wait until KV moves again."""
        [(number, first)] = after = self.ask_some(1)
        self.mesh.until(lambda: self.mesh.ask(0).pulled_bytes > 0, f"KV moves again after {fault}")
        usual_s = self.measured.usual_s
        result = result_of(fault, kind, answers, self.right, usual_s, first.took_s)
        late = result_of(fault, kind, after, self.right, usual_s, first.took_s)
        return msgspec.structs.replace(
            result,
            failed=result.failed + late.failed,
            errors=result.errors + late.errors,
            wrong_tokens=result.wrong_tokens + late.wrong_tokens,
        )

    def wait_through(self, fault: str, kind: str, begin: Callable[[], None]) -> FaultResult:
        """Send requests that nobody can answer before the network heals; resets get a 503 at once."""
        begin()
        began_s = time.monotonic()
        with ThreadPoolExecutor(2) as clients:
            numbers = [self._random.choice(PROMPTS) for _ in range(2)]
            waiting = [(number, clients.submit(self.mesh.ask, number)) for number in numbers]
            time.sleep(LATE_S)
            healing_s = time.monotonic()
            self.mesh.lab.heal()
            [(new, first)] = self.ask_some(1)
            answers = [*((number, answer.result()) for number, answer in waiting), (new, first)]
        waited_s = max(began_s + answer.took_s - healing_s for _, answer in answers[:-1])
        self.mesh.until(lambda: self.mesh.ask(0).pulled_bytes > 0, f"KV moves again after {fault}")
        result = result_of(fault, kind, answers, self.right, self.measured.usual_s, first.took_s)
        return late(result, max(0.0, waited_s))

    def lose_server(self, name: str) -> FaultResult:
        """Kill a server, ask while it is away and after its restart."""
        self.mesh.stop_server(name)
        ends_s = time.monotonic() + AWAY_S
        answers = self.ask_some()
        while time.monotonic() < ends_s:
            answers += self.ask_some(1)
        self.mesh.start_server(name)
        answers += self.ask_some()
        return self.healed(f"{name} away for {AWAY_S:.0f} s, then restarted", "server", answers)

    def outlive_leases(self) -> None:
        """Cut etcd off from the decode workers until their leases have ended."""
        self.mesh.lab.cut("infra", "decode")
        time.sleep(AWAY_S)

    # --- caches ----------------------------------------------------------------------------------------

    def check_nats(self) -> None:
        """Kill NATS and have decode-1 cache what it cannot publish. After the restart every router must know it."""
        self.mesh.stop_server("nats")
        here = {"trace": True, "worker": "decode-1", "disaggregate": False}
        answers = [(number, self.mesh.ask(number, kvmesh=here)) for number in PROMPTS]
        self.measured.nats_away_diverged = len(self.diverged())
        self.mesh.start_server("nats")
        self.take(self.healed("nats away, then restarted", "server", answers))
        self.measured.nats_restart_diverged = self.until_compared("NATS")

    def until_compared(self, what: str) -> int:
        """Wait until every router knows every cache. Return how many views are still wrong after DIVERGED_S."""
        started_s = time.monotonic()
        while (wrong := self.diverged()) and time.monotonic() < started_s + DIVERGED_S:
            time.sleep(0.5)
        took_s = time.monotonic() - started_s
        self._tell(f"{what}: {len(wrong)} views of caches are wrong after {took_s:.1f} s")
        return len(wrong)

    def diverged(self) -> list[CacheView]:
        """Return the views of caches, one for each router and worker, that are not what the worker holds."""
        views = self.mesh.compare()
        full = [view for view in views if view.is_equal and view.blocks > 0]
        self.measured.event_transports |= {view.transport for view in full}
        return [view for view in views if not view.is_equal]


def network_faults(made: Lab) -> list[NetworkFault]:
    """Return every fault of the network."""
    pairs = list(itertools.combinations(HOSTS, 2))
    return [
        *(
            NetworkFault(f"cut {one} - {other}", "cut", (one, other), partial(made.cut, one, other))
            for one, other in pairs
        ),
        *(
            NetworkFault(f"resets {one} - {other}", "reset", (one, other), partial(made.reset, one, other))
            for one, other in pairs
        ),
        *(NetworkFault(f"{name} unplugged", "unplugged", (name,), partial(made.unplug, name)) for name in HOSTS),
        NetworkFault("2 % of all packets lost", "loss", HOSTS, partial(lose_some, made, pairs)),
        *(
            NetworkFault(f"packets of {name} 20 ms late", "delay", (name,), partial(made.delay, name, 0.02))
            for name in ("prefill", "decode")
        ),
    ]


def lose_some(made: Lab, pairs: Sequence[tuple[str, str]]) -> None:
    for one, other in pairs:
        made.lose(one, other, 2)


def check_hosts(folder: Path, seed: int, tell: Tell) -> Measured:
    """Build the hosts in `folder`, run the check, remove all. Raises MeshError if a mesh cannot run there."""
    measured = Measured(seed=seed)
    started_s = time.monotonic()
    shared_before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with lab(folder) as made:
        measured.hosts = len(made.hosts)
        tell(f"{measured.hosts} hosts; starting etcd, NATS, two routers, a frontend and three workers; seed {seed}")
        mesh = HostsMesh(made)
        HostsCheck(mesh, measured, tell).run()
        made.stop_all()
        measured.leftovers = [f"temporary file {name}" for name in made.temporary_files()]
    measured.leftovers += made.leftovers() + left_in_shared_memory(shared_before)
    measured.duration_s = time.monotonic() - started_s
    return measured


def left_in_shared_memory(before: set[str], *, is_private: bool = False) -> list[str]:
    """Return what is new in /dev/shm and used by no process that lives.

    A semaphore counts in a private /dev/shm alone: its name does not say which program has left it.
    """
    there = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    new = {name for name in there if name not in before and (is_private or not name.startswith("sem."))}
    if not new:
        return []
    used = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue
        used |= {name for name in new if f"/dev/shm/{name}" in text}
    return [f"/dev/shm/{name}" for name in sorted(new - used)]
