"""Sizing of workers that do both halves, and how the planner follows a load with them."""

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.planner.aggregated import aggregated_capacity, aggregated_need, both_halves
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.correction import Corrections, corrected_aggregated
from kvmesh.planner.history import RecentTraffic
from kvmesh.planner.model import Observation, PlannerConfig, RoleFleet, Traffic, WorkerLoad
from kvmesh.planner.reactive import Rules, aggregated_pressure
from kvmesh.planner.sizing import Demand, Slo
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from tests.support.budget import examples
from tests.support.planning import FakeFleet, an_8b, arrivals, demands, observe

SLO = Slo(ttft_s=0.5, itl_s=0.05)
SLOW = an_8b(speedup=0.125)
RULES = Rules(SLOW, Slo(2.0, 0.25), 0.8, 1.0)


def one_speed(tokens_per_s: float, step_s: float, total_kv_tokens: int = 10**6) -> Profile:
    """A prompt takes its tokens / `tokens_per_s`, a step `step_s` whatever it holds."""
    return Profile(
        model="m",
        engine="mock",
        device="d",
        prefill=PrefillTable(isl_tokens=[0, 8192], ttft_s=[0.0, 8192 / tokens_per_s]),
        decode=DecodeTable(kv_tokens=[1], context_tokens=[1], itl_s=[[step_s]]),
        total_kv_tokens=total_kv_tokens,
    )


# --- sizing -------------------------------------------------------------------------------------------


def test_the_itl_bounds_the_time_that_goes_to_prompts() -> None:
    """Prompts of 0.1 s, steps of 0.01 s, answers of 5 s at the SLO of 0.05 s: w + sqrt(w * 0.1 / 5) = 0.8, w = 0.683.

    That is 6.83 prompts a second; their tokens come every 0.01 / (1 - 0.683) s.
    """
    one = aggregated_capacity(one_speed(10_000, 0.01), Demand(1.0, 1000, 100), 0.05, 1.0)
    assert one.prompt_share == pytest.approx(0.683, abs=1e-3)
    assert one.rps == pytest.approx(6.83, abs=0.01)
    assert one.itl_s == pytest.approx(0.0316, abs=1e-4)
    assert aggregated_need(one_speed(10_000, 0.01), Demand(50.0, 1000, 100), SLO, 1.0).workers == 8


def test_prompts_never_exceed_the_allowed_utilization() -> None:
    one = aggregated_capacity(one_speed(10_000, 0.001), Demand(1.0, 1000, 100), 1.0, 0.6)
    assert one.prompt_share == pytest.approx(0.6)
    assert one.rps == pytest.approx(6.0)


def test_long_answers_are_bound_by_the_batch() -> None:
    """KV of 20,000 tokens holds 20 requests of 1000; each takes 1990 steps of 0.01 s and little more: 1 request/s."""
    one = aggregated_capacity(one_speed(10_000, 0.01, 20_000), Demand(1.0, 5, 1990), 0.05, 1.0)
    assert one.batch == 20
    assert one.rps == pytest.approx(20 / 19.9, rel=0.01)


def test_longer_answers_leave_less_time_for_prompts() -> None:
    short = aggregated_capacity(an_8b(), Demand(1.0, 2000, 200), 0.05, 0.8)
    long = aggregated_capacity(an_8b(), Demand(1.0, 2000, 2000), 0.05, 0.8)
    assert long.prompt_share < short.prompt_share
    assert long.rps < short.rps


def test_cached_prompts_are_no_work() -> None:
    cold = aggregated_need(one_speed(10_000, 0.01), Demand(50.0, 1000, 100), SLO, 0.8).workers
    warm = aggregated_need(one_speed(10_000, 0.01), Demand(50.0, 1000, 100, hit_share=0.75), SLO, 0.8).workers
    assert warm < cold / 2


def test_an_impossible_slo_is_reported_and_the_load_carried() -> None:
    slow_steps = aggregated_need(one_speed(10_000, 0.1), Demand(10.0, 1000, 100), SLO, 0.8)
    slow_prompts = aggregated_need(one_speed(1000, 0.01), Demand(10.0, 1000, 100), SLO, 0.8)
    assert not slow_steps.fits and slow_steps.workers > 10
    assert not slow_prompts.fits and slow_prompts.workers > 10


def test_slower_steps_take_more_workers() -> None:
    demand, slo = Demand(20.0, 2000, 200), Slo(2.0, 0.25)
    assert aggregated_need(SLOW, demand, slo, 0.8, 1.5).workers > aggregated_need(SLOW, demand, slo, 0.8).workers


def test_without_requests_no_worker_is_needed() -> None:
    assert aggregated_need(SLOW, Demand(0.0, 2000, 200), SLO, 0.8).workers == 0


@settings(max_examples=examples(50))
@given(demands(), st.floats(1.0, 3.0))
def test_more_load_takes_more_workers_within_their_utilization(demand: Demand, more: float) -> None:
    light = aggregated_need(SLOW, demand, Slo(2.0, 0.25), 0.8)
    heavier = Demand(demand.rps * more, demand.isl_tokens, demand.osl_tokens, demand.hit_share)
    assert aggregated_need(SLOW, heavier, Slo(2.0, 0.25), 0.8).workers >= light.workers >= 1
    assert light.utilization <= 0.8 + 1e-6 or light.workers == 4096


def test_tables_of_two_kinds_of_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="two kinds of workers"):
        both_halves(an_8b(gpus=1), an_8b(gpus=2))
    assert both_halves(replace(SLOW, decode=None), replace(SLOW, prefill=None)) == SLOW


