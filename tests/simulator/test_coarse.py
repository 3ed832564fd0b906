"""The coarse world against the exact one, and what it keeps."""

from collections.abc import Callable

import msgspec
import pytest

from kvmesh.planner.model import Action, Flip, Observation, ScalingDecision, Traffic
from kvmesh.planner.profiles import polynomial_profile
from kvmesh.simulator import PlannerHook, SimConfig, SimReport, SimRequest, simulate
from kvmesh.simulator.coarse import simulate_coarsely
from kvmesh.simulator.loads import Rate, Shape, constant, synthesize
from kvmesh.simulator.requests import thread_names

PROFILE = polynomial_profile(400_000, 256, 8192, 1 / 24)
BLOCK = 256


def config(prefill: int = 4, decode: int = 6, **changes: object) -> SimConfig:
    return msgspec.structs.replace(
        SimConfig(
            mode="disaggregated",
            workers=prefill + decode,
            prefill_workers=prefill,
            blocks=400_000 // BLOCK,
            block_size=BLOCK,
            prefill_profile=PROFILE,
            decode_profile=PROFILE,
            start_s=60.0,
            ttft_slo_s=6.0,
            itl_slo_s=0.4,
            keeps_itl=True,
            states_deadline=True,
        ),
        **changes,
    )


def requests(rps: float = 1.5, seconds: float = 400.0) -> list[SimRequest]:
    return list(synthesize(constant(rps), seconds, Shape(3000, 150, 0.5), seed=3, block_size=BLOCK))


def burst() -> list[SimRequest]:
    """Requests that come four times as often for 50 s."""
    rate = Rate(lambda at_s: 4.0 if 150 <= at_s < 200 else 1.0, 4.0)
    return list(synthesize(rate, 400.0, Shape(3000, 150, 0.5), seed=3, block_size=BLOCK))


@pytest.mark.parametrize(("prefill", "decode"), [(4, 6), (4, 3), (3, 6)])
def test_the_coarse_world_agrees_with_the_exact_one(prefill: int, decode: int) -> None:
    """Compare the worlds with enough workers, with too few for answers, and with too few for prompts."""
    coarse = simulate_coarsely(requests(), config(prefill, decode))
    exact = simulate(requests(), config(prefill, decode))
    assert coarse.requests == exact.requests
    assert coarse.attainment == pytest.approx(exact.attainment, abs=0.08)
    assert coarse.gpu_hours == pytest.approx(exact.gpu_hours, rel=0.05)
    assert coarse.itl_s.p50 == pytest.approx(exact.itl_s.p50, rel=0.08)


@pytest.mark.parametrize(
    ("load", "fleet"),
    [
        (burst(), config(4, 6)),
        (burst(), config(2, 6)),
        (burst(), config(4, 6, max_num_seqs=12)),
        (requests(), config(2, 6)),
        (requests(), config(1, 6)),
        (requests(), config(4, 3, max_num_seqs=24)),
    ],
    ids=["burst", "burst, 2 prefill", "burst, 12 sequences", "2 prefill", "1 prefill", "24 sequences"],
)
def test_both_worlds_refuse_and_help_alike(load: list[SimRequest], fleet: SimConfig) -> None:
    """Compare the worlds where prompts come faster than they are computed, or workers are full of answers."""
    coarse, exact = simulate_coarsely(load, fleet), simulate(load, fleet)
    assert exact.failed > 5
    assert coarse.failed == pytest.approx(exact.failed, abs=0.02 * len(load))
    assert coarse.attainment == pytest.approx(exact.attainment, abs=0.03)
    assert coarse.itl_s.p50 == pytest.approx(exact.itl_s.p50, rel=0.08)


def test_decode_workers_help_less_where_tokens_must_come_sooner() -> None:
    """The SLO of 1 s lets all answers have any gap, and that of 0.25 s leaves no time beside them."""
    for world in (simulate_coarsely, simulate):
        much, little = (world(burst(), config(2, 6, itl_slo_s=itl_slo_s)) for itl_slo_s in (1.0, 0.25))
        assert much.itl_s.p90 > 1.2 * little.itl_s.p90
        assert much.failed < little.failed


