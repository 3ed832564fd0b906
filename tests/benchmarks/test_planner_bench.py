"""Planning against other ways to decide, in the simulator."""

import json
from array import array
from base64 import b64encode
from pathlib import Path

import msgspec
import pytest

from kvmesh.lab.bench import planner
from kvmesh.lab.bench.planner import POLICIES
from kvmesh.lab.bench.planner_loads import (
    JUDGING_SEEDS,
    LOADS,
    TUNING_SEEDS,
    PlannerBenchConfig,
    PlannerLoad,
    loads_of,
)
from kvmesh.lab.bench.planner_policies import (
    SEQUENCES_ITL_SHARE,
    ReferencePlanner,
    Setting,
    clairvoyant,
    fixed,
    mean_of,
    peak_of,
    slots_of,
)
from kvmesh.planner.aggregated import aggregated_need
from kvmesh.planner.budget import Counts
from kvmesh.planner.core import PlannerCore
from kvmesh.planner.forecast import CannotForecastError, trend
from kvmesh.planner.model import Observation, RoleFleet, ScalingDecision, Traffic, WorkerLoad
from kvmesh.planner.sizing import Demand, prefill_time_s
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator import PlannerHook, simulate
from kvmesh.simulator.loads import Rate, Shape, synthesize


def rate_that_doubles() -> Rate:
    return Rate(lambda at_s: 4.0 if at_s >= 300 else 2.0, 4.0)


def seen(
    at_s: float,
    requests: float = 10.0,
    loads: tuple[WorkerLoad, ...] = (),
    fleet: int = 4,
    isl_tokens: float = 3000.0,
) -> Observation:
    return Observation(
        at_s=at_s,
        prefill=RoleFleet(ready=fleet),
        decode=RoleFleet(ready=fleet),
        traffic=Traffic(start_s=at_s - 5, end_s=at_s, requests=requests, isl_tokens=isl_tokens, osl_tokens=150.0),
        prefill_loads=loads,
        decode_loads=loads,
    )


def load_of(name: str, config: PlannerBenchConfig | None = None) -> PlannerLoad:
    (load,) = loads_of(name, config or PlannerBenchConfig())
    return load


def setting() -> Setting:
    return load_of("step").started_in(60.0).setting


def test_slots_hold_all_requests_in_their_time() -> None:
    requests = list(synthesize(rate_that_doubles(), 600, Shape(), seed=1))
    slots = slots_of(requests, 0.0)
    assert [slot.start_s for slot in slots] == [60.0 * k for k in range(10)]
    assert sum(slot.demand.rps * 60 for slot in slots) == pytest.approx(len(requests))
    assert mean_of(slots).rps == pytest.approx(len(requests) / 600)
    assert peak_of(slots).rps > mean_of(slots).rps


def test_the_clairvoyant_scales_before_the_load_changes() -> None:
    rate = Rate(lambda at_s: 4.0 if 300 <= at_s < 600 else 1.0, 4.0)
    slots = slots_of(synthesize(rate, 900, Shape(), seed=1), 0.0)
    decide = clairvoyant(setting(), slots)
    counts = {at_s: decide(seen(float(at_s))).prefill for at_s in (100, 245, 450, 800)}
    assert counts[100] < counts[245]
    assert counts[245] <= counts[450] + 1
    assert counts[800] < counts[450]


def test_fixed_counts_stay() -> None:
    decision = fixed(Counts(3, 5))(seen(5.0))
    assert (decision.prefill, decision.decode) == (3, 5)


def test_the_reference_plans_by_its_formulas_once_an_interval() -> None:
    reference = ReferencePlanner(setting())
    decisions = [reference.decide(seen(5.0 * (k + 1), requests=20.0)) for k in range(12)]
    assert decisions[-1].prefill == 7  # 4 requests/s of 1.58 s
    assert {(decision.prefill, decision.decode) for decision in decisions[:-1]} == {(4, 4)}