# --- the last seconds ---------------------------------------------------------------------------------


def a_load(queued_tokens: int = 0, running: int = 0) -> WorkerLoad:
    return WorkerLoad(name="w", queued_tokens=queued_tokens, running=running, total_kv_tokens=SLOW.total_kv_tokens)


def test_queues_order_workers_and_idle_ones_can_be_spared() -> None:
    recent, fleet = RecentTraffic(Demand(3.0, 2000, 200), 20.0), RoleFleet(ready=4)
    queued = aggregated_pressure(RULES, fleet, [a_load(queued_tokens=40_000)] * 4, recent)
    crowded = aggregated_pressure(RULES, fleet, [a_load(running=150)] * 4, recent)
    idle = aggregated_pressure(RULES, RoleFleet(ready=12), [a_load()] * 12, recent)
    assert queued.workers > 4 and {reason.code for reason in queued.reasons} == {"aggregated-queue"}
    assert crowded.workers > 4 and {reason.code for reason in crowded.reasons} == {"aggregated-crowded"}
    assert idle.workers == 0 and idle.least < 12


def test_queues_change_nothing_while_workers_start_or_without_figures() -> None:
    recent, loads = RecentTraffic(Demand(3.0, 2000, 200), 20.0), [a_load(queued_tokens=40_000)] * 4
    starting = aggregated_pressure(RULES, RoleFleet(ready=4, starting=2), loads, recent)
    unknown = aggregated_pressure(RULES, RoleFleet(ready=4), loads, None)
    assert (starting.workers, starting.least) == (0, 6)
    assert (unknown.workers, unknown.least) == (0, 4)


# --- what the ITL tells -------------------------------------------------------------------------------


def test_only_an_itl_longer_than_the_model_needs_a_correction() -> None:
    """Give 8 workers 2 requests/s with 1 s of prompt: a quarter of the time, so a step of 0.03 s takes 0.04 s."""
    profile, demand = one_speed(1000, 0.03), Demand(2.0, 1000, 100)
    same = later = Corrections()
    for _ in range(30):
        same = corrected_aggregated(same, profile, demand, 1000.0, 8, 0.04)
        later = corrected_aggregated(later, profile, demand, 1000.0, 8, 0.06)
    assert same.itl == pytest.approx(1.0)
    assert later.itl == pytest.approx(1.5, abs=0.01)
    assert corrected_aggregated(same, profile, demand, 5.0, 8, 9.0).itl == same.itl, "5 requests say nothing"


# --- the planner --------------------------------------------------------------------------------------


def a_planner(**changes: object) -> PlannerCore:
    fixed = {"ttft_slo_s": 2.0, "itl_slo_s": 0.25, "max_gpus": 64, "forecast": "auto", "mode": "aggregated"}
    return PlannerCore(PlannerConfig(**(fixed | changes)), SLOW, SLOW)  # type: ignore[arg-type]


def driven(planner: PlannerCore, fleet: FakeFleet, rps: float, seconds: float, start_s: float = 0.0) -> set[str]:
    """Codes of the reasons that were given."""
    codes = set()
    for after_s, requests in arrivals(lambda _: rps, seconds, 5.0, seed=3):
        seen = observe(fleet, start_s + after_s, float(requests), idle=True)
        decision = planner.decide(replace(seen, prefill=RoleFleet(ready=0), prefill_loads=()))
        assert decision.prefill == 0 and decision.flip is None
        fleet.apply(decision)
        codes |= {reason.code for reason in decision.reasons}
    return codes


def test_one_pool_follows_a_load_up_and_down() -> None:
    planner, fleet = a_planner(), FakeFleet(0, 4)
    driven(planner, fleet, 3.0, 600)
    before = fleet.decode
    codes = driven(planner, fleet, 12.0, 600, 600)
    at_most = fleet.decode
    driven(planner, fleet, 3.0, 900, 1200)
    assert before < at_most > fleet.decode
    assert "aggregated-need" in codes
    assert not codes & {"prefill-need", "decode-need", "flip"}


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 1 << 30), max_gpus=st.integers(2, 40), minimum=st.integers(1, 2), predictive=st.booleans())
@example(seed=6, max_gpus=24, minimum=1, predictive=True)  # the reactive loop runs before the first plan
def test_counts_stay_between_minimum_and_budget(seed: int, max_gpus: int, minimum: int, predictive: bool) -> None:
    rng = random.Random(seed)
    planner = a_planner(max_gpus=max_gpus, min_decode=minimum, predictive=predictive)
    fleet = FakeFleet(0, rng.randint(0, 5))
    for number in range(40):
        at_s = 5.0 * (number + 1)
        _, there = fleet.seen(at_s)
        traffic = Traffic(
            start_s=at_s - 5,
            end_s=at_s,
            requests=rng.choice([0.0, 20.0, 500.0, math.nan, None]),
            isl_tokens=rng.choice([math.nan, 1.0, 2000.0, 30_000.0]),
            osl_tokens=rng.choice([0.0, 200.0, 5000.0]),
            itl_s=rng.choice([math.nan, 0.0, 0.05, 3.0]),
        )
        loads = (a_load(rng.choice([0, 100_000]), rng.randint(0, 300)),)
        seen = Observation(at_s=at_s, prefill=RoleFleet(ready=0), decode=there, traffic=traffic, decode_loads=loads)
        decision = planner.decide(seen)
        assert decision.prefill == 0
        assert minimum <= decision.decode <= max_gpus
        fleet.apply(decision)
