"""The highest expected load limits what is ordered, until a load that lasts shows that it is wrong."""

import pytest

from kvmesh.planner.budget import Counts
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.costs import UNNEEDED_STARTS, Horizon
from kvmesh.planner.model import PlannerConfig
from kvmesh.planner.peak import EXCEEDED_S, ExpectedPeak
from kvmesh.planner.reactive import MIN_RECENT_S
from kvmesh.protocol.errors import ConfigError
from tests.planner.test_core import codes, config, core, driven
from tests.support.planning import FakeFleet, an_8b

FLEET = Counts(4, 6)
FEW = Counts(1, 2)
MORE = Counts(5, 6)


def expected(**changes: object) -> ExpectedPeak:
    return ExpectedPeak(config(peak_prefill=FLEET.prefill, peak_decode=FLEET.decode, **changes))


def test_no_count_exceeds_that_of_the_peak() -> None:
    assert expected().limited(Counts(9, 3)) == Counts(4, 3)


def test_without_an_expectation_nothing_is_limited() -> None:
    peak = ExpectedPeak(config())
    assert peak.limited(Counts(9, 30)) == Counts(9, 30)
    peak.begin(FLEET, 100.0)
    assert peak.held(0.0) == Counts(0, 0)
    assert peak.hear(Counts(99, 99), EXCEEDED_S) == peak.press(Counts(99, 99), FLEET, 0.0) == ()


def test_a_new_planner_holds_what_is_there_of_the_fleet() -> None:
    peak = expected()
    peak.begin(Counts(9, 2), 100.0)
    assert peak.held(99.0) == Counts(4, 2)
    assert peak.held(100.0) == Counts(0, 0)


def test_a_lasting_load_above_the_peak_becomes_the_peak() -> None:
    peak = expected()
    assert peak.hear(FLEET, EXCEEDED_S) == ()
    assert peak.hear(MORE, 0.8 * EXCEEDED_S) == ()
    [why] = peak.hear(MORE, EXCEEDED_S - 0.1)
    assert why.code == "peak-exceeded" and "raise peak_prefill" in why.text
    assert peak.limited(Counts(9, 9)) == MORE


def test_queues_before_a_whole_fleet_that_last_raise_the_peak() -> None:
    """The workers are slower than was planned: no load alone would show this."""
    peak = expected()
    assert peak.press(MORE, FLEET, 0.0) == ()
    assert peak.press(MORE, FLEET, EXCEEDED_S - 1) == ()
    [why] = peak.press(MORE, FLEET, EXCEEDED_S)
    assert why.code == "peak-exceeded"
    assert peak.limited(Counts(9, 9)) == MORE


@pytest.mark.parametrize(("pressed", "ready"), [(FLEET, FLEET), (MORE, FEW)])
def test_queues_that_end_or_wait_for_workers_raise_nothing(pressed: Counts, ready: Counts) -> None:
    peak = expected()
    peak.press(MORE, FLEET, 0.0)
    peak.press(pressed, ready, 100.0)
    assert peak.press(MORE, FLEET, EXCEEDED_S + 50) == ()
    assert peak.fleet == FLEET


def test_one_role_without_a_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="set both"):
        ExpectedPeak(PlannerConfig(peak_decode=3))
    assert ExpectedPeak(PlannerConfig(peak_decode=3, mode="aggregated")).fleet == Counts(0, 3)


def test_a_quarter_of_the_evidence_is_enough_for_a_known_peak() -> None:
    assert Horizon(300.0, 3.0, peak_is_known=True).evidence_s == Horizon(300.0, 3.0).evidence_s / 4
    assert Horizon(20.0, 3.0, peak_is_known=True).evidence_s == MIN_RECENT_S, "less would be no evidence"


def test_a_step_to_the_peak_takes_its_fleet_and_no_more() -> None:
    def rate(at_s: float) -> float:
        return 9.0 if at_s >= 900 else 3.0

    untold = driven(core(), rate, 1800)[-1]
    told = core(peak_prefill=untold.prefill - 1, peak_decode=untold.decode)
    decisions = driven(told, rate, 1190)
    assert max(decision.prefill for decision in decisions) == untold.prefill - 1
    decisions = driven(told, lambda at_s: 9.0, 600, FakeFleet(untold.prefill - 1, untold.decode), start_s=1190.0)
    assert any("peak-exceeded" in codes(decision) for decision in decisions)
    assert decisions[-1].prefill == untold.prefill


def test_a_fleet_at_its_full_size_stays_until_the_peak_had_time_to_come() -> None:
    start_s, whole = 300.0, FakeFleet(8, 8)
    settings = config(start_s=start_s, peak_prefill=8, peak_decode=8)
    decisions = driven(PlannerCore(settings, an_8b(0.125), an_8b(0.125)), lambda at_s: 3.0, 3600, whole)
    at = {round(decision.at_s): decision for decision in decisions}
    assert (at[int(UNNEEDED_STARTS * start_s) - 60].prefill, at[3600].prefill < 8) == (8, True)
    assert "expected-peak" in codes(at[240])
