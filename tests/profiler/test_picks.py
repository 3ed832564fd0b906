"""Fleets that keep an SLO on a budget: within it, never dominated, and as the planner would order them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.lab.bench.engine_steps import SHAPES
from kvmesh.planner.budget import counted_gpus
from kvmesh.planner.sizing import Demand, Slo, decode_need, prefill_need
from kvmesh.profiler.estimate import estimate_profile
from kvmesh.profiler.gpus import GPUS
from kvmesh.profiler.picks import (
    Goal,
    batches_of,
    decode_rps,
    option_of,
    pareto_front,
    pick,
    prefill_rps,
    step_s,
)
from kvmesh.profiler.roofline import Roofline
from kvmesh.profiler.shape import read_shape
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile
from kvmesh.workers.engines.mapping import parse_mapping
from tests.support.budget import examples


def estimate(name: str) -> Profile:
    shape, gpu, mapping = read_shape(SHAPES / "llama-8b"), GPUS["h100"], parse_mapping(name)
    roofline = Roofline(shape, gpu, mapping)
    return estimate_profile(roofline, shape, gpu, mapping, engine="vllm", max_num_seqs=256, notes="")


TP = [estimate(name) for name in ("tp1", "tp2", "tp4")]
GOAL = Goal(ttft_slo_s=0.5, itl_slo_s=0.02, isl_tokens=3000, osl_tokens=300, gpus=8)

goals = st.builds(
    Goal,
    ttft_slo_s=st.floats(0.01, 5),
    itl_slo_s=st.floats(0.001, 0.2),
    isl_tokens=st.integers(10, 8000),
    osl_tokens=st.integers(1, 4000),
    gpus=st.integers(1, 24),
    hit_share=st.floats(0, 0.99),
    utilization=st.floats(0.3, 1.0),
    rps=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
)


@settings(max_examples=examples(40))
@given(goals)
def test_the_recommended_option_keeps_slo_and_budget(goal: Goal) -> None:
    picks = pick(TP, TP, goal)
    for option in picks.options:
        assert option.gpus <= goal.gpus
        assert option.prefill_workers >= 1
        assert option.decode_workers >= 1
    assert picks.reasons
    if picks.recommended is None:
        assert not any(option.meets and option.rps >= goal.rps for option in picks.options)
        return
    chosen = picks.options[picks.recommended]
    assert chosen.itl_s <= goal.itl_slo_s
    assert chosen.rps >= goal.rps
    assert chosen.ttft_s <= 2 * goal.ttft_slo_s  # a mean; the formula bounds the share that is late
    if goal.rps:
        assert chosen.gpus == min(option.gpus for option in picks.options if option.meets and option.rps >= goal.rps)
    else:
        assert chosen.rps >= 0.99 * max(option.rps for option in picks.options if option.meets)


@settings(max_examples=examples(25))
@given(goals)
def test_the_front_dominates_all_other_points(goal: Goal) -> None:
    options = pick(TP, TP, goal).options
    front = pareto_front(options)
    for i in front:
        point = options[i]
        assert point.meets_ttft
        assert not any(
            other.meets_ttft
            and other.tokens_s_gpu >= point.tokens_s_gpu
            and other.tokens_s_user >= point.tokens_s_user
            and (other.tokens_s_gpu > point.tokens_s_gpu or other.tokens_s_user > point.tokens_s_user)
            for other in options
        )
    for option in options:
        if option.meets_ttft:
            assert any(
                options[i].tokens_s_gpu >= option.tokens_s_gpu and options[i].tokens_s_user >= option.tokens_s_user
                for i in front
            )


@settings(max_examples=examples(12))
@given(goals)
def test_no_split_carries_more_than_the_recommended_one(goal: Goal) -> None:
    """Against all splits, not only those that were looked at."""
    goal = replace(goal, rps=0.0, gpus=min(goal.gpus, 10))
    picks = pick(TP[:2], TP[:2], goal)
    best = 0.0
    for prefill in TP[:2]:
        for decode in TP[:2]:
            for p in range(1, goal.gpus + 1):
                for d in range(1, goal.gpus + 1):
                    if p * counted_gpus(prefill) + d * counted_gpus(decode) <= goal.gpus:
                        for batch in batches_of(decode, goal.demand):
                            rps = min(prefill_rps(prefill, p, goal), decode_rps(decode, d, batch, goal))
                            option = option_of(prefill, decode, (p, d), batch, rps, goal)
                            best = max(best, option.rps if option.meets else 0.0)
    chosen = 0.0 if picks.recommended is None else picks.options[picks.recommended].rps
    assert chosen >= 0.99 * best


@settings(max_examples=examples(12))
@given(goals, st.integers(1, 12))
def test_more_gpus_and_looser_slos_never_carry_less(goal: Goal, more: int) -> None:
    goal = replace(goal, rps=0.0)

    def carried(goal: Goal) -> float:
        picks = pick(TP[:2], TP[:2], goal)
        return max((option.rps for option in picks.options if option.meets), default=0.0)

    least = carried(goal) * (1 - 1e-9)
    assert carried(replace(goal, gpus=goal.gpus + more)) >= least
    assert carried(replace(goal, itl_slo_s=goal.itl_slo_s * 1.5)) >= least
    assert carried(replace(goal, ttft_slo_s=goal.ttft_slo_s * 1.5)) >= least


@settings(max_examples=examples(60))
@given(goals, st.integers(1, 20), st.sampled_from(TP))
def test_prefill_workers_carry_what_the_planner_would_order_them_for(
    goal: Goal, workers: int, profile: Profile
) -> None:
    rps = prefill_rps(profile, workers, goal)
    slo = Slo(goal.ttft_slo_s, goal.itl_slo_s)

    def needed(rps: float) -> int:
        demand = Demand(rps, goal.isl_tokens, goal.osl_tokens, goal.hit_share)
        return prefill_need(profile, demand, slo, goal.utilization).workers

    if rps > 1e-6:
        assert needed(rps * 0.999) <= workers
        assert needed(rps * 1.001) > workers


@settings(max_examples=examples(60))
@given(goals, st.integers(1, 20), st.sampled_from(TP))
def test_decode_workers_carry_what_the_planner_would_order_them_for(goal: Goal, workers: int, profile: Profile) -> None:
    batch = batches_of(profile, goal.demand)[-1]
    goal = replace(goal, itl_slo_s=step_s(profile, batch, goal.demand))
    rps = decode_rps(profile, workers, batch, goal)
    slo = Slo(goal.ttft_slo_s, goal.itl_slo_s)

    def needed(rps: float) -> int:
        demand = Demand(rps, goal.isl_tokens, goal.osl_tokens, goal.hit_share)
        return decode_need(profile, demand, slo, goal.utilization).workers

    assert needed(rps * 0.999) <= workers
    assert needed(rps * 1.001) > workers


def test_data_parallel_ranks_serve_prompts_side_by_side() -> None:
    ranks = replace(TP[0], dp_size=4)
    assert prefill_rps(ranks, 1, GOAL) == prefill_rps(TP[0], 4, GOAL)


def test_a_slow_prompt_is_reported_with_the_fastest_possible() -> None:
    picks = pick(TP, TP, replace(GOAL, ttft_slo_s=0.001))
    assert picks.recommended is None
    assert picks.front == []
    assert [reason.code for reason in picks.reasons] == ["ttft"]
    assert "the SLO is 1 ms" in picks.reasons[0].text


def test_a_slow_step_is_reported_with_the_fastest_possible() -> None:
    picks = pick(TP[:1], TP[:1], replace(GOAL, itl_slo_s=0.001))
    assert picks.recommended is None
    assert picks.front
    assert [reason.code for reason in picks.reasons] == ["itl"]


def test_too_few_gpus_and_too_much_load_are_reported() -> None:
    assert [reason.code for reason in pick(TP[2:], TP[2:], replace(GOAL, gpus=7)).reasons] == ["gpus"]
    picks = pick(TP, TP, replace(GOAL, rps=1e4))
    assert picks.recommended is None
    assert [reason.code for reason in picks.reasons] == ["rps"]


def test_a_small_load_takes_the_fewest_gpus() -> None:
    picks = pick(TP, TP, replace(GOAL, rps=1.0))
    assert picks.recommended is not None
    assert picks.options[picks.recommended].gpus == 2


def test_reasons_give_figures_and_the_second_best() -> None:
    reasons = {reason.code: reason.text for reason in pick(TP, TP, GOAL).reasons}
    assert set(reasons) == {"carries", "ttft", "itl", "second"}
    assert "the SLO is 500 ms" in reasons["ttft"]
    assert "the SLO is 20.0 ms" in reasons["itl"]


def test_profiles_of_two_models_do_not_serve_together() -> None:
    with pytest.raises(ConfigError, match="profiles of different models: llama-8b, other"):
        pick(TP, [replace(TP[0], model="other")], GOAL)
    with pytest.raises(ConfigError, match="budget of 5000 GPUs"):
        pick(TP, TP, replace(GOAL, gpus=5000))
