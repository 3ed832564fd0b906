"""Imagine a fleet: it begins as the real one, and every order is carried out after the time that it would take."""

from collections.abc import Callable
from typing import Literal

from kvmesh.planner.connectors.connector import Applied, Connector, Fleets
from kvmesh.planner.connectors.steps import applied_of, steps_to
from kvmesh.planner.model import RoleFleet, ScalingDecision


class ShadowConnector:
    name = "shadow"

    def __init__(self, real: Connector, clock: Callable[[], float], start_s: float, flip_s: float) -> None:
        """A worker takes `start_s` to start, and `flip_s` to change its role."""
        self._real = real
        self._clock = clock
        self._start_s = start_s
        self._flip_s = flip_s
        self._ready: dict[str, int] = {}
        self._due_s: dict[str, list[float]] = {"prefill": [], "decode": []}  # when starting workers are ready

    async def fleets(self) -> Fleets:
        if not self._ready:
            found = await self._real.fleets()
            self._ready = {"prefill": found.prefill.ordered, "decode": found.decode.ordered}
        return Fleets(prefill=self._fleet("prefill"), decode=self._fleet("decode"))

    async def apply(self, decision: ScalingDecision) -> Applied:
        steps = steps_to(decision, await self.fleets(), name=self.name, can_flip=True, can_choose=True)
        if steps.flip_to is not None:
            self._ready["decode" if steps.flip_to == "prefill" else "prefill"] -= steps.flip
            self._due_s[steps.flip_to] += [self._clock() + self._flip_s] * steps.flip
        self._order("prefill", steps.prefill)
        self._order("decode", steps.decode)
        there = await self.fleets()
        return applied_of(decision, there.prefill.ordered, there.decode.ordered, steps.flip, steps.notes)

    async def close(self) -> None:
        await self._real.close()

    def _order(self, role: Literal["prefill", "decode"], count: int) -> None:
        more = count - self._fleet(role).ordered
        if more > 0:
            self._due_s[role] += [self._clock() + self._start_s] * more
        else:
            self._ready[role] += more

    def _fleet(self, role: Literal["prefill", "decode"]) -> RoleFleet:
        now_s = self._clock()
        waiting = [due_s for due_s in self._due_s[role] if due_s > now_s]
        self._ready[role] += len(self._due_s[role]) - len(waiting)
        self._due_s[role] = waiting
        return RoleFleet(ready=self._ready[role], starting=len(waiting))
