"""Find the shortest list of faults that still fails: delta debugging. Pure, but for the runs that the caller makes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from kvmesh.lab.faults.schedule import Schedule

T = TypeVar("T")
AFTER_S = 4.0  # a shortened run goes on so long after its last fault


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_runs: int) -> list[T]:
    """Return a part of `items` for which `fails` holds, and of which no tried part fails.

    `fails(items)` must hold. Parts keep their order. At most `most_runs` calls are made.
    """
    left = list(items)
    runs, parts = 0, 2
    while len(left) >= 1:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            without = left[:start] + left[start + size :]
            if runs >= most_runs:
                return left
            runs += 1
            if fails(without):
                left, parts = without, max(parts - 1, 2)
                break
        else:
            if parts >= len(left):
                return left
            parts = min(2 * parts, len(left))
    return left


def shortened(schedule: Schedule) -> Schedule:
    """Return a schedule that ends a few seconds after its last fault."""
    last_s = max((fault.at_s + fault.for_s for fault in schedule.faults), default=0.0)
    return replace(schedule, seconds=round(min(schedule.seconds, last_s + AFTER_S), 2))
