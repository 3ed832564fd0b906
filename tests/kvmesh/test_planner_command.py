"""Tests of `kvmesh up --planner`: the planner's flags, and the facts that it gets about its mesh."""

from pathlib import Path

import pytest

from kvmesh.cluster.config import ClusterConfig, UpConfig, load_cluster
from kvmesh.cluster.processes import planner_spec
from kvmesh.commands.up import check_profile, in_flags_of_up, main, planner_config, split_flags
from kvmesh.mesh.config import load
from kvmesh.planner.config import ServiceConfig
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import read_profile
from kvmesh.protocol.timing import PolynomialTiming


def test_what_follows_two_dashes_goes_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: list[ClusterConfig] = []
    monkeypatch.setattr("kvmesh.commands.up.up", lambda config, *_: meshes.append(config))
    monkeypatch.setattr("kvmesh.commands.up.run", lambda serve: serve(None) or 0)
    assert main(["--engine", "vllm", "--port", "0", "--", "--planner-x", "--block-size", "32", "a b"]) == 0
    assert meshes[0].worker["engine_args"] == "--planner-x --block-size 32 'a b'"


def test_flags_of_planner_and_up_are_split() -> None:
    argv = ["--planner", "--planner-ttft-slo-s", "2", "--decode=3", "--no-planner-flips", "--planner-forecast=trend"]
    assert split_flags(argv) == (
        ["--planner", "--decode=3"],
        ["--ttft-slo-s", "2", "--no-flips", "--forecast=trend"],
    )


def test_the_planner_of_up_acts_unless_told_otherwise() -> None:
    up = UpConfig(planner=True)
    assert planner_config(UpConfig(), [], "") is None
    config = planner_config(up, ["--ttft-slo-s", "2"], "")
    assert config is not None
    assert (config.connector, config.ttft_slo_s) == ("local", 2.0)
    dry = planner_config(up, ["--connector", "dry-run"], "")
    assert dry is not None
    assert dry.connector == "dry-run"


def test_planner_flags_without_a_planner_are_refused() -> None:
    with pytest.raises(ConfigError, match="add --planner"):
        planner_config(UpConfig(), ["--ttft-slo-s", "2"], "")
    with pytest.raises(ConfigError, match="unknown flag --planner-ttft-slo; did you mean --planner-ttft-slo-s"):
        planner_config(UpConfig(planner=True), ["--ttft-slo", "2"], "")


def test_a_planner_sizes_aggregated_workers_only_alone() -> None:
    alone = UpConfig(planner=True, prefill=0, decode=0, aggregated=2)
    config = planner_config(alone, [], "")
    assert config is not None
    assert config.mode == "aggregated"
    with pytest.raises(ConfigError, match="--prefill 0 --decode 0"):
        planner_config(UpConfig(planner=True, aggregated=1), [], "")
    with pytest.raises(ConfigError, match="leave --planner-mode out"):
        planner_config(UpConfig(planner=True), ["--mode", "aggregated"], "")


def settings_of(up: ClusterConfig, planner: ServiceConfig, run_dir: Path) -> ServiceConfig:
    """Return the settings that the planner's process will read."""
    spec = planner_spec(up, planner, run_dir, "unix:/x/control.sock")
    assert spec.argv[:2] == ["-m", "kvmesh.planner"]
    return load(ServiceConfig, spec.argv[2:], {}, prefix="KVMESH_PLANNER_", prog="planner")


def test_the_planner_gets_the_addresses_of_its_mesh(tmp_path: Path) -> None:
    told = settings_of(
        ClusterConfig(), ServiceConfig(connector="local", prefill_profile="x.json", itl_slo_s=0.1), tmp_path
    )
    assert told.local_control == "unix:/x/control.sock"
    assert told.discovery == f"file:{tmp_path}/discovery"
    assert told.record_file == f"{tmp_path}/planner.jsonl"
    assert (told.connector, told.prefill_profile, told.itl_slo_s) == ("local", "x.json", 0.1)


def test_the_planner_gets_the_profile_of_mock_workers(tmp_path: Path) -> None:
    up = ClusterConfig(
        UpConfig(engine="mock"),
        worker={
            "mock_speedup": 0.5,
            "num_blocks": 100,
            "block_size": 10,
            "max_num_seqs": 4,
            "max_step_tokens": 256,
        },
    )
    profile = read_profile(Path(settings_of(up, ServiceConfig(start_s=7.0), tmp_path).prefill_profile))
    assert (profile.total_kv_tokens, profile.max_num_seqs, profile.start_s) == (1000, 4, 7.0)
    assert profile.prefill_s(200) == pytest.approx(PolynomialTiming(1000, 0.5).prefill_s(200), rel=0.01)


def test_the_tiny_model_brings_a_profile(tmp_path: Path) -> None:
    up = load_cluster(["--num-blocks", "100", "--max-num-seqs", "4"], {})
    check_profile(up, ServiceConfig())
    profile = read_profile(Path(settings_of(up, ServiceConfig(), tmp_path).prefill_profile))
    assert (profile.model, profile.total_kv_tokens, profile.max_num_seqs) == ("tiny", 1600, 4)
    assert 0 < profile.prefill_s(1000) < 1 and 0 < profile.decode_s(1000, 300) < 0.1


def test_another_model_needs_a_profile_by_a_flag_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--planner-prefill-profile"):
        check_profile(load_cluster(["--model-path", str(tmp_path)], {}), ServiceConfig())


def test_errors_of_the_planners_settings_name_flags_of_up() -> None:
    with pytest.raises(ConfigError) as failed, in_flags_of_up():
        raise ConfigError("--decode-profile and --no-flips", hint="see kvmesh planner --help")
    assert str(failed.value) == "--planner-decode-profile and --no-planner-flips; see kvmesh planner --help"


@pytest.mark.parametrize(("engine", "flips"), [("mock", True), ("torch", True), ("vllm", False), ("sglang", False)])
def test_flips_are_planned_only_where_engines_can(tmp_path: Path, engine: str, flips: bool) -> None:
    up = load_cluster(["--engine", engine], {})
    assert settings_of(up, ServiceConfig(prefill_profile="x.json"), tmp_path).flips is flips
