"""Turn a decision into steps that are safe to repeat. Pure."""

from dataclasses import dataclass
from typing import Literal

from kvmesh.planner.connectors.connector import Applied, Fleets
from kvmesh.planner.model import RoleFleet, ScalingDecision

RoleName = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Steps:
    """The flip comes first, then the counts to order. `notes` say what is not done as asked."""

    prefill: int
    decode: int
    flip_to: RoleName | None = None
    flip: int = 0
    notes: tuple[str, ...] = ()


def steps_to(decision: ScalingDecision, fleets: Fleets, *, name: str, can_flip: bool, can_choose: bool) -> Steps:
    """Return the steps from `fleets` to the decision. `name` is the connector's, for the notes.

    With `can_choose` the connector takes away ready workers only. Without it, the connector takes no worker of a role
    away while others of that role start.
    """
    notes: list[str] = []
    prefill, decode, flip = fleets.prefill, fleets.decode, 0
    flip_to = decision.flip.to_role if decision.flip is not None else None
    if decision.flip is not None and flip_to is not None:
        source, target, kept, wanted = (
            (prefill, decode, decision.prefill, decision.decode)
            if flip_to == "decode"
            else (decode, prefill, decision.decode, decision.prefill)
        )
        spare = min(source.ready, source.ordered - kept)
        flip = max(0, min(decision.flip.count, spare, wanted - target.ordered))
        if flip and not can_flip:
            notes.append(
                f"{name} cannot turn a worker into a {flip_to} worker: {flip} of the other role taken away and "
                f"{flip} started instead"
            )
            flip = 0
        source = RoleFleet(ready=source.ready - flip, starting=source.starting, draining=source.draining)
        target = RoleFleet(ready=target.ready, starting=target.starting + flip, draining=target.draining)
        prefill, decode = (source, target) if flip_to == "decode" else (target, source)
    counts: list[int] = []
    for role, fleet, asked in (("prefill", prefill, decision.prefill), ("decode", decode, decision.decode)):
        count = reachable(fleet, asked, can_choose=can_choose)
        if count > asked:
            notes.append(
                f"{count - asked} {role} workers more than asked stay for now: {fleet.starting} of {fleet.ordered} "
                "still start, and none of those is taken away"
            )
        counts.append(count)
    return Steps(counts[0], counts[1], flip_to if flip else None, flip, tuple(notes))


def reachable(fleet: RoleFleet, asked: int, *, can_choose: bool) -> int:
    """Return how many workers may be ordered now, on the way to `asked`."""
    if asked >= fleet.ordered or fleet.starting == 0:
        return asked
    if not can_choose:
        return fleet.ordered
    return fleet.ordered - max(0, fleet.ready - asked)


def applied_of(decision: ScalingDecision, prefill: int, decode: int, flipped: int, notes: tuple[str, ...]) -> Applied:
    """Report a decision of which `prefill` and `decode` workers are ordered now."""
    return Applied(
        prefill=prefill,
        decode=decode,
        flipped=flipped,
        is_complete=(prefill, decode) == (decision.prefill, decision.decode),
        notes=notes,
    )