def test_a_worker_runs_no_more_sequences_than_it_may() -> None:
    most: list[int] = []

    def decide(seen: Observation) -> ScalingDecision:
        most.extend(load.running for load in seen.decode_loads)
        return ScalingDecision(at_s=seen.at_s, loop="none", action=Action.SCALE, prefill=4, decode=3)

    report = simulate_coarsely(requests(), config(4, 3, max_num_seqs=8), PlannerHook(decide, 5.0, 5.0))
    assert max(most) == 8
    assert report.failed > 0


def ordering(**counts: int) -> PlannerHook:
    def decide(seen: Observation) -> ScalingDecision:
        return ScalingDecision(at_s=seen.at_s, loop="none", action=Action.SCALE, **counts)

    return PlannerHook(decide, 5.0, 5.0)


def test_a_worker_costs_from_its_order_and_helps_after_its_start() -> None:
    few = simulate_coarsely(requests(), config(1, 6))
    more = simulate_coarsely(requests(), config(1, 6), ordering(prefill=4, decode=6))
    at_once = simulate_coarsely(requests(), config(1, 6, start_s=0.0), ordering(prefill=4, decode=6))
    assert few.attainment < more.attainment < at_once.attainment
    assert more.started == 3
    assert {(s.prefill_ready, s.prefill_starting) for s in more.timeline if 10 < s.at_s < 60} == {(1, 3)}


def test_a_worker_that_leaves_finishes_what_it_has() -> None:
    def decide(seen: Observation) -> ScalingDecision:
        wanted = 5 if seen.at_s >= 200 else 8
        return ScalingDecision(at_s=seen.at_s, loop="none", action=Action.SCALE, prefill=4, decode=wanted)

    report = simulate_coarsely(requests(), config(4, 8), PlannerHook(decide, 5.0, 5.0))
    assert report.failed == 0
    assert report.stopped == 3
    assert any(sample.draining for sample in report.timeline)
    assert report.timeline[-1].decode_ready == 5


def test_a_flip_moves_a_worker_between_roles() -> None:
    asked = iter([Flip(to_role="decode", count=2)])

    def decide(seen: Observation) -> ScalingDecision:
        flip = next(asked, None)
        return ScalingDecision(at_s=seen.at_s, loop="none", action=Action.SCALE, prefill=4, decode=6, flip=flip)

    report = simulate_coarsely(requests(), config(6, 4), PlannerHook(decide, 5.0, 5.0))
    assert (report.flipped, report.started) == (2, 0)
    assert (report.timeline[-1].prefill_ready, report.timeline[-1].decode_ready) == (4, 6)


def test_prompts_that_share_blocks_are_computed_once() -> None:
    shared = thread_names(1, 0, 10)
    load = [SimRequest(10.0 * k, 12 * BLOCK, 20, shared + thread_names(100 + k, 10, 12), k) for k in range(20)]
    assert 0.7 < simulate_coarsely(load, config()).hit_share < 0.84


def test_an_aggregated_fleet_serves_both_halves() -> None:
    aggregated = config(0, 10, mode="aggregated", prefill_workers=0)
    coarse, exact = simulate_coarsely(requests(), aggregated), simulate(requests(), aggregated)
    assert coarse.failed == 0
    assert coarse.itl_s.p50 == pytest.approx(exact.itl_s.p50, rel=0.3)


def test_equal_input_gives_an_equal_report() -> None:
    assert simulate_coarsely(requests(), config()) == simulate_coarsely(requests(), config())


@pytest.mark.parametrize("simulated", [simulate, simulate_coarsely])
def test_refused_requests_are_traffic_but_no_answers(simulated: Callable[..., SimReport]) -> None:
    """A planner that took them for answers without a token would plan for short ones."""
    told: list[Traffic] = []

    def watch(seen: Observation) -> ScalingDecision:
        if seen.traffic is not None:
            told.append(seen.traffic)
        return ScalingDecision(at_s=seen.at_s, loop="none", action=Action.HOLD, prefill=2, decode=6)

    load = [msgspec.structs.replace(one, osl_tokens=150) for one in requests(3.0, 200.0)]
    report = simulated(load, config(2, 6), PlannerHook(watch, 5.0, 5.0))
    assert report.failed > 0.2 * len(load)
    assert sum(piece.requests or 0 for piece in told) > 0.95 * len(load)
    assert sum(piece.answered or 0 for piece in told) <= len(load) - report.failed
    assert {piece.osl_tokens for piece in told if piece.answered} == {150.0}
