"""`kvmesh whatif` on the file of an access log: tables, JSON, and an exit code that says whether it knows."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from kvmesh.commands.whatif.command import main, span_s
from kvmesh.protocol.errors import ConfigError
from tests.simulator.past import TOGETHER, lines_of, load

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def log_at(path: Path, slowed: float = 1.0) -> Path:
    """Write the log of a mesh, in the order of the requests' ends as a frontend does."""
    ended: list[tuple[float, bytes]] = []
    for arrival_s, line in lines_of(load(), TOGETHER, slowed):
        took_ms = (line.ttft_ms or 0.0) + (line.itl_ms or 0.0) * max(0, line.osl_tokens - 1)
        ended_s = START + arrival_s + took_ms / 1e3
        ts = datetime.fromtimestamp(ended_s, UTC).isoformat()
        fields = msgspec.to_builtins(line) | {"ts": ts, "path": "/v1/completions", "duration_ms": took_ms}
        ended.append((ended_s, msgspec.json.encode(fields)))
    path.write_bytes(b"\n".join([line for _, line in sorted(ended)]))
    return path


def test_a_log_is_answered_with_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_at(tmp_path / "log")
    assert main(["--access-log", str(log), "--aggregated", "+1,-1", "--policy", "round-robin"]) == 0
    shown = capsys.readouterr().out
    assert "What really happened" in shown and "What if" in shown
    assert "aggregated +1, policy" in shown and "differ by up to" in shown


def test_json_has_the_errors_and_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--access-log", str(log_at(tmp_path / "log")), "--json", "--last", "1m"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["is_known"] and report["error"] < 0.1
    assert [one["case"]["name"] for one in report["answers"]] == ["aggregated +1", "aggregated -1"]
    assert report["answers"][1]["figures"]["itl_p50_s"] > report["simulated"]["itl_p50_s"]


def test_a_past_that_is_not_reproduced_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--access-log", str(log_at(tmp_path / "log", slowed=1.5))]) == 3
    shown = capsys.readouterr().out
    assert "Not known" in shown and "What if" not in shown


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no access log"):
        main(["--access-log", str(tmp_path / "none")])


def test_times_have_units() -> None:
    assert [span_s(text) for text in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    for text in ("", "0s", "25h", "soon"):
        with pytest.raises(ConfigError, match="10m"):
            span_s(text)
