"""Tests of the benchmark of many workers: what it places among, and what it reports."""

import json

import pytest

from kvmesh.lab.bench import many as bench
from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.many import ManyReport


@pytest.mark.parametrize("workers", [10, 20])
def test_each_case_of_placing_has_a_time(workers: int) -> None:
    times = bench.place_times(workers, rounds=2, seed=1)
    assert 0 < times.settled < float("inf")
    assert 0 < times.joining < float("inf")
    assert 0 < times.rolling < float("inf")
    assert 0 < times.dying < float("inf")


def test_a_round_leaves_the_router_as_it_was() -> None:
    state = bench.busy_router(20)
    with bench.newcomers(state, ["newcomer", "another"], 2000.0):
        assert len(state.fleet.slots) == 22
    with bench.one_avoided(state, 3000.0):
        assert list(state.fleet.avoided_until) == ["worker-1"]
    assert (len(state.fleet.slots), len(state.fleet.warm_up), len(state.fleet.avoided_until)) == (20, 0, 0)


def test_the_benchmark_reports_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["many", "--workers", "20", "--rounds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {*ManyReport.__struct_fields__}
    assert min(report["joining_ratio"], report["rolling_ratio"], report["dying_ratio"]) > 0
