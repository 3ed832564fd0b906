"""Tests of the benchmark of many workers: what it places among, what it reports, and that it runs."""

import json
import shutil
from pathlib import Path

import pytest

from kvmesh.lab.bench import many as bench
from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.many import IdleMesh, ManyConfig, ManyReport, mesh_specs

IDLE = IdleMesh(
    ready_s=1.0,
    idle_cpu_frontend=0.01,
    idle_cpu_workers=0.02,
    idle_cpu_discovery=0.003,
    rss_mib=80.0,
    scrape_ms=2.0,
    others_cores=0.1,
)


async def no_mesh(config: ManyConfig, discovery: str, folder: Path, tell: object) -> IdleMesh:
    return IDLE


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


def test_workers_share_processes() -> None:
    frontend, *workers = mesh_specs(ManyConfig(workers=600, per_process=250), "file:x")
    assert frontend.name == "frontend"
    assert [spec.argv[-1] for spec in workers] == ["250", "250", "100"]
    assert len({spec.name for spec in workers}) == 3


def test_without_etcd_its_figures_are_null_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "idle_mesh", no_mesh)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["many", "--workers", "10", "--rounds", "1", "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out.splitlines()[-1])
    assert report["idle_cpu_discovery"] == {"file": 0.003, "etcd": None}
    assert report["etcd"] is None
    assert "etcd is not installed" in shown.err


@pytest.mark.long
@pytest.mark.e2e
def test_the_benchmark_of_many_workers_runs_on_its_own_meshes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SETTLE_S", 0.0)
    flags = ["--workers", "20", "--per-process", "10", "--window-s", "0.5", "--rounds", "1", "--json"]
    assert main(["many", *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {*ManyReport.__struct_fields__}
    meshes = [report, *([report["etcd"]] if shutil.which("etcd") else [])]
    for mesh in meshes:
        assert mesh["ready_s"] > 0
        assert mesh["rss_mib"] > 0
        assert mesh["scrape_ms"] > 0
    assert (report["idle_cpu_discovery"]["etcd"] is None) == (len(meshes) == 1)
