"""Sizing of prefill and decode workers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.planner.budget import Counts, ScalingLimits
from kvmesh.planner.reference import reference_sizing
from kvmesh.planner.sizing import (
    Demand,
    Slo,
    decode_capacity,
    decode_need,
    late_share,
    mean_wait_s,
    prefill_need,
    prefill_time_s,
    waiting_share,
)
from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from tests.support.planning import an_8b, demands

SLO = Slo(ttft_s=0.5, itl_s=0.05)
WIDE = ScalingLimits(1, 1, 10_000, 1, 1, 10_000, 10_000)


def one_speed(tokens_per_s: float, itl_s: float, total_kv_tokens: int) -> Profile:
    """A prompt takes its tokens / `tokens_per_s`, a step `itl_s` whatever it holds."""
    return Profile(
        model="m",
        engine="mock",
        device="d",
        prefill=PrefillTable(isl_tokens=[0, 8192], ttft_s=[0.0, 8192 / tokens_per_s]),
        decode=DecodeTable(kv_tokens=[1], context_tokens=[1], itl_s=[[itl_s]]),
        total_kv_tokens=total_kv_tokens,
    )


# --- queues -------------------------------------------------------------------------------------------


def test_erlang_c_of_one_server_is_its_utilization() -> None:
    assert waiting_share(1, 0.6) == pytest.approx(0.6)


def test_erlang_c_has_the_value_of_the_tables() -> None:
    """Ten servers with 7 erlangs let 22.17 % of the arrivals wait; the mean wait is S / (n - a) times that share."""
    assert waiting_share(10, 7.0) == pytest.approx(0.2217, abs=1e-4)
    assert mean_wait_s(10, 7.0, 1.0) == pytest.approx(0.2217 / 3, abs=1e-4)


def test_more_work_than_servers_makes_waits_infinite() -> None:
    assert waiting_share(3, 3.0) == 1.0
    assert late_share(3, 4.0, 1.0, 100.0) == 1.0
    assert mean_wait_s(3, 4.0, 1.0) == math.inf


@given(st.integers(1, 200), st.floats(0.01, 0.99))
def test_more_servers_make_fewer_wait(servers: int, share: float) -> None:
    assert 0 <= waiting_share(servers + 1, share * servers) <= waiting_share(servers, share * servers) <= 1


# --- the number of workers ----------------------------------------------------------------------------


def test_prefill_is_not_planned_to_be_busy_all_the_time() -> None:
    """Ten prompts/s of 0.1 s are one erlang: one worker would always be busy, and its queue would grow without end."""
    need = prefill_need(one_speed(10_000, 0.01, 10**6), Demand(10.0, 1000, 100), SLO, 0.8)
    assert need.workers >= 2
    assert need.utilization <= 0.8


def test_a_tighter_ttft_takes_more_prefill_workers() -> None:
    profile, demand = one_speed(10_000, 0.01, 10**6), Demand(50.0, 1000, 100)
    relaxed = prefill_need(profile, demand, Slo(2.0, 0.05), 1.0).workers
    tight = prefill_need(profile, demand, Slo(0.11, 0.05), 1.0).workers
    assert tight > relaxed


def test_cached_prompts_are_no_work() -> None:
    profile = one_speed(10_000, 0.01, 10**6)
    cold = prefill_need(profile, Demand(50.0, 1000, 100), SLO, 0.8).workers
    warm = prefill_need(profile, Demand(50.0, 1000, 100, hit_share=0.75), SLO, 0.8).workers
    assert (cold, warm) == (7, 2)


def test_a_prompt_slower_than_the_slo_is_reported() -> None:
    need = prefill_need(one_speed(1000, 0.01, 10**6), Demand(10.0, 1000, 100), SLO, 0.8)
    assert not need.fits
    assert need.workers == 13  # 10 erlangs at 80 %


def test_long_prompts_are_cut_into_steps() -> None:
    profile = an_8b()
    assert prefill_time_s(profile, 20_000) == pytest.approx(
        2 * profile.prefill_s(profile.max_step_tokens) + profile.prefill_s(20_000 - 2 * profile.max_step_tokens)
    )


def test_the_batch_is_the_largest_that_keeps_the_itl() -> None:
    profile, demand = an_8b(), Demand(1.0, 2000, 200)
    batch = decode_capacity(profile, demand, 0.02).batch
    context = demand.context_tokens
    assert profile.decode_s(batch * context, context) <= 0.02 < profile.decode_s((batch + 1) * context, context)


def test_the_batch_is_at_most_what_kv_and_sequences_allow() -> None:
    profile = one_speed(10_000, 0.001, 10_000)
    assert decode_capacity(profile, Demand(1.0, 950, 100), 1.0).batch == 10
    assert decode_capacity(profile, Demand(1.0, 1, 2), 1.0).batch == profile.max_num_seqs


def test_an_itl_that_no_batch_keeps_is_reported() -> None:
    need = decode_need(one_speed(10_000, 0.1, 10**6), Demand(1.0, 1000, 100), SLO, 0.8)
    assert not need.fits
    assert need.workers == 18  # each carries one sequence; 10 are under way, 17.4 by chance


def test_decode_has_room_for_more_than_the_mean_under_way() -> None:
    """Four requests/s * 100 tokens * 10 ms = 4 running requests; in 99 % of the time at most 4 + 2.33 * 2."""
    profile = one_speed(10_000, 0.01, 1050 * 4)  # batches of 4
    assert decode_need(profile, Demand(4.0, 1000, 100), SLO, 1.0).workers == math.ceil((4 + 2.33 * 2) / 4)


def test_no_load_needs_no_worker() -> None:
    profile = an_8b()
    assert prefill_need(profile, Demand(0.0, 2000, 200), SLO, 0.8).workers == 0
    assert decode_need(profile, Demand(0.0, 2000, 200), SLO, 0.8).workers == 0


def test_workers_slower_than_their_profile_are_more() -> None:
    profile, demand = an_8b(), Demand(100.0, 2000, 200)
    assert prefill_need(profile, demand, SLO, 0.8, 1.5).workers > prefill_need(profile, demand, SLO, 0.8).workers
    assert decode_need(profile, demand, SLO, 0.8, 1.5).workers > decode_need(profile, demand, SLO, 0.8).workers


@given(demands(), st.floats(1.0, 3.0))
def test_more_load_never_takes_fewer_workers(demand: Demand, more: float) -> None:
    profile = an_8b()
    heavier = Demand(demand.rps * more, demand.isl_tokens, demand.osl_tokens, demand.hit_share)
    for need in (prefill_need, decode_need):
        assert need(profile, heavier, SLO, 0.8).workers >= need(profile, demand, SLO, 0.8).workers


# --- the reference ------------------------------------------------------------------------------------


@given(demands())
def test_ours_never_plans_with_fewer_workers_than_the_reference(demand: Demand) -> None:
    profile = an_8b()
    theirs = reference_sizing(profile, profile, demand, SLO, WIDE)
    ours = (prefill_need(profile, demand, SLO, 0.8).workers, decode_need(profile, demand, SLO, 0.8).workers)
    assert (max(1, ours[0]) >= theirs.prefill) or not prefill_need(profile, demand, SLO, 0.8).fits
    assert max(1, ours[1]) >= theirs.decode


def test_the_reference_counts_cached_tokens() -> None:
    profile = an_8b()
    cold, warm = Demand(100.0, 4000, 100), Demand(100.0, 4000, 100, hit_share=0.9)
    newer = reference_sizing(profile, profile, warm, SLO, WIDE)
    assert newer.prefill < reference_sizing(profile, profile, cold, SLO, WIDE).prefill


def test_a_load_without_end_still_gives_a_number() -> None:
    assert prefill_need(an_8b(), Demand(1e6, 8000, 100), SLO, 0.8).workers <= 4096
    assert reference_sizing(an_8b(), an_8b(), Demand(0.0, 100, 100), SLO, WIDE) == Counts(1, 1)