def test_the_reference_moves_by_one_worker() -> None:
    slow = WorkerLoad(name="w", queued_tokens=50_000, kv_tokens=390_000, total_kv_tokens=400_000)
    assert ReferencePlanner(setting()).decide(seen(5.0, loads=(slow,) * 4)).prefill == 5
    idle = WorkerLoad(name="w", total_kv_tokens=400_000)
    reference = ReferencePlanner(setting())
    assert reference.decide(seen(5.0, loads=(slow, idle, slow, slow))).prefill == 4


def test_the_reference_plans_by_mean_lengths_of_an_interval() -> None:
    def pieces(isl_tokens: list[float]) -> list[ScalingDecision]:
        reference = ReferencePlanner(setting())
        return [
            reference.decide(seen(5.0 * (k + 1), requests=20.0, isl_tokens=isl)) for k, isl in enumerate(isl_tokens)
        ]

    assert pieces([1000.0, 5000.0] * 6)[-1] == pieces([5000.0, 1000.0] * 6)[-1] == pieces([3000.0] * 12)[-1]


def test_a_full_worker_answers_just_as_fast_as_the_slo_allows() -> None:
    for name in ("diurnal", "coding"):
        load = load_of(name)
        slots = slots_of(load.requests(), 0.0)
        demand, setting = mean_of(slots), load.setting
        most, context = setting.most_sequences(demand), demand.context_tokens
        full_s, fuller_s = (setting.decode.decode_s(n * context, context) for n in (most, most + 1))
        assert full_s <= SEQUENCES_ITL_SHARE * setting.slo.itl_s
        assert fuller_s > SEQUENCES_ITL_SHARE * setting.slo.itl_s or most == setting.decode.max_num_seqs


def test_the_workers_of_the_bench_run_no_more_sequences_than_that() -> None:
    load = load_of("step", PlannerBenchConfig(share=0.04))
    slots, running = slots_of(load.requests(), 0.0), [0]

    def decide(observed: Observation) -> ScalingDecision:
        running.extend(one.running for one in observed.decode_loads)
        return fixed(Counts(8, 1))(observed)

    planner.run(load, decide, slots)
    assert max(running) == load.setting.most_sequences(mean_of(slots))


