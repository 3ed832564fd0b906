"""The record of decisions: JSON lines in files of bounded size."""

from pathlib import Path

import pytest

from kvmesh.planner.connectors.connector import Applied
from kvmesh.planner.model import Action, Observation, Reason, RoleFleet, ScalingDecision, Traffic, WorkerLoad
from kvmesh.planner.record import MAX_LOADS, Record, RecordFile, kept, older, read_records
from kvmesh.protocol.errors import ConfigError


def record(number: int) -> Record:
    traffic = Traffic(start_s=number, end_s=number + 5, requests=float(number), ttft_s=None)
    seen = Observation(at_s=number, prefill=RoleFleet(ready=1), decode=RoleFleet(ready=2, starting=1), traffic=traffic)
    decision = ScalingDecision(
        at_s=number,
        loop="reactive",
        action=Action.SCALE,
        prefill=1,
        decode=3,
        reasons=(Reason(code="x", text="y" * 200),),
    )
    return Record(
        ts_s=number, planner="p", mode="active", connector="local", observation=seen, decision=decision,
        applied=Applied(prefill=1, decode=3, notes=("n",)),
    )  # fmt: skip


def test_records_are_read_as_written(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "deep" / "planner.jsonl", 1 << 20)
    for number in range(5):
        file.add(record(number))
    assert read_records(tmp_path / "deep" / "planner.jsonl", 3) == [record(number) for number in (2, 3, 4)]


def test_a_restarted_planner_continues_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "planner.jsonl"
    RecordFile(path, 1 << 20).add(record(1))
    RecordFile(path, 1 << 20).add(record(2))
    assert read_records(path, 10) == [record(1), record(2)]


def test_the_files_stay_bounded_and_keep_the_last_records(tmp_path: Path) -> None:
    path, bound = tmp_path / "planner.jsonl", 20_000
    file = RecordFile(path, bound)
    for number in range(500):
        file.add(record(number))
        assert sum(one.stat().st_size for one in (path, older(path)) if one.exists()) <= bound
    last = [int(one.ts_s) for one in read_records(path, 15)]
    assert last == list(range(485, 500))


def test_a_cut_off_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "planner.jsonl"
    RecordFile(path, 1 << 20).add(record(1))
    with path.open("ab") as file:
        file.write(b'{"ts_s": 3, "plan\nnot json\n\xff\xfe\n')
    RecordFile(path, 1 << 20).add(record(2))
    assert read_records(path, 10) == [record(1), record(2)]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--record-file"):
        RecordFile(tmp_path / "file" / "planner.jsonl", 1 << 20)


def test_a_disk_that_fails_later_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    file = RecordFile(folder / "planner.jsonl", 1 << 20)
    (folder / "planner.jsonl").unlink()
    folder.rmdir()
    file.add(record(1))
    assert "was not recorded" in caplog.text


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no record"):
        read_records(tmp_path / "none", 1)


def test_the_busiest_of_many_workers_are_recorded() -> None:
    loads = tuple(WorkerLoad(name=f"w-{n}", queued_tokens=n) for n in range(500))
    fleet = RoleFleet(ready=500)
    seen = kept(Observation(at_s=0.0, prefill=fleet, decode=fleet, prefill_loads=loads, decode_loads=loads[:3]))
    assert seen is not None
    assert [load.queued_tokens for load in seen.prefill_loads] == list(range(499, 499 - MAX_LOADS, -1))
    assert seen.decode_loads == loads[:3]
    assert kept(None) is None
