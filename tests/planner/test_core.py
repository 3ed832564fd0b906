"""The planner's decisions and their reasons."""

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.planner.core import WARM_UP, PlannerCore
from kvmesh.planner.model import Action, Observation, PlannerConfig, RoleFleet, ScalingDecision, Traffic, WorkerLoad
from kvmesh.protocol.errors import ConfigError
from tests.support.budget import examples
from tests.support.planning import FakeFleet, an_8b, arrivals, observe

STEP_S = 5.0
SLOW = an_8b(speedup=0.125)  # 0.27 s for a prompt of 2000 tokens: a worker takes 3 a second


def config(**changes: Any) -> PlannerConfig:
    fixed = {"ttft_slo_s": 2.0, "itl_slo_s": 0.25, "max_gpus": 64, "forecast": "auto"}
    return PlannerConfig(**(fixed | changes))


def core(**changes: Any) -> PlannerCore:
    return PlannerCore(config(**changes), SLOW, SLOW)


def driven(
    planner: PlannerCore,
    rate: Callable[[float], float | None],
    seconds: float,
    fleet: FakeFleet | None = None,
    seed: int = 1,
    start_s: float = 0.0,
    noise: bool = True,
    idle: bool = False,
    **lengths: float,
) -> list[ScalingDecision]:
    """Return one decision for every 5 s. A rate of None means that the metrics are away."""
    fleet = fleet or FakeFleet(4, 4)
    decisions = []
    steps = arrivals(lambda at_s: rate(start_s + at_s) or 0.0, seconds, STEP_S, seed)
    for after_s, requests in steps:
        at_s = start_s + after_s
        here = rate(at_s - STEP_S)
        figure = None if here is None else float(requests) if noise else here * STEP_S
        decision = planner.decide(observe(fleet, at_s, figure, STEP_S, idle=idle, **lengths))
        fleet.apply(decision)
        decisions.append(decision)
    return decisions


def codes(decision: ScalingDecision) -> set[str]:
    return {reason.code for reason in decision.reasons}


def changes(decisions: list[ScalingDecision]) -> int:
    return sum((one.prefill, one.decode) != (other.prefill, other.decode) for one, other in pairwise(decisions))


# --- following the load -------------------------------------------------------------------------------


def test_a_load_that_triples_is_followed_up_and_down() -> None:
    decisions = driven(core(), lambda at_s: 9.0 if 900 <= at_s < 1800 else 3.0, 3600)
    at = {round(decision.at_s): decision for decision in decisions}
    assert at[840].prefill < at[1700].prefill
    assert at[3600].prefill == at[840].prefill
    assert at[3600].decode == at[840].decode


def test_capacity_is_ordered_before_it_is_needed() -> None:
    """The load rises steadily and a start takes a minute: the ready workers carry the load at all times."""
    fleet = FakeFleet(3, 3, start_s=60.0)
    planner = core(start_s=60.0)
    short = 0
    for at_s, _ in arrivals(lambda at_s: 2 + at_s / 300, 3600, STEP_S, 1):
        rate = 2 + at_s / 300
        decision = planner.decide(observe(fleet, at_s, rate * STEP_S))
        fleet.apply(decision)
        ready, _ = fleet.seen(at_s)
        if at_s > 300:
            short += ready.ready * 3.0 < rate  # erlangs: a worker does about three prompts a second
    assert short == 0


def test_a_decision_has_its_figures() -> None:
    decisions = driven(core(), lambda _: 6.0, 600)
    slow = [decision for decision in decisions if decision.loop == "predictive"][-1]
    assert {"forecast", "prefill-need", "decode-need"} <= codes(slow)
    assert slow.forecast_rps == pytest.approx(6.0, abs=1.0)
    assert slow.needed_prefill is not None and slow.needed_decode is not None
    text = next(reason.text for reason in slow.reasons if reason.code == "prefill-need")
    assert "2000 tokens in" in text and "200 out" in text


def test_longer_answers_take_more_decode_workers_alone() -> None:
    short = driven(core(), lambda _: 6.0, 900, osl_tokens=100.0)[-1]
    long = driven(core(), lambda _: 6.0, 900, osl_tokens=800.0)[-1]
    assert long.decode > short.decode
    assert long.prefill == short.prefill


def test_cached_prompts_take_fewer_prefill_workers() -> None:
    cold = driven(core(), lambda _: 8.0, 900)[-1]
    warm = driven(core(), lambda _: 8.0, 900, hit_share=0.8)[-1]
    assert warm.prefill < cold.prefill


