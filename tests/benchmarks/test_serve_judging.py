"""Figures of a run whose times the test has made up."""

import pytest
from msgspec.structs import replace

from kvmesh.commands.bench.judging import (
    MeasuredRound,
    ServeSlo,
    completion_rate,
    point_result,
    saturation_of,
    warnings_of,
)
from kvmesh.commands.bench.results import GeneratorLoad, LoadPoint, PointKind, PointResult, RequestOutcome

CALM = GeneratorLoad(
    cpu_share=0.1,
    cpu_s=1.0,
    lag_p50_s=0.0,
    lag_p99_s=0.001,
    lag_max_s=0.002,
    loop_lag_p99_s=0.001,
    machine_cpu_share=0.3,
)
SLO = ServeSlo(ttft_s=0.5, itl_s=0.05)


def outcome(
    due_s: float, ttft_s: float = 0.1, itl_s: float = 0.01, tokens: int = 11, **fields: object
) -> RequestOutcome:
    first_s = due_s + ttft_s
    last_s = first_s + itl_s * (tokens - 1)
    made = RequestOutcome(
        due_s=due_s,
        sent_s=due_s,
        first_s=first_s,
        last_s=last_s,
        end_s=last_s,
        gaps_s=(itl_s,) * (tokens - 1),
        events=tokens,
        tokens=tokens,
        asked_tokens=tokens,
        prompt_tokens=100,
        has_usage=True,
    )
    return replace(made, **fields)


def result(
    outcomes: list[RequestOutcome],
    *,
    kind: PointKind = "rate",
    value: float = 1.0,
    duration_s: float = 10.0,
    generator: GeneratorLoad = CALM,
) -> PointResult:
    point = LoadPoint(kind=kind, value=value)
    return point_result("ours", point, [MeasuredRound(outcomes, duration_s, generator)], SLO, gpus=2.0)


def test_percentiles_are_those_of_the_requests() -> None:
    found = result([outcome(0.0, ttft_s=(number + 1) / 100, itl_s=(number + 1) / 1000) for number in range(100)])
    assert found.ttft_s is not None and found.tpot_s is not None and found.itl_s is not None
    assert found.ttft_s.p50 == pytest.approx(0.51) and found.ttft_s.p99 == pytest.approx(1.0)
    assert found.ttft_s.mean == pytest.approx(0.505) and found.ttft_s.max == pytest.approx(1.0)
    assert found.tpot_s.p90 == pytest.approx(0.091) and found.itl_s.p90 == pytest.approx(0.091)
    assert found.tokens_per_s_user == pytest.approx(1 / 0.0505)


def test_rates_count_whole_answers() -> None:
    lost = outcome(1.0, failure="cut short", detail="gone")
    found = result([outcome(0.0), outcome(0.5), lost])
    assert (found.requests, found.completed, found.errors) == (3, 2, {"cut short": 1})
    assert found.error_examples == {"cut short": "gone"}
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.output_tokens_per_s == pytest.approx(2.2)
    assert found.output_tokens_per_s_gpu == pytest.approx(1.1)
    assert found.total_tokens_per_s == pytest.approx(22.2)


def test_goodput_counts_what_meets_the_whole_slo() -> None:
    late, slow, lost = outcome(0.0, ttft_s=0.6), outcome(0.0, itl_s=0.06), outcome(0.0, failure="timeout")
    found = result([outcome(0.0), late, slow, lost])
    assert (found.attainment, found.goodput_rps) == (0.25, pytest.approx(0.1))
    assert not ServeSlo(1.0, 1.0, e2e_s=0.1).is_met(outcome(0.0))


def test_waits_count_from_when_a_request_was_due() -> None:
    late = replace(outcome(0.0, ttft_s=2.0), sent_s=1.9)
    assert result([late]).ttft_s is not None and result([late]).ttft_s.p50 == pytest.approx(2.0)


def test_several_tokens_in_an_event_are_said() -> None:
    merged = outcome(0.0, tokens=12, events=3, gaps_s=(0.05, 0.05))
    found = result([merged])
    assert found.tpot_s is not None and found.tpot_s.p50 == pytest.approx(0.01)
    assert found.itl_s is not None and found.itl_s.p50 == pytest.approx(0.05)
    assert found.tokens_per_event == 4 and "4.00 tokens" in found.notes[0]


def test_missing_usage_and_short_answers_are_said() -> None:
    assert "without usage" in result([outcome(0.0, has_usage=False)]).notes[0]
    assert "1 answers are shorter" in result([outcome(0.0, asked_tokens=20)]).notes[0]


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (replace(CALM, cpu_share=0.95), "is the bottleneck"),
        (replace(CALM, lag_p99_s=0.2), "200 ms late"),
        (replace(CALM, loop_lag_p99_s=0.05), "noticed events up to 50 ms late"),
        (replace(CALM, machine_cpu_share=0.99), "99% busy"),
    ],
)
def test_a_load_generator_at_its_limit_warns(load: GeneratorLoad, said: str) -> None:
    found = result([outcome(0.0)], generator=load)
    assert said in found.notes[0]
    assert warnings_of([found, found])[0].endswith("(and at 1 other points)")


def test_the_tail_of_a_run_does_not_lower_the_rate_of_completions() -> None:
    steady = [outcome(number * 0.1) for number in range(100)]
    stalled = [*steady[:-1], outcome(9.9, ttft_s=60.0)]
    assert completion_rate(stalled) == pytest.approx(10.0, rel=0.02)


def swept(kind: PointKind, **seconds_a_request: float) -> list[PointResult]:
    """Return a sweep: at each load, requests that are due in time and end one after the other."""
    found = []
    for name, each_s in seconds_a_request.items():
        value = float(name[1:])
        gap_s = 1 / value if kind == "rate" else 0.0
        ends = [max(number * gap_s, number * each_s) for number in range(200)]
        outcomes = [outcome(number * gap_s, end_s=end + 0.2) for number, end in enumerate(ends)]
        found.append(result(outcomes, kind=kind, value=value, duration_s=ends[-1] + 0.2))
    return found


def test_a_rate_that_is_not_kept_is_saturation() -> None:
    [found] = saturation_of(swept("rate", r5=0.1, r8=0.1, r20=0.1))
    assert (found.at, found.last_below) == (20.0, 8.0)
    assert found.most_requests_per_s == pytest.approx(10, rel=0.02)


def test_errors_are_saturation_too() -> None:
    refused = result([outcome(number * 0.1, failure="http 503" if number % 5 == 0 else "") for number in range(50)])
    [found] = saturation_of([refused])
    assert (found.at, found.last_below) == (1.0, None)


def test_more_clients_that_bring_no_more_are_saturation() -> None:
    [found] = saturation_of(swept("concurrency", r1=0.1, r8=0.02, r16=0.0199, r32=0.0198))
    assert (found.at, found.last_below) == (8.0, 1.0)
    [open_end] = saturation_of(swept("concurrency", r1=0.1, r8=0.02))
    assert open_end.at is None
