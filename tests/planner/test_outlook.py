"""Copies of the planner say what would have changed a decision."""

import copy
import math

from msgspec.structs import replace

from kvmesh.planner.core import PlannerCore
from kvmesh.planner.model import Action, Observation, PeakForecast, PlannerConfig, RoleFleet, ScalingDecision, Traffic
from kvmesh.planner.outlook import (
    LOOK_EVERY_S,
    MOST_OBSERVATIONS,
    OtherOrder,
    Outlook,
    OutlookKeeper,
    first_to_leave,
    sentences,
)
from tests.support.planning import FakeFleet, an_8b, arrivals, observe

SLOW = an_8b(speedup=0.125)


class RateCore:
    """Orders one decode worker for each 2 requests/s of the last interval, and keeps the most of three intervals."""

    def __init__(self, every_s: int = 60) -> None:
        self.every_s = every_s
        self.needs: list[int] = []
        self.requests = 0.0

    def decide(self, seen: Observation) -> ScalingDecision:
        assert seen.traffic is not None
        self.requests += seen.traffic.requests or 0.0
        loop = "predictive" if seen.at_s % self.every_s == 0 else "reactive"
        if loop == "predictive":
            self.needs = [*self.needs[-2:], math.ceil(self.requests / self.every_s / 2)]
            self.requests = 0.0
        decode = max([1, *self.needs])
        action = Action.HOLD if decode == seen.decode.ordered else Action.SCALE
        return ScalingDecision(at_s=seen.at_s, loop=loop, action=action, prefill=1, decode=decode)  # type: ignore[arg-type]


def look(core: RateCore, keeper: OutlookKeeper, rates: list[float]) -> tuple[ScalingDecision, Outlook | None]:
    """Return the last decision about minutes with these rates, seen in pieces of 20 s."""
    for number in range(3 * len(rates)):
        end_s = 20.0 * (number + 1)
        traffic = Traffic(start_s=end_s - 20, end_s=end_s, requests=20 * rates[number // 3])
        seen = Observation(at_s=end_s, prefill=RoleFleet(ready=1), decode=RoleFleet(ready=3), traffic=traffic)
        found = keeper.decide(core, seen)
    return found


def keeper() -> OutlookKeeper:
    return OutlookKeeper(PlannerConfig(start_s=60.0), (1, 2))


def test_the_rates_that_order_more_or_fewer_are_found() -> None:
    _, outlook = look(RateCore(), keeper(), [5.0])
    assert outlook is not None and outlook.more is not None and outlook.fewer is not None
    assert outlook.more.decode == 4 and 6.0 < outlook.more.rps < 6.1
    assert outlook.fewer.decode == 2 and 3.9 < outlook.fewer.rps <= 4.0
    assert outlook.observed_rps == 5.0 and outlook.interval_s == 60.0


def test_a_worker_that_is_kept_has_its_end_and_its_cost() -> None:
    decision, outlook = look(RateCore(), keeper(), [7.5, 3.0])
    assert decision.decode == 4
    assert outlook is not None
    assert outlook.leaving == OtherOrder(prefill=1, decode=2, rps=3.0, in_s=120.0)
    assert outlook.leaving_gpu_s == 2 * 2 * 120.0
    assert (
        "held: 2 fewer decode workers in 120 s if 3.00 requests/s continue to come; until then that costs "
        in (sentences(decision, outlook)[-1])
    )


def test_looking_around_leaves_the_planner_as_it_is() -> None:
    looked_at, alone = RateCore(), RateCore()
    watched = keeper()
    for rates in ([5.0, 9.0], [1.0]):
        look(looked_at, watched, rates)
        look(alone, OutlookKeeper(PlannerConfig(predictive=False), (1, 1)), rates)
        assert vars(looked_at) == vars(alone)


def test_without_traffic_nothing_is_said_of_other_rates() -> None:
    _, outlook = look(RateCore(), keeper(), [0.0])
    assert outlook is not None
    assert outlook.more is outlook.fewer is outlook.leaving is None


def test_looks_are_rare_while_nothing_changes() -> None:
    core, looks = RateCore(every_s=1), 0
    watched = OutlookKeeper(PlannerConfig(predictive_interval_s=1.0), (1, 1))
    for number in range(1, 121):
        traffic, fleet = Traffic(start_s=0.0, end_s=1.0, requests=0.0), RoleFleet(ready=1)
        seen = Observation(at_s=float(number), prefill=fleet, decode=fleet, traffic=traffic)
        looks += watched.decide(core, seen)[1] is not None
    assert looks == 120 / LOOK_EVERY_S


def test_an_interval_of_too_many_observations_is_forgotten() -> None:
    watched = keeper()
    core = RateCore()
    for number in range(3 * MOST_OBSERVATIONS):
        traffic = Traffic(start_s=0.0, end_s=1.0, requests=1.0)
        fleet = RoleFleet(ready=1)
        watched.decide(core, Observation(at_s=number + 0.5, prefill=fleet, decode=fleet, traffic=traffic))
        assert len(watched._since) < MOST_OBSERVATIONS


def driven(rps: float) -> tuple[PlannerCore, list[Observation], ScalingDecision, Outlook]:
    """Return a real planner after ten minutes, the last interval, and what was decided then."""
    config = PlannerConfig(ttft_slo_s=2.0, itl_slo_s=0.25, max_gpus=64)
    core, watched, fleet = PlannerCore(config, SLOW, SLOW), OutlookKeeper(config, (1, 1)), FakeFleet(6, 6)
    before, since = copy.deepcopy(core), []
    for at_s, requests in arrivals(lambda _: rps, 600, 5.0, 1):
        seen = observe(fleet, at_s, float(requests))
        since.append(seen)
        decision, outlook = watched.decide(core, seen)
        fleet.apply(decision)
        if outlook is not None:
            found = before, since, decision, outlook
            before, since = copy.deepcopy(core), []
    return found


def test_the_real_planner_does_order_more_at_the_rate_that_is_named() -> None:
    before, since, decision, outlook = driven(9.0)
    assert outlook.more is not None
    factor = outlook.more.rps / outlook.observed_rps
    for seen in since:
        assert seen.traffic is not None and seen.traffic.requests is not None
        traffic = replace(seen.traffic, requests=factor * seen.traffic.requests)
        other = before.decide(replace(seen, traffic=traffic))
    assert (other.prefill, other.decode) == (outlook.more.prefill, outlook.more.decode)
    assert other.prefill + other.decode > decision.prefill + decision.decode


def test_the_forecast_of_a_real_planner_lies_in_its_interval() -> None:
    _, _, decision, outlook = driven(9.0)
    peak = decision.peak
    assert isinstance(peak, PeakForecast)
    assert 0 < peak.low_rps <= peak.high_rps and peak.horizon_s >= 60
    told = "\n".join(sentences(decision, outlook))
    for part in (
        f"{peak.low_rps:.2f} to {peak.high_rps:.2f} in 8 of 10 cases",
        "price: a missed request costs",
        "more:",
    ):
        assert part in told


def test_a_fleet_that_stays_has_no_worker_to_leave() -> None:
    decision = ScalingDecision(at_s=60.0, loop="predictive", action=Action.HOLD, prefill=1, decode=1)
    assert first_to_leave(RateCore(), decision, 1.0, 60.0) is None