def test_the_reactive_loop_runs_between_predictive_intervals() -> None:
    loops = [decision.loop for decision in driven(core(), lambda _: 6.0, 600)]
    assert loops.count("predictive") == 10
    assert loops.count("reactive") == 110


def test_loops_can_be_turned_off() -> None:
    assert {d.loop for d in driven(core(predictive=False), lambda _: 6.0, 300)} == {"reactive"}
    assert {d.loop for d in driven(core(reactive=False), lambda _: 6.0, 300)} == {"predictive", "none"}


def test_traffic_may_come_in_pieces_of_a_whole_interval() -> None:
    planner, fleet = core(), FakeFleet(2, 2)
    for at_s in range(60, 1200, 60):
        decision = planner.decide(observe(fleet, float(at_s), 600.0, 60.0))
        fleet.apply(decision)
        assert decision.loop == "predictive"
    assert decision.prefill >= 4


# --- seconds ------------------------------------------------------------------------------------------


def load(queued_tokens: int = 0, running: int = 0, waiting: int = 0, kv_tokens: int = 0) -> WorkerLoad:
    return WorkerLoad(
        name="w",
        queued_tokens=queued_tokens,
        running=running,
        waiting=waiting,
        kv_tokens=kv_tokens,
        total_kv_tokens=400_000,
    )


def seen_with(
    fleet: tuple[int, int], at_s: float, prefill: list[WorkerLoad], decode: list[WorkerLoad], starting: int = 0
) -> Observation:
    return Observation(
        at_s=at_s,
        prefill=RoleFleet(ready=fleet[0], starting=starting),
        decode=RoleFleet(ready=fleet[1]),
        traffic=Traffic(start_s=at_s - 5, end_s=at_s, requests=30, isl_tokens=2000.0, osl_tokens=200.0),
        prefill_loads=tuple(prefill),
        decode_loads=tuple(decode),
    )


def test_a_queue_that_breaks_the_ttft_orders_prefill_workers() -> None:
    decision = core().decide(seen_with((4, 4), 5.0, [load(queued_tokens=120_000)] * 4, [load()] * 4))
    assert decision.loop == "reactive"
    assert decision.prefill > 4
    assert "prefill-queue" in codes(decision)


def test_a_queue_that_is_gone_before_a_worker_starts_is_not_chased() -> None:
    queued = seen_with((4, 4), 5.0, [load(queued_tokens=60_000)] * 4, [load()] * 4)
    assert core(start_s=300.0).decide(queued).prefill == 4
    assert core(start_s=5.0).decide(queued).prefill > 4


def test_workers_that_start_count_against_a_queue() -> None:
    decision = core().decide(seen_with((4, 4), 5.0, [load(queued_tokens=60_000)] * 4, [load()] * 4, starting=3))
    assert decision.prefill == 7
    assert "prefill-queue" not in codes(decision)


def test_a_peak_is_kept_for_the_break_even_and_not_longer() -> None:
    """Workers stay for 300 s, with a start of 60 s and the default price."""
    planner, fleet = core(start_s=60.0), FakeFleet(3, 3, start_s=60.0)
    driven(planner, lambda at_s: 12.0 if at_s >= 900 else 3.0, 1500, fleet)
    peak = fleet.seen(1500.0)[0].ordered
    after = driven(planner, lambda _: 3.0, 900, fleet, start_s=1500.0)
    at = {round(decision.at_s - 1500): decision for decision in after}
    assert at[240].prefill == peak
    assert at[600].prefill < peak
    [text] = [reason.text for reason in at[240].reasons if reason.code == "break-even"]
    assert f"{peak} prefill" in text and "costs 300 s of one" in text


def test_never_more_workers_than_the_highest_demand_seen_takes() -> None:
    """A load that bursts for 40 s in every 3 minutes, and a start of 15 minutes: no burst is chased or extrapolated."""
    planner, fleet = core(start_s=900.0), FakeFleet(4, 4, start_s=900.0)
    decisions = driven(planner, lambda at_s: 20.0 if at_s % 180 < 40 else 2.0, 3 * 3600, fleet)
    at_peak = driven(core(), lambda _: 20.0, 900, FakeFleet(4, 4))[-1]
    assert max(decision.prefill for decision in decisions) < at_peak.prefill


