"""Tests of the benchmark of the endpoint picker: its report, Envoy's configuration, and that it runs where Envoy is."""

import json

import pytest

from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.envoy import EnvoyPort, config_of, find_envoy, free_ports, running_envoy
from kvmesh.lab.bench.picker import PickerConfig, report_of
from kvmesh.protocol.errors import ConfigError


@pytest.mark.parametrize(("duplex_s", "meets"), [(0.0024, True), (0.0031, False)])
def test_the_slower_mode_decides_about_the_goal(duplex_s: float, meets: bool) -> None:
    report = report_of(PickerConfig(), 10, [[0.001] * 10, [0.002] * 10, [duplex_s] * 10], 0.0003, 0.0013, 6e-5)
    assert (report.buffered_added_p50_ms, report.picker_pick_ms, report.meets_goal) == (1.0, 0.3, meets)


def test_each_port_has_its_own_way_of_asking() -> None:
    listeners = [EnvoyPort(1, "none", "127.0.0.1:5"), EnvoyPort(2, "buffered"), EnvoyPort(3, "duplex")]
    found = config_of(9, listeners)["static_resources"]["listeners"]
    chains = [one["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"] for one in found]
    assert [len(filters) for filters in chains] == [1, 2, 2]
    modes = [filters[0]["typed_config"]["processing_mode"]["request_body_mode"] for filters in chains[1:]]
    assert modes == ["BUFFERED", "FULL_DUPLEX_STREAMED"]


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_without_envoy_the_error_says_how_to_get_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.lab.bench.envoy.find_envoy", lambda: None)
    with pytest.raises(ConfigError, match="make test-envoy"), running_envoy(tmp_path, 1, []):
        pass


@pytest.mark.long
def test_a_run_reports_what_the_picker_adds(capsys: pytest.CaptureFixture[str]) -> None:
    if find_envoy() is None:
        pytest.skip("there is no envoy: make test-envoy installs it")
    assert main(["picker", "--requests", "20", "--workers", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["requests"] == 20
    assert report["duplex_part_us"] > 0
    assert 0 < report["plain_p50_ms"] < report["buffered_p50_ms"]
    assert 0 < report["picker_pick_ms"] < report["buffered_p50_ms"]