def test_the_conversation_is_planned_with_simulated_hits(tmp_path: Path) -> None:
    """Prompts have 8 shared blocks and 2 of their own: all but the first find four fifths cached."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 5000 * k, "input_length": 5120, "output_length": 10, "hash_ids": [*range(8), 100 + k, 200 + k]}
        for k in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    load = load_of("conversation", PlannerBenchConfig(trace=str(trace)))
    assert 0.7 < load.hit_share <= 0.8


def test_an_idle_worker_keeps_the_slo_for_long_prompts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 125000, "output_length": 10, "hash_ids": []}')
    load = load_of("conversation", PlannerBenchConfig(trace=str(trace)))
    assert prefill_time_s(load.setting.prefill, 125_000) < 0.8 * load.setting.slo.ttft_s


@pytest.mark.long
def test_an_aggregated_fleet_follows_a_changing_load() -> None:
    load = load_of("step", PlannerBenchConfig(share=0.3, seed=3))
    profile = load.setting.decode
    core = PlannerCore(msgspec.structs.replace(load.setting.config, mode="aggregated"), profile, profile)
    ordered: list[int] = []

    def decide(seen: Observation) -> ScalingDecision:
        decision = core.decide(seen)
        assert decision.prefill == 0
        ordered.append(decision.decode)
        return decision

    sim = msgspec.structs.replace(load.sim, mode="aggregated", workers=8, prefill_workers=0)
    report = simulate(load.requests(), sim, PlannerHook(decide, 5.0, 5.0))
    at_peak = aggregated_need(profile, Demand(3.6, 3000, 150), load.setting.slo, 0.8).workers
    assert report.failed == 0
    assert report.attainment > 0.8
    assert max(ordered) >= at_peak
    assert ordered[-1] < at_peak


def test_all_policies_are_measured_beside_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--loads", "step", "--starts", "20,300", "--share", "0.04", "--seed", "3", "--json"]
    assert planner.main(given) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["start_s"], row["policy"]) for row in rows] == [(s, p) for s in (20.0, 300.0) for p in POLICIES]
    for row in rows:
        assert row["load"] == "step"
        assert 0 <= row["attainment"] <= min(row["ttft_attainment"], row["itl_attainment"]) + 1e-9
        assert row["attainment"] <= 1 - row["failed"] / row["requests"] + 1e-9
        assert row["failed"] == 0 or row["policy"] != "static-peak"
        assert row["gpu_hours"] > 0 and row["clairvoyant_gpu_hours"] > 0
    assert len({row["requests"] for row in rows}) == 1


def test_an_unknown_load_or_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no load 'weekly'"):
        planner.main(["--loads", "weekly"])
    with pytest.raises(ConfigError, match="no policy 'luck'"):
        planner.main(["--policies", "luck"])


def test_without_a_trace_the_conversation_is_left_out() -> None:
    assert loads_of("conversation", PlannerBenchConfig()) == []
    assert loads_of("recorded", PlannerBenchConfig()) == []


def test_each_of_several_traces_is_a_load(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}'
        )
    given = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    names = [load.name for load in loads_of("conversation", PlannerBenchConfig(trace=given))]
    assert names == ["conversation:a", "conversation:b"]
    with pytest.raises(ConfigError, match="two traces of one name"):
        loads_of("conversation", PlannerBenchConfig(trace=f"{tmp_path}/a.jsonl,{tmp_path}/../a.jsonl"))


@pytest.mark.parametrize(
    ("name", "least", "most"), [("diurnal", 0.5, 0.8), ("bursty", 0, 0.05), ("step", 0, 0.05), ("coding", 0, 0.05)]
)
def test_a_trend_shows_on_a_day_and_not_in_bursts(name: str, least: float, most: float) -> None:
    shown = asked = 0
    for seed in TUNING_SEEDS:
        rates = [slot.demand.rps for slot in slots_of(load_of(name, PlannerBenchConfig(seed=seed)).requests(), 0.0)]
        for minute in range(len(rates)):
            asked += 1
            try:
                trend(rates[: minute + 1], 6)
                shown += 1
            except CannotForecastError:
                pass
    assert least <= shown / asked <= most


def test_judging_seeds_were_not_used_to_tune() -> None:
    assert not set(TUNING_SEEDS) & set(JUDGING_SEEDS)
    assert PlannerBenchConfig().seed in JUDGING_SEEDS


@pytest.mark.parametrize("name", [name for name in LOADS if name not in ("conversation", "recorded")])
def test_a_load_is_the_same_again_and_another_with_another_seed(name: str) -> None:
    first, again, other = (
        [request.arrival_s for request in load_of(name, PlannerBenchConfig(seed=seed, share=0.02)).requests()]
        for seed in (301, 301, 302)
    )
    assert first == again != other


def test_starts_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no list of seconds"):
        planner.main(["--loads", "step", "--starts", "soon"])


def test_a_recorded_load_keeps_what_its_prompts_share(tmp_path: Path) -> None:
    log, shared = tmp_path / "access.jsonl", array("Q", range(1000, 1128))
    lines = [
        {
            "ts": f"2026-01-01T00:{k:02}:10.000Z", "path": "/v1/completions", "status": 200, "duration_ms": 2000,
            "isl_tokens": 2560, "osl_tokens": 10, "block_size": 16,
            "blocks": b64encode((shared + array("Q", range(9000 * k, 9000 * k + 32))).tobytes()).decode(),
        }
        for k in range(1, 31)
    ]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, lines)))
    load = load_of("recorded", PlannerBenchConfig(trace=str(log)))
    assert loads_of("conversation", PlannerBenchConfig(trace=str(log))) == []
    assert load.note == f"{log} has 30 requests; other lines: 0, bad lines: 0"
    assert load_of("recorded", PlannerBenchConfig(access_log=str(log))).note == load.note
    assert [request.arrival_s for request in load.requests()] == [60.0 * k for k in range(30)]
    assert 0.7 < load.hit_share <= 0.8