def test_crowded_decode_workers_get_help() -> None:
    decision = core().decide(seen_with((4, 2), 5.0, [load()] * 4, [load(running=180, kv_tokens=390_000)] * 2))
    assert decision.decode > 2
    assert "decode-crowded" in codes(decision)


def test_arrivals_show_a_burst_before_queues_do() -> None:
    planner, fleet = core(), FakeFleet(2, 2)
    driven(planner, lambda _: 3.0, 300, fleet)
    driven(planner, lambda _: 15.0, 15, fleet, start_s=300)
    prefill, _ = fleet.seen(315)
    assert prefill.ordered >= 5


def test_the_reactive_loop_takes_back_only_workers_above_the_plan() -> None:
    planner, fleet = core(), FakeFleet(4, 4)
    driven(planner, lambda _: 8.0, 1200, fleet)
    floor = planner.state()["floor"]
    calm = [load()] * 9
    for number in range(60):
        at_s = 1205.0 + 5 * number
        prefill, decode = fleet.seen(at_s)
        seen = Observation(
            at_s=at_s,
            prefill=prefill,
            decode=decode,
            traffic=Traffic(start_s=at_s - 5, end_s=at_s, requests=40, isl_tokens=2000.0, osl_tokens=200.0),
            prefill_loads=tuple(calm[: prefill.ready]),
            decode_loads=tuple(calm[: decode.ready]),
        )
        decision = planner.decide(seen)
        fleet.apply(decision)
        if decision.loop == "reactive":
            assert decision.prefill >= planner.state()["floor"]["prefill"]
    assert floor["prefill"] >= 3


def test_times_of_a_fleet_that_is_too_small_correct_nothing() -> None:
    """A fleet of one worker for each role gets six requests a second: answers are slow because they are too many."""
    planner, slow = core(max_gpus=2), {"ttft_s": 1.9, "itl_s": 0.9}
    driven(planner, lambda _: 6.0, 900, FakeFleet(1, 1), **slow)
    assert (planner.state()["ttft_correction"], planner.state()["itl_correction"]) == (1.0, 1.0)


def test_times_of_a_fleet_that_carries_the_load_correct_the_profile() -> None:
    planner = core()
    driven(planner, lambda _: 6.0, 900, FakeFleet(8, 8), itl_s=0.2)
    assert planner.state()["itl_correction"] > 1.0


def test_times_of_a_fleet_that_refuses_are_those_of_what_it_answers() -> None:
    """Workers that are slower than their profile refuse requests, and still show by how much they are slower."""

    def correction(rps: float, answered_rps: float) -> float:
        planner = core()
        driven(planner, lambda _: rps, 900, FakeFleet(8, 8), itl_s=0.2, noise=False, answered=answered_rps * STEP_S)
        return float(planner.state()["itl_correction"])

    assert correction(6.0, 3.0) == pytest.approx(correction(3.0, 3.0), rel=0.05)
    assert correction(6.0, 3.0) > correction(6.0, 6.0) > 1.0


# --- flips --------------------------------------------------------------------------------------------


def shifting(planner: PlannerCore, fleet: FakeFleet) -> list[ScalingDecision]:
    """The load changes from long prompts with short answers to the opposite."""
    long = {"isl_tokens": 6000.0, "osl_tokens": 50.0}
    short = {"isl_tokens": 500.0, "osl_tokens": 900.0}
    first = driven(planner, lambda _: 6.0, 900, fleet, idle=True, **long)
    return first + driven(planner, lambda _: 6.0, 900, fleet, start_s=900, idle=True, **short)


def test_idle_prefill_workers_become_decode_workers() -> None:
    flips = [decision.flip for decision in shifting(core(), FakeFleet(6, 2)) if decision.flip]
    assert flips and {flip.to_role for flip in flips} == {"decode"}


def test_no_role_lends_workers_before_some_intervals_are_known() -> None:
    """Long prompts with short answers: prefill lacks workers from the first seconds, decode seems to have too many."""
    lengths = {"isl_tokens": 8000.0, "osl_tokens": 5.0}
    decisions = driven(core(), lambda _: 6.0, 600, FakeFleet(2, 8), idle=True, **lengths)
    early = [decision for decision in decisions if decision.at_s < WARM_UP * 60.0]
    assert max(decision.prefill for decision in early) > 2
    assert all(decision.decode >= 8 and not decision.flip for decision in early)
    assert decisions[-1].decode < 8


