"""Limits of what is ordered: minima, budget, steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.budget import Counts, ScalingLimits, clamp, limits_of, published_budget, within_budget
from kvmesh.planner.model import PlannerConfig
from kvmesh.protocol.errors import ConfigError

NOBODY = Counts(0, 0)


def limits(
    max_gpus: int = 8, gpus: tuple[int, int] = (1, 1), minimum: int = 1, up: int = 99, down: int = 99
) -> ScalingLimits:
    return ScalingLimits(gpus[0], gpus[1], max_gpus, minimum, minimum, up, down)


any_limits = st.builds(
    lambda gp, gd, room, mp, md, up, down: ScalingLimits(gp, gd, mp * gp + md * gd + room, mp, md, up, down),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 100),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 20),
)
counts = st.builds(Counts, st.integers(0, 60), st.integers(0, 60))


# --- the published rule -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "bounds", "expected"),
    [
        (Counts(1, 1), limits(5, (2, 2)), Counts(1, 1)),  # it fits
        (Counts(3, 3), limits(5, (2, 2)), Counts(1, 1)),  # of 5 GPUs one stays over
        (Counts(2, 2), limits(3), Counts(1, 2)),  # 3/4 of 2 is one
        (Counts(6, 6), limits(8), Counts(4, 4)),
        (Counts(9, 1), limits(8), Counts(7, 1)),
        (Counts(1, 9), limits(8), Counts(1, 7)),  # never below the minimum
        (Counts(4, 8), limits(16, (2, 4)), Counts(1, 3)),  # 16/40 of 4 is one; 14 GPUs are left for 3 of 4
        (Counts(3, 3), limits(3, (2, 2)), Counts(0, 0)),  # the minima do not fit
    ],
)
def test_the_published_rule_shrinks_prefill_first(wanted: Counts, bounds: ScalingLimits, expected: Counts) -> None:
    assert published_budget(wanted, bounds) == expected


@given(any_limits, counts)
def test_the_published_rule_keeps_the_budget_and_the_minima(bounds: ScalingLimits, wanted: Counts) -> None:
    most = Counts(max(wanted.prefill, bounds.min_prefill), max(wanted.decode, bounds.min_decode))
    given_counts = published_budget(most, bounds)
    assert bounds.gpus(given_counts) <= bounds.max_gpus
    assert given_counts.prefill >= bounds.min_prefill and given_counts.decode >= bounds.min_decode


# --- ours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "bounds", "expected"),
    [
        (Counts(3, 4), limits(8), Counts(3, 4)),
        (Counts(6, 6), limits(8), Counts(4, 4)),
        (Counts(4, 12), limits(8), Counts(2, 6)),  # the ratio is kept
        (Counts(12, 4), limits(8), Counts(6, 2)),
        (
            Counts(4, 8),
            limits(16, (2, 4)),
            Counts(2, 3),
        ),  # the published rule covers 1/4 of prefill, this 3/8 of decode
        (Counts(0, 0), limits(8), Counts(1, 1)),
    ],
)
def test_a_short_budget_covers_most_of_both_roles(wanted: Counts, bounds: ScalingLimits, expected: Counts) -> None:
    assert within_budget(wanted, bounds) == expected


@given(any_limits, counts)
def test_the_split_covers_at_least_what_the_published_rule_covers(bounds: ScalingLimits, wanted: Counts) -> None:
    most = Counts(max(wanted.prefill, bounds.min_prefill), max(wanted.decode, bounds.min_decode))

    def covered(split: Counts) -> float:
        return min(1.0, split.prefill / max(1, most.prefill), split.decode / max(1, most.decode))

    if most.prefill and most.decode:
        assert covered(within_budget(wanted, bounds)) >= covered(published_budget(most, bounds)) - 1e-9


@given(any_limits, counts, counts, counts)
def test_never_above_the_budget_never_below_the_minimum(
    bounds: ScalingLimits, wanted: Counts, current: Counts, draining: Counts
) -> None:
    ordered, _ = clamp(wanted, current, draining, bounds)
    assert bounds.gpus(ordered) <= bounds.max_gpus
    assert ordered.prefill >= bounds.min_prefill
    assert ordered.decode >= bounds.min_decode


@given(any_limits, counts, counts)
def test_counts_change_no_faster_than_allowed_within_budget_and_minimum(
    bounds: ScalingLimits, wanted: Counts, current: Counts
) -> None:
    if bounds.gpus(current) > bounds.max_gpus:
        return
    if current.prefill < bounds.min_prefill or current.decode < bounds.min_decode:
        return
    ordered, _ = clamp(wanted, current, NOBODY, bounds)
    for before, after in ((current.prefill, ordered.prefill), (current.decode, ordered.decode)):
        assert before - bounds.max_step_down <= after <= before + bounds.max_step_up


@given(any_limits, counts)
def test_wanted_counts_that_fit_are_reached(bounds: ScalingLimits, wanted: Counts) -> None:
    current = Counts(bounds.min_prefill, bounds.min_decode)
    goal = within_budget(wanted, bounds)
    for _ in range(200):
        current, _ = clamp(wanted, current, NOBODY, bounds)
    assert current == goal


@given(st.integers(2, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 30), st.integers(0, 30))
def test_the_role_that_wants_more_gets_more(max_gpus: int, prefill: int, decode: int, more_p: int, more_d: int) -> None:
    bounds = limits(max_gpus)
    little = within_budget(Counts(prefill, decode), bounds)
    much = within_budget(Counts(prefill + more_p, decode + more_d), bounds)
    assert bounds.gpus(much) >= bounds.gpus(little)


def test_draining_workers_still_hold_their_gpus() -> None:
    ordered, reasons = clamp(Counts(3, 5), Counts(3, 3), Counts(0, 1), limits(8))
    assert ordered == Counts(3, 4)
    assert "budget-wait" in {reason.code for reason in reasons}


def test_a_fleet_above_a_lowered_budget_shrinks_at_once() -> None:
    ordered, _ = clamp(Counts(6, 6), Counts(6, 6), NOBODY, limits(8, down=1))
    assert ordered == Counts(4, 4)


def test_limits_give_their_reasons() -> None:
    _, reasons = clamp(Counts(20, 20), Counts(1, 1), NOBODY, limits(8, up=2))
    text = {reason.code: reason.text for reason in reasons}
    assert "20 prefill and 20 decode take 40 GPUs, the budget of 8 gives 4 and 4" in text["budget"]
    assert "at most 2 up" in text["rate-limit"]


def test_minima_beyond_the_budget_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="take 12 GPUs, the budget is 8"):
        limits_of(PlannerConfig(min_prefill=1, min_decode=2, max_gpus=8), 4, 4)


def test_a_worker_without_a_gpu_counts_as_one() -> None:
    assert limits_of(PlannerConfig(), 0, 0).gpus(Counts(2, 3)) == 5
