"""Decide what a worker does about an order, by the state that it is in. Pure: the table is the rule.

A worker is in exactly one state. Its card, /health, its metrics and its answers to operators all read that state.
docs/workers.md shows the table for operators.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvmesh.protocol.errors import DrainingError, MeshError, WrongStateError
from kvmesh.protocol.messages import Role


class WorkerState(StrEnum):
    """A value is what the card and `kvmesh workers` show."""

    SERVING = "serving"
    DRAINING = "draining"  # it finishes its requests, and is drained then
    DRAINED = "drained"
    FALLING_ASLEEP = "falling asleep"  # it finishes its requests, then its engine gives its memory back
    ASLEEP = "asleep"
    WAKING = "waking"
    TURNING = "turning"  # from one role to another: it has no card
    STOPPING = "stopping"
    FAILED = "failed"  # a change of role broke halfway: the process ends


class WorkerOrder(StrEnum):
    DRAIN = "drain"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"
    TURN = "turn"  # to a role that it does not have
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Begin:
    """Go to `state` now. A state of CHANGES lasts until its work is done."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class Nothing:
    """The worker is as the order wants it to be."""

    detail: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the change in progress has ended, then decide again."""


@dataclass(frozen=True, slots=True)
class OrderFirst:
    hint: str


Decision = Begin | Nothing | Wait | OrderFirst

S = WorkerState
# A state in which the worker works on a change: the state after it, and the one after a failure. None: as before.
CHANGES: Mapping[WorkerState, tuple[WorkerState, WorkerState | None]] = {
    S.DRAINING: (S.DRAINED, None),
    S.FALLING_ASLEEP: (S.ASLEEP, None),
    S.WAKING: (S.SERVING, S.ASLEEP),
    S.TURNING: (S.SERVING, S.FAILED),
}
DRAINED_DETAIL = "it takes no requests until it is resumed"
RESUMED_DETAIL = "it takes requests"
_WAIT = Wait()
_LATER = OrderFirst("ask again when it has")
_STOPS = Begin(S.STOPPING)

TABLE: Mapping[WorkerState, Mapping[WorkerOrder, Decision]] = {
    S.SERVING: {
        WorkerOrder.DRAIN: Begin(S.DRAINING),
        WorkerOrder.RESUME: Nothing(RESUMED_DETAIL),
        WorkerOrder.SLEEP: Begin(S.FALLING_ASLEEP),
        WorkerOrder.WAKE: Nothing("it is awake"),
        WorkerOrder.TURN: Begin(S.TURNING),
        WorkerOrder.STOP: _STOPS,
    },
    S.DRAINING: {
        WorkerOrder.DRAIN: _WAIT,
        WorkerOrder.RESUME: _WAIT,
        WorkerOrder.SLEEP: _WAIT,
        WorkerOrder.WAKE: OrderFirst("resume it"),
        WorkerOrder.TURN: OrderFirst("resume it first"),
        WorkerOrder.STOP: _STOPS,
    },
    S.DRAINED: {
        WorkerOrder.DRAIN: Nothing(DRAINED_DETAIL),
        WorkerOrder.RESUME: Begin(S.SERVING),
        WorkerOrder.SLEEP: Begin(S.FALLING_ASLEEP),
        WorkerOrder.WAKE: OrderFirst("resume it"),
        WorkerOrder.TURN: OrderFirst("resume it first"),
        WorkerOrder.STOP: _STOPS,
    },
    S.FALLING_ASLEEP: {
        WorkerOrder.DRAIN: _WAIT,
        WorkerOrder.RESUME: OrderFirst("wake it"),
        WorkerOrder.SLEEP: _WAIT,
        WorkerOrder.WAKE: _WAIT,
        WorkerOrder.TURN: OrderFirst("wake it first"),
        WorkerOrder.STOP: _STOPS,
    },
    S.ASLEEP: {
        WorkerOrder.DRAIN: Nothing("it is asleep, and takes no requests until it is woken"),
        WorkerOrder.RESUME: OrderFirst("wake it"),
        WorkerOrder.SLEEP: Nothing("it is asleep already"),
        WorkerOrder.WAKE: Begin(S.WAKING),
        WorkerOrder.TURN: OrderFirst("wake it first"),
        WorkerOrder.STOP: _STOPS,
    },
    S.WAKING: {
        WorkerOrder.DRAIN: _WAIT,
        WorkerOrder.RESUME: _WAIT,
        WorkerOrder.SLEEP: _WAIT,
        WorkerOrder.WAKE: _WAIT,
        WorkerOrder.TURN: _LATER,
        WorkerOrder.STOP: _STOPS,
    },
    S.TURNING: {
        WorkerOrder.DRAIN: _LATER,
        WorkerOrder.RESUME: _LATER,
        WorkerOrder.SLEEP: _LATER,
        WorkerOrder.WAKE: _LATER,
        WorkerOrder.TURN: _LATER,
        WorkerOrder.STOP: _STOPS,
    },
    S.STOPPING: {order: OrderFirst("") for order in WorkerOrder} | {WorkerOrder.STOP: Nothing("")},
    S.FAILED: {order: OrderFirst("") for order in WorkerOrder} | {WorkerOrder.STOP: _STOPS},
}
_NO_CARD = frozenset((S.TURNING, S.STOPPING, S.FAILED))
_ENDS = frozenset((S.STOPPING, S.FAILED))
_ENGINE_ANSWERS = frozenset((S.SERVING, S.DRAINING, S.DRAINED))


class WorkerStates:
    """The one state of a worker. An order may begin a change, which ends with `done` or `failed`."""

    def __init__(self) -> None:
        self.state = S.SERVING
        self.to_role: Role | None = None  # while it turns
        self.turns = 0
        self._before = S.SERVING

    @property
    def takes_requests(self) -> bool:
        return self.state is S.SERVING

    @property
    def has_card(self) -> bool:
        """Return whether the mesh may see a card of this worker."""
        return self.state not in _NO_CARD

    @property
    def engine_answers(self) -> bool:
        """Return whether the engine has to answer a request that the worker itself makes."""
        return self.state in _ENGINE_ANSWERS

    @property
    def on_card(self) -> str:
        """Return the state as the card shows it: "" for a worker that serves."""
        return "" if self.takes_requests else self.state.value

    def order(self, order: WorkerOrder, to_role: Role | None = None) -> Begin | Nothing | Wait:
        """Decide, and change the state if a change begins. Raise WrongStateError, or DrainingError while it stops."""
        decision = TABLE[self.state][order]
        match decision:
            case OrderFirst():
                raise self._refused(order, decision.hint)
            case Begin(state):
                self._before, self.state = self.state, state
                self.to_role = to_role if state is S.TURNING else None
        return decision

    def done(self, change: WorkerState) -> None:
        """End a change: its work is done. Does nothing if the worker has begun to stop meanwhile."""
        if self.state is change and change in CHANGES:
            self.turns += change is S.TURNING
            self.state, self.to_role = CHANGES[change][0], None

    def failed(self, change: WorkerState) -> None:
        """End a change: its work failed."""
        if self.state is change and change in CHANGES:
            after = CHANGES[change][1]
            self.state, self.to_role = self._before if after is None else after, None

    def refusal(self) -> DrainingError | None:
        """Return why a request has to go elsewhere, None if the worker takes it."""
        return None if self.takes_requests else DrainingError(self._sentence())

    def _sentence(self) -> str:
        if self.state in _ENDS:
            return "this worker is shutting down"
        if self.to_role is not None:
            return f"this worker is becoming {self.to_role.noun}"
        return f"this worker is {self.state.value}"

    def _refused(self, order: WorkerOrder, hint: str) -> MeshError:
        if self.state in _ENDS:
            return DrainingError(self._sentence())
        already = " already" if self.state is S.TURNING and order is WorkerOrder.TURN else ""
        return WrongStateError(self._sentence() + already, hint=hint)