def test_flips_are_used_only_if_enabled_and_faster_than_starts() -> None:
    assert not any(decision.flip for decision in shifting(core(flips=False), FakeFleet(6, 2)))
    assert not any(decision.flip for decision in shifting(core(start_s=3.0, flip_s=3.0), FakeFleet(6, 2)))


def test_workers_of_another_size_are_not_flipped() -> None:
    planner = PlannerCore(config(), an_8b(0.125, gpus=2), SLOW)
    assert not any(decision.flip for decision in shifting(planner, FakeFleet(6, 2)))


# --- missing, late and odd figures --------------------------------------------------------------------


def settled(seconds: float = 900.0) -> tuple[PlannerCore, FakeFleet, ScalingDecision]:
    planner, fleet = core(), FakeFleet(4, 4)
    return planner, fleet, driven(planner, lambda _: 8.0, seconds, fleet)[-1]


def test_without_figures_the_fleet_stays_and_a_reason_says_so() -> None:
    planner, fleet, before = settled()
    away = driven(planner, lambda _: None, 1800, fleet, start_s=900)
    assert {(d.prefill, d.decode) for d in away} == {(before.prefill, before.decode)}
    assert "metrics-away" in codes(away[-1])
    assert away[-1].action is Action.HOLD


def test_after_an_outage_nothing_jumps() -> None:
    planner, fleet, before = settled()
    driven(planner, lambda _: None, 1800, fleet, start_s=900)
    back = driven(planner, lambda _: 8.0, 900, fleet, start_s=2700)
    assert "metrics-back" in codes(back[0])
    assert all(abs(d.prefill - before.prefill) <= 1 and abs(d.decode - before.decode) <= 1 for d in back)


def test_the_first_figures_after_an_outage_are_ignored() -> None:
    planner, fleet, before = settled()
    driven(planner, lambda _: None, 600, fleet, start_s=900)
    decision = planner.decide(observe(fleet, 1505.0, 8.0 * 600, STEP_S))
    assert (decision.prefill, decision.decode) == (before.prefill, before.decode)
    after = driven(planner, lambda _: 8.0, 300, fleet, start_s=1505)
    assert max(d.prefill for d in after) <= before.prefill + 1


@pytest.mark.parametrize("figure", [math.nan, math.inf, -5.0])
def test_a_figure_that_is_not_a_number_is_ignored(figure: float) -> None:
    planner, fleet, before = settled()
    decisions = []
    for number in range(60):
        decision = planner.decide(observe(fleet, 905.0 + 5 * number, figure))
        fleet.apply(decision)
        decisions.append(decision)
    assert {(d.prefill, d.decode) for d in decisions} == {(before.prefill, before.decode)}
    assert "metrics-missing" in codes(decisions[0])


def test_lengths_that_are_not_numbers_change_nothing() -> None:
    planner, fleet, before = settled()
    nan = math.nan
    after = driven(planner, lambda _: 8.0, 600, fleet, start_s=900, isl_tokens=nan, osl_tokens=nan, hit_share=nan)
    assert all(abs(d.prefill - before.prefill) <= 1 for d in after)
    assert planner.state()["isl_tokens"] == 2000.0


def test_one_long_answer_does_not_count_like_all_arrivals() -> None:
    """While prompts queue, 100 requests arrive and one answer ends, a long one."""
    planner, fleet, _ = settled()
    seen = observe(fleet, 905.0, 100.0, osl_tokens=4000.0)
    assert seen.traffic is not None
    planner.decide(msgspec.structs.replace(seen, traffic=msgspec.structs.replace(seen.traffic, answered=1.0)))
    assert planner.state()["osl_tokens"] < 220


def test_late_figures_are_ignored() -> None:
    planner, fleet, before = settled()
    late = observe(fleet, 700.0, 0.0)
    decision = planner.decide(msgspec.structs.replace(late, at_s=905.0))
    assert "metrics-late" in codes(decision)
    assert (decision.prefill, decision.decode) == (before.prefill, before.decode)


def test_only_the_second_interval_of_zeros_is_believed() -> None:
    planner, fleet, before = settled()
    first = driven(planner, lambda _: 0.0, 60, fleet, start_s=900)
    assert (first[-1].prefill, first[-1].decode) == (before.prefill, before.decode)
    assert "metrics-zero" in codes(first[-1])
    later = driven(planner, lambda _: 0.0, 1800, fleet, start_s=960)
    assert (later[-1].prefill, later[-1].decode) == (1, 1)


