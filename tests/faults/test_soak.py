"""A soak says whether a process grows: not by what goes up and down, and not by what fills at first."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvmesh.lab.faults.growth import GROWTH, MOST_GC_PAUSE_MS, SizeSample, life_of, line_slope
from kvmesh.lab.faults.report import FaultsReport
from kvmesh.lab.faults.soak import draw, mapped_shm, read_sizes, soak_report, soak_schedule

HOUR_S = 3600.0
NUMBERS = {
    field: 0 for field in FaultsReport.__struct_fields__ if field not in {"problems", "slowest", "faults", "skipped"}
}


def samples(rss_mib: Callable[[float], float], seconds: float = 1800.0) -> list[SizeSample]:
    return [SizeSample(at, rss_mib(at), 40, 10, 20) for at in [2.0 * n for n in range(int(seconds / 2))]]


def report_with(problems: Sequence[str]) -> FaultsReport:
    other = {"without": "", "faults": {}, "skipped": {}, "error_codes": {}, "slowest": [], "ok": not problems}
    return FaultsReport(**(NUMBERS | other | {"problems": list(problems)}))  # type: ignore[arg-type]


def test_a_line_has_the_slope_that_it_was_made_with() -> None:
    times = [float(n) for n in range(100)]
    assert line_slope(times, [5 + 0.25 * t for t in times]) == pytest.approx(0.25)
    assert line_slope([1.0, 1.0], [1, 2]) == 0.0


def test_a_process_that_leaks_is_found() -> None:
    life = life_of("w", 1, samples(lambda at: 60 + 40 * at / HOUR_S))
    assert life.growing == ["rss_mib"]
    assert life.slopes["rss_mib"].per_hour == pytest.approx(40, rel=0.01)


def test_what_fills_at_first_is_no_growth() -> None:
    assert life_of("w", 1, samples(lambda at: 60 + min(at / 5, 100))).growing == []


def test_what_goes_up_and_down_is_no_growth() -> None:
    assert life_of("w", 1, samples(lambda at: 60 + 20 * math.sin(at / 7))).growing == []


def test_a_short_life_says_nothing() -> None:
    assert life_of("w", 1, samples(lambda at: 60 + at, seconds=20)).slopes == {}


@pytest.mark.parametrize("what", GROWTH)
def test_each_number_has_a_limit(what: str) -> None:
    step = GROWTH[what] * 4 + 4
    quiet = {"rss_mib": 60.0, "fds": 1, "threads": 1, "tasks": 1}
    grown = [SizeSample(at_s=2.0 * n, **(quiet | {what: step * n / 600})) for n in range(600)]  # type: ignore[arg-type]
    assert life_of("w", 1, grown).growing == [what]


def test_most_processes_live_as_long_as_the_soak() -> None:
    schedule = soak_schedule(1, 600, 8)
    assert len(schedule.faults) > 20
    assert {fault.target for fault in schedule.faults} == {"decode-2", "prefill-1", "router-1", "frontend-1"}
    assert schedule == soak_schedule(1, 600, 8)


def test_growth_is_a_problem_and_a_slow_recovery_is_none() -> None:
    flat = soak_report(report_with(["slow: the 99th percentile"]), [life_of("w", 1, samples(lambda at: 60))])
    assert flat.ok and len(flat.lives) == 1
    leaking = soak_report(report_with([]), [life_of("w", 7, samples(lambda at: 60 + at / 60))])
    assert not leaking.ok and leaking.problems[0].startswith("w (pid 7, 1798 s): rss_mib grew by")
    assert not soak_report(report_with(["hung: request 3"]), []).ok


def test_a_long_pause_for_garbage_is_a_problem() -> None:
    taken = [*samples(lambda at: 60), SizeSample(1800.0, 60, 40, 10, 20, gc_pause_ms=MOST_GC_PAUSE_MS + 1)]
    report = soak_report(report_with([]), [life_of("w", 7, taken)])
    assert report.problems == ["w (pid 7): its garbage collector held a thread for 21 ms of CPU time"]
    assert soak_report(report_with([]), [life_of("w", 7, samples(lambda at: 60))]).ok


def test_pauses_for_garbage_are_measured_but_not_the_first_settle() -> None:
    script = """
import gc
from kvmesh.lab.faults.inside import GarbagePauses
from kvmesh.mesh.lifecycle import settle
kept = [[] for _ in range(200_000)]
pauses = GarbagePauses()
settle()
first_s = pauses.longest_s
more = [[] for _ in range(200_000)]
settle()
assert first_s == 0.0 and pauses.longest_s > 0.0, (first_s, pauses.longest_s)
"""
    done = subprocess.run(
        [sys.executable, "-c", "import gc; gc.disable()" + script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_collection_at_exit_is_measured_without_an_error() -> None:
    script = "from kvmesh.lab.faults.inside import GarbagePauses; pauses = GarbagePauses()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_sizes_of_a_process_are_read_from_the_system() -> None:
    before = read_sizes(os.getpid())
    with ExitStack() as kept:
        for _ in range(5):
            kept.enter_context(tempfile.TemporaryFile())
        after = read_sizes(os.getpid())
    assert before is not None and after is not None
    assert (after[1] - before[1], after[0] > 1, after[2] >= 1) == (5, True, True)
    assert mapped_shm(os.getpid())[0] >= 0
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert read_sizes(ended.pid) is None


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    taken = samples(lambda at: 60.0, seconds=40)
    assert draw({("w", 1): taken, ("w", 2): taken, ("f", 3): taken}, tmp_path / "soak.png") == ""
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
@pytest.mark.long
def test_a_short_soak_is_flat() -> None:
    """Run the command: kills and restarts, and nothing left of them."""
    run = subprocess.run(
        [sys.executable, "-m", "kvmesh", "soak", "--seconds", "45", "--clients", "4", "--json"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["problems"] == [], run.stderr[-2000:]
    assert (run.returncode, report["ok"]) == (0, True)
    assert report["requests"] > 50 and sum(report["faults"].values()) >= 2
    assert {life["name"] for life in report["lives"]} >= {"frontend-0", "router-0", "prefill-0", "decode-0"}
