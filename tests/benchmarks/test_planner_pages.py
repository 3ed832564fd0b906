"""Pages and pictures of `kvmesh lab bench planner`."""

import re
import sys
from pathlib import Path

import pytest

from kvmesh.lab.bench import planner
from kvmesh.lab.bench.planner_pages import PageFolder, RunPage, file_name, page_of
from kvmesh.lab.bench.planner_policies import fixed
from kvmesh.lab.bench.planner_track import MOST_POINTS, Chart, ChartCurve, PlannerTrack, thinned
from kvmesh.planner.budget import Counts
from kvmesh.planner.model import Observation, PeakForecast, RoleFleet, ScalingDecision, Traffic
from kvmesh.simulator.report import PlannerChange

PEAK = PeakForecast(method="trend", horizon_s=120.0, likely_rps=3.0, low_rps=2.0, high_rps=5.0, ready_rps=4.0)


def watched(minutes: int, peak: PeakForecast | None = None) -> PlannerTrack:
    """Return the track of two ordered workers of each role, one of them ready, and 2 requests/s."""
    track = PlannerTrack()
    ordered = fixed(Counts(2, 2))

    def decide(seen: Observation) -> ScalingDecision:
        decision = ordered(seen)
        return ScalingDecision(
            at_s=decision.at_s, loop="predictive", action=decision.action, prefill=2, decode=2, peak=peak
        )

    policy = track.watch(decide)
    for number in range(1, 12 * minutes + 1):
        end_s, one = 5.0 * number, RoleFleet(ready=1, starting=1)
        policy(
            Observation(
                at_s=end_s, prefill=one, decode=one, traffic=Traffic(start_s=end_s - 5, end_s=end_s, requests=10.0)
            )
        )
    return track


def test_a_track_shows_load_forecast_and_workers() -> None:
    load, prefill, decode = watched(3, PEAK).charts()
    rates, forecast, ready_for = load.curves
    assert list(rates.points) == [(0.0, 2.0), (60.0, 2.0), (120.0, 2.0)]
    assert forecast.points[0] == (125.0, 3.0) and ready_for.points[0] == (125.0, 4.0)
    assert load.band[0] == (125.0, 2.0, 5.0) and load.most == 5.0
    for chart in (prefill, decode):
        assert [{value for _, value in curve.points} for curve in chart.curves] == [{2.0}, {1.0}]


def test_a_policy_without_a_forecast_has_no_band() -> None:
    load, *_ = watched(2).charts()
    assert [curve.label for curve in load.curves] == ["load"]
    assert not load.band


def test_long_runs_are_thinned_and_keep_the_last_point() -> None:
    kept = thinned(list(range(10_000)))
    assert len(kept) <= MOST_POINTS
    assert kept[-1] == 9_999
    assert thinned([1, 2]) == [1, 2] and thinned([]) == []


def test_a_page_escapes_what_it_shows_and_loads_nothing() -> None:
    change = PlannerChange(at_s=5.0, prefill=1, decode=2, flip="", why="<script>")
    chart = Chart("a & b", [ChartCurve("<i>", [(0.0, 1.0), (9.0, 2.0)], True)], [(0.0, 0.0, 3.0)], "band")
    shown = page_of(RunPage("n", "<b>", [("x", "<y>")], [chart], [change]))
    assert not re.search(r"<(script|i|y|b)>|https?:|src=", shown)
    assert "&lt;script&gt;" in shown and "<polygon" in shown and "<polyline" in shown


def test_a_name_of_a_trace_cannot_leave_the_folder() -> None:
    assert file_name("conversation:../a b", 60.0, "kvmesh") == "conversation-..-a-b-60s-kvmesh"


def test_without_matplotlib_only_pictures_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    folder = PageFolder(tmp_path / "out")
    folder.add(RunPage("n", "t", [], watched(1, PEAK).charts(), []))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"n.html", "index.html"}
    assert "matplotlib" in folder.problem
    assert "png" not in (tmp_path / "out/index.html").read_text()


def test_the_index_links_a_page_and_a_picture_of_each_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["--loads", "step", "--starts", "20,60", "--policies", "kvmesh,static-peak", "--share", "0.04"]
    assert planner.main([*given, "--out", str(tmp_path)]) == 0
    linked = set(re.findall(r'href="([^"]+)"', (tmp_path / "index.html").read_text()))
    there = {path.name for path in tmp_path.iterdir()} - {"index.html"}
    assert linked == there
    assert len(there) == 8
    assert (tmp_path / "step-20s-kvmesh.png").read_bytes().startswith(b"\x89PNG")