def test_zeros_while_workers_have_requests_waiting_are_never_believed() -> None:
    planner, fleet, before = settled()
    for number in range(120):
        seen = observe(fleet, 905.0 + 5 * number, 0.0, loads=[load(queued_tokens=500, waiting=1)])
        decision = planner.decide(seen)
        fleet.apply(decision)
    assert (decision.prefill, decision.decode) == (before.prefill, before.decode)


def test_a_planner_that_restarts_takes_the_fleet_as_it_is() -> None:
    decisions = driven(core(), lambda _: 1.0, 170, FakeFleet(9, 7))
    assert {(d.prefill, d.decode) for d in decisions} == {(9, 7)}


def test_the_fleet_is_left_alone_before_the_first_request() -> None:
    decisions = driven(core(), lambda _: 0.0, 600, FakeFleet(3, 3))
    assert {(d.prefill, d.decode) for d in decisions} == {(3, 3)}


def test_a_fleet_below_the_minimum_grows_even_without_figures() -> None:
    decision = core(min_prefill=2, min_decode=3).decide(observe(FakeFleet(0, 0), 5.0, None))
    assert (decision.prefill, decision.decode) == (2, 3)


# --- always -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_constant_noisy_load_does_not_flap(seed: int) -> None:
    rate = 4.0 + seed * 0.7
    decisions = driven(core(), lambda _: rate, 4 * 3600, FakeFleet(5, 4), seed=seed)
    assert changes(decisions[240:]) <= 16  # in 220 minutes; a start takes 30 s, so keeping a worker pays for 180 s


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 1 << 30),
    max_gpus=st.integers(3, 40),
    minimum=st.integers(1, 1),
    gpus=st.sampled_from([1, 2]),
    flips=st.booleans(),
)
def test_counts_stay_between_minimum_and_budget(seed: int, max_gpus: int, minimum: int, gpus: int, flips: bool) -> None:
    rng = random.Random(seed)
    limit = max(max_gpus, 2 * gpus)
    profile = an_8b(0.125, gpus=gpus)
    planner = PlannerCore(config(max_gpus=limit, flips=flips), profile, profile)
    fleet = FakeFleet(rng.randint(0, 3), rng.randint(0, 3))
    figures = [0.0, 1.0, 20.0, 60.0, 500.0, math.nan, None]
    for number in range(80):
        seen = observe(
            fleet,
            5.0 * (number + 1),
            rng.choice(figures),
            isl_tokens=rng.choice([math.nan, 1.0, 2000.0, 30_000.0]),
            osl_tokens=rng.choice([0.0, 200.0, 5000.0]),
            hit_share=rng.choice([math.nan, 0.0, 0.9, 1.0]),
            ttft_s=rng.choice([math.nan, 0.0, 0.3, 30.0]),
            itl_s=rng.choice([math.nan, 0.0, 0.05, 3.0]),
            loads=[load(rng.choice([0, 100_000]), rng.randint(0, 300), rng.randint(0, 9), rng.randint(0, 400_000))],
        )
        decision = planner.decide(seen)
        assert decision.prefill * gpus + decision.decode * gpus <= limit
        assert decision.prefill >= minimum and decision.decode >= minimum
        fleet.apply(decision)


@settings(max_examples=examples(15))
@given(st.floats(0.5, 30), st.floats(1.0, 3.0))
def test_a_heavier_load_never_gets_fewer_workers(rps: float, more: float) -> None:
    light = driven(core(), lambda _: rps, 600, FakeFleet(1, 1), noise=False)[-1]
    heavy = driven(core(), lambda _: rps * more, 600, FakeFleet(1, 1), noise=False)[-1]
    assert heavy.prefill >= light.prefill
    assert heavy.decode >= light.decode


def test_equal_observations_give_equal_decisions() -> None:
    assert driven(core(), lambda at_s: 5 + at_s / 200, 1200) == driven(core(), lambda at_s: 5 + at_s / 200, 1200)


def test_the_state_is_plain_data() -> None:
    planner, _, _ = settled(300)
    assert json.loads(json.dumps(planner.state()))["target"]["prefill"] >= 1


def test_a_profile_without_the_table_of_its_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="no decode table"):
        PlannerCore(config(), SLOW, msgspec.structs.replace(SLOW, decode=None))
