"""The command `kvmesh planner explain`."""

from pathlib import Path

import pytest

import planner.explain as command
from planner.connectors.connector import Applied
from planner.model import Action, Observation, Reason, RoleFleet, ScalingDecision, Traffic
from planner.record import Record, RecordFile
from protocol.errors import ConfigError


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
