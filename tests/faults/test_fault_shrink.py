"""The shortest failing list of faults is found."""

from collections.abc import Sequence

import pytest

from kvmesh.lab.faults.command import shortened, shrink
from kvmesh.lab.faults.schedule import plan


@pytest.mark.parametrize("guilty", [{3}, {0, 19}, {4, 5, 6}, {1, 9, 17}])
def test_only_the_guilty_faults_are_left(guilty: set[int]) -> None:
    assert shrink(range(20), lambda part: guilty <= set(part), 1000) == sorted(guilty)


def test_a_run_that_fails_without_faults_needs_none() -> None:
    assert shrink(range(20), lambda part: True, 1000) == []


def test_shrinking_ends_after_the_allowed_runs() -> None:
    runs: list[Sequence[int]] = []

    def fails(part: Sequence[int]) -> bool:
        runs.append(part)
        return False

    assert shrink(range(20), fails, 5) == list(range(20))
    assert len(runs) == 5


def test_a_shortened_schedule_ends_after_its_last_fault() -> None:
    schedule = plan(1, 120)
    last = schedule.faults[-1]
    assert last.at_s + last.for_s < shortened(schedule).seconds <= 120
