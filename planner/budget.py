"""Limit what is ordered: minima, the GPU budget, and how fast counts may change. Pure."""

from dataclasses import dataclass

from kvmesh.planner.model import PlannerConfig, Reason
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile


@dataclass(frozen=True, slots=True)
class Counts:
    prefill: int
    decode: int


def most_of(one: Counts, other: Counts) -> Counts:
    return Counts(max(one.prefill, other.prefill), max(one.decode, other.decode))


def least_of(one: Counts, other: Counts) -> Counts:
    return Counts(min(one.prefill, other.prefill), min(one.decode, other.decode))


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """The bounds of a fleet. `prefill_gpus` and `decode_gpus` are those of one worker, at least 1."""

    prefill_gpus: int
    decode_gpus: int
    max_gpus: int
    min_prefill: int
    min_decode: int
    max_step_up: int
    max_step_down: int

    @property
    def fewest(self) -> Counts:
        return Counts(self.min_prefill, self.min_decode)

    def gpus(self, counts: Counts) -> int:
        return counts.prefill * self.prefill_gpus + counts.decode * self.decode_gpus


def limits_of(config: PlannerConfig, prefill_gpus: int, decode_gpus: int) -> ScalingLimits:
    """Return the bounds of these settings. Raise ConfigError if the minima alone need more than the budget."""
    limits = ScalingLimits(
        prefill_gpus=max(1, prefill_gpus),
        decode_gpus=max(1, decode_gpus),
        max_gpus=config.max_gpus,
        min_prefill=0 if config.mode == "aggregated" else config.min_prefill,
        min_decode=config.min_decode,
        max_step_up=config.max_step_up,
        max_step_down=config.max_step_down,
    )
    fewest = limits.gpus(limits.fewest)
    if fewest > limits.max_gpus:
        raise ConfigError(
            f"the fewest workers, {limits.min_prefill} prefill and {limits.min_decode} decode, take {fewest} GPUs, "
            f"the budget is {limits.max_gpus}",
            hint="raise max_gpus, or lower min_prefill or min_decode",
        )
    return limits


def counted_gpus(profile: Profile) -> int:
    """Return the GPUs of one worker for a budget; a worker on CPUs counts as one."""
    return max(1, profile.gpus)


def published_budget(wanted: Counts, limits: ScalingLimits) -> Counts:
    """Apply the reference's rule: prefill shrinks in proportion, decode gets the rest; (0, 0) below the minima."""
    if limits.gpus(wanted) <= limits.max_gpus:
        return wanted
    if limits.gpus(limits.fewest) > limits.max_gpus:
        return Counts(0, 0)
    room = (limits.max_gpus - limits.min_decode * limits.decode_gpus) // limits.prefill_gpus
    shrunk = wanted.prefill * limits.max_gpus // limits.gpus(wanted)
    prefill = max(limits.min_prefill, min(room, shrunk))
    return Counts(prefill, (limits.max_gpus - prefill * limits.prefill_gpus) // limits.decode_gpus)


def within_budget(wanted: Counts, limits: ScalingLimits) -> Counts:
    """Return at least the minima. If the budget is short, return the split that covers most of what both roles want.

    A split covers the smaller of the two shares ordered / wanted, because requests need both roles. So the wanted ratio
    is kept as closely as whole workers allow. No role gets more than it wants, except its minimum.
    """
    most = Counts(max(wanted.prefill, limits.min_prefill), max(wanted.decode, limits.min_decode))
    if limits.gpus(most) <= limits.max_gpus:
        return most
    best, best_score = limits.fewest, (-1.0, -1.0)
    for prefill in range(limits.min_prefill, most.prefill + 1):
        decode = min(most.decode, (limits.max_gpus - prefill * limits.prefill_gpus) // limits.decode_gpus)
        if decode < limits.min_decode:
            break
        shares = sorted((prefill / max(1, most.prefill), decode / max(1, most.decode)))
        if (score := (shares[0], shares[1])) > best_score:
            best, best_score = Counts(prefill, decode), score
    return best


def clamp(
    wanted: Counts, current: Counts, draining: Counts, limits: ScalingLimits
) -> tuple[Counts, tuple[Reason, ...]]:
    """Return what to order now, and the limits that held it back. `current` counts ready and starting workers.

    Draining workers still hold their GPUs: nothing is ordered in their place before they are gone.
    """
    reasons: list[Reason] = []
    goal = within_budget(wanted, limits)
    if goal.prefill > wanted.prefill or goal.decode > wanted.decode:
        text = f"minimum {limits.min_prefill} prefill, {limits.min_decode} decode"
        reasons.append(Reason(code="minimum", text=text))
    if goal.prefill < wanted.prefill or goal.decode < wanted.decode:
        text = (
            f"{wanted.prefill} prefill and {wanted.decode} decode take {limits.gpus(wanted)} GPUs, "
            f"the budget of {limits.max_gpus} gives {goal.prefill} and {goal.decode}"
        )
        reasons.append(Reason(code="budget", text=text))
    stepped = Counts(
        max(limits.min_prefill, _step(current.prefill, goal.prefill, limits)),
        max(limits.min_decode, _step(current.decode, goal.decode, limits)),
    )
    if stepped != goal:
        text = f"at most {limits.max_step_up} up and {limits.max_step_down} down at once: {_pair(goal)} later"
        reasons.append(Reason(code="rate-limit", text=text))
    fitted = _fit(stepped, current, draining, limits)
    if fitted != stepped:
        text = f"{_pair(stepped)} would take more than {limits.max_gpus} GPUs until others are gone"
        reasons.append(Reason(code="budget-wait", text=text))
    return fitted, tuple(reasons)


def _step(current: int, goal: int, limits: ScalingLimits) -> int:
    return min(max(goal, current - limits.max_step_down), current + limits.max_step_up)


def _fit(wanted: Counts, current: Counts, draining: Counts, limits: ScalingLimits) -> Counts:
    """Order no more than the budget allows. If the present workers alone exceed the budget, shrink at once."""
    prefill, decode = wanted.prefill, wanted.decode
    busy = limits.gpus(draining)
    while limits.gpus(Counts(prefill, decode)) + busy > limits.max_gpus:
        ups = (prefill - max(current.prefill, limits.min_prefill), decode - max(current.decode, limits.min_decode))
        if ups[0] <= 0 and ups[1] <= 0:
            break
        if ups[0] >= ups[1]:
            prefill -= 1
        else:
            decode -= 1
    return within_budget(Counts(prefill, decode), limits)


def _pair(counts: Counts) -> str:
    return f"{counts.prefill} prefill and {counts.decode} decode"
