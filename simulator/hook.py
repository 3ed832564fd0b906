"""The planner in the loop of a simulation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvmesh.planner.model import Observation, RoleFleet, ScalingDecision, WorkerLoad
from kvmesh.protocol.messages import Role
from kvmesh.simulator.agenda import Agenda
from kvmesh.simulator.records import Records
from kvmesh.simulator.worker import SimWorkerState


class ScaledWorker(Protocol):
    """A worker that can be turned into another role."""

    turns_into: Role | None


W = TypeVar("W", bound=ScaledWorker)


class ScaledFleet(Protocol[W]):
    """A fleet that a planner observes and scales."""

    workers: list[W]
    decoding_role: Role

    def count(self, role: Role) -> RoleFleet: ...

    def loads(self, role: Role, queued_in_router: int) -> tuple[WorkerLoad, ...]: ...

    def least_loaded(self, role: Role) -> Iterator[W]: ...


@dataclass(frozen=True, slots=True)
class PlannerHook:
    """Name the planner of a simulation: `decide` is asked every `interval_s`, its decision is carried out at once.

    When `traffic_s` (a multiple of `interval_s`) have passed, `decide` is told the Traffic of that time, else None.
    """

    decide: Callable[[Observation], ScalingDecision]
    interval_s: float = 5.0
    traffic_s: float = 60.0


class PlannerLoop(Generic[W]):
    """Asks the hook at its interval and carries its decisions out: orders workers, lets workers leave or turn."""

    def __init__(
        self,
        hook: PlannerHook,
        agenda: Agenda,
        fleet: ScaledFleet[W],
        records: Records,
        *,
        unplaced_tokens: Callable[[], int],
        bring_up_to_now: Callable[[W], None],
        order: Callable[[Role], None],
        leave: Callable[[W, SimWorkerState], None],
    ) -> None:
        """Start asking. `unplaced_tokens` counts the prompt tokens that no router has placed."""
        self._hook = hook
        self._agenda = agenda
        self._fleet = fleet
        self._records = records
        self._unplaced_tokens = unplaced_tokens
        self._bring_up_to_now = bring_up_to_now
        self._order = order
        self._leave = leave
        agenda.at(hook.interval_s, self._ask, 1)

    def _ask(self, number: int) -> None:
        """Ask the planner for the `number`-th time."""
        hook, fleet, now = self._hook, self._fleet, self._agenda.now
        for worker in fleet.workers:
            self._bring_up_to_now(worker)
        every = max(1, round(hook.traffic_s / hook.interval_s))
        decoding, queued = fleet.decoding_role, self._unplaced_tokens()
        observation = Observation(
            at_s=now,
            prefill=fleet.count(Role.PREFILL),
            decode=fleet.count(decoding),
            traffic=self._records.take_traffic(now) if number % every == 0 else None,
            prefill_loads=fleet.loads(Role.PREFILL, queued),
            decode_loads=fleet.loads(decoding, queued if decoding is Role.AGGREGATED else 0),
        )
        decision = hook.decide(observation)
        self._records.decided(decision)
        self._apply(decision)
        self._agenda.at((number + 1) * hook.interval_s, self._ask, number + 1)

    def _apply(self, decision: ScalingDecision) -> None:
        decoding = self._fleet.decoding_role
        if decision.flip is not None and decoding is Role.DECODE:
            into = Role(decision.flip.to_role)
            source = Role.PREFILL if into is Role.DECODE else Role.DECODE
            for worker, _ in zip(self._fleet.least_loaded(source), range(decision.flip.count), strict=False):
                worker.turns_into = into
                self._records.flipped += 1
                self._leave(worker, SimWorkerState.TURNING)
        if decoding is Role.DECODE:
            self._scale(Role.PREFILL, decision.prefill)
        self._scale(decoding, decision.decode)

    def _scale(self, role: Role, wanted: int) -> None:
        surplus = self._fleet.count(role).ordered - wanted
        for _ in range(-surplus):
            self._records.started += 1
            self._order(role)
        for worker, _ in zip(self._fleet.least_loaded(role), range(surplus), strict=False):
            self._records.stopped += 1
            self._leave(worker, SimWorkerState.DRAINING)
