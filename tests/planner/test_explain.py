"""The command `kvmesh planner explain`."""

from pathlib import Path

import pytest

import kvmesh.planner.explain as command
from kvmesh.planner.connectors.connector import Applied
from kvmesh.planner.model import Action, Observation, PeakForecast, Reason, RoleFleet, ScalingDecision, Traffic
from kvmesh.planner.outlook import OtherOrder, Outlook
from kvmesh.planner.record import Record, RecordFile
from kvmesh.protocol.errors import ConfigError


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    file = RecordFile(tmp_path / "planner.jsonl", 1 << 20)
    for number in range(1, 6):
        traffic = Traffic(start_s=0.0, end_s=5.0, requests=10.0 * number, ttft_s=0.1 if number > 1 else None)
        seen = Observation(at_s=0.0, prefill=RoleFleet(ready=1), decode=RoleFleet(ready=2, starting=1), traffic=traffic)
        decision = ScalingDecision(
            at_s=0.0, loop="reactive", action=Action.SCALE, prefill=1, decode=2 + number,
            reasons=(Reason(code="queue", text=f"reason number {number}"),),
        )  # fmt: skip
        applied = Applied(prefill=1, decode=2 + number, notes=("a note",)) if number == 3 else None
        file.add(
            Record(
                ts_s=1000.0 + number, planner="p", mode="active", connector="local", observation=seen,
                decision=decision, applied=applied, error="it broke" if number == 4 else "",
            )
        )  # fmt: skip
    return tmp_path / "planner.jsonl"


def explain(record_file: Path, *flags: str) -> int:
    return command.explain(["--record-file", str(record_file), *flags])


def test_the_last_decisions_are_shown_with_observations_and_reasons(
    record_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(record_file, "--last", "4") == 0
    shown = capsys.readouterr().out
    assert "reason number 1" not in shown
    for part in ("reason number 2", "2+1 -> 5", "note: a note", "failed: it broke", "100.0", "10.0"):
        assert part in shown


def test_only_changes_and_failures_are_shown_on_demand(record_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain(record_file, "--changes")
    shown = capsys.readouterr().out
    assert [number for number in range(1, 6) if f"reason number {number}" in shown] == [3, 4]


def test_records_are_printed_as_json(record_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain(record_file, "--json", "--last", "2")
    assert [line[:10] for line in capsys.readouterr().out.splitlines()] == ['{"ts_s":10'] * 2


def test_a_missing_record_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record-file"):
        explain(tmp_path / "none.jsonl")


def test_a_plan_is_shown_with_its_forecast_and_what_would_have_changed_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planner.jsonl"
    peak = PeakForecast(
        method="trend", horizon_s=120.0, likely_rps=4.0, low_rps=3.5, high_rps=4.75, ready_rps=4.25
    )  # fmt: skip
    decision = ScalingDecision(
        at_s=0.0, loop="predictive", action=Action.HOLD, prefill=1, decode=3, peak=peak,
        reasons=(Reason(code="forecast", text="said twice"), Reason(code="decode-need", text="a need")),
    )  # fmt: skip
    outlook = Outlook(
        observed_rps=3.5, interval_s=60.0, miss_cost=3.0, break_even_s=180.0,
        more=OtherOrder(prefill=1, decode=5, rps=4.5),
        leaving=OtherOrder(prefill=1, decode=2, rps=3.5, in_s=240.0), leaving_gpu_s=360.0,
    )  # fmt: skip
    RecordFile(path, 1 << 20).add(
        Record(
            ts_s=1.0,
            planner="p",
            mode="active",
            connector="local",
            observation=None,
            decision=decision,
            outlook=outlook,
        )
    )
    explain(path)
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "4.00 requests/s in the next 120 s (trend), 3.50 to 4.75 in 8 of 10 cases; ready for 4.25",
        "a missed request costs the GPU time of 3; to miss a worker costs as much as to keep it for 180 s",
        "3.50 requests/s came in 60 s; from 4.50 on, 2 more decode workers would be ordered",
        "1 fewer decode worker in 240 s if 3.50 requests/s continue to come; until then that costs 0.10 GPU-hours",
        "decode-need: a need",
    ):
        assert part in shown
    assert "said twice" not in shown
