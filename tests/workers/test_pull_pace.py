"""Test when a KV pull is late, and when it is given up."""

import pytest

from kvmesh.workers.pulls import HOPELESS_S, LATE_S, TIMES_HOPELESS, TIMES_USUAL, PullPace


def test_without_any_pull_so_far_only_the_setting_limits() -> None:
    assert PullPace(10.0).limit_s(100_000) == 10.0
    assert PullPace(10.0).late_s(100_000) == LATE_S


def test_a_long_prompt_may_take_as_long_as_pulls_do() -> None:
    pace = PullPace(100.0)
    pace.note(1000, 1.0)
    assert pace.late_s(1000) == pytest.approx(TIMES_USUAL)
    assert pace.limit_s(1000) == pytest.approx(TIMES_HOPELESS)
    assert (pace.late_s(1), pace.limit_s(1)) == (LATE_S, HOPELESS_S)


def test_slow_pulls_are_remembered_for_a_while() -> None:
    pace = PullPace(1000.0)
    pace.note(1000, 10.0)
    pace.note(1000, 0.1)
    assert pace.late_s(1000) > 35
    for _ in range(200):
        pace.note(1000, 0.1)
    assert pace.late_s(1000) < 1


def test_nothing_exceeds_the_setting() -> None:
    pace = PullPace(0.05)
    pace.note(10, 10.0)
    assert (pace.late_s(1000), pace.limit_s(1000)) == (0.05, 0.05)
