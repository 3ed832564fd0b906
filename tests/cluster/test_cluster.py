"""Tests of the processes that `kvmesh up` starts, and of their settings."""

import os
from pathlib import Path

import pytest

from kvmesh.cluster.config import ClusterConfig, UpConfig, load_cluster
from kvmesh.cluster.processes import process_specs, read_frontend
from kvmesh.cluster.running import make_run_dir
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig


def workers_of(config: ClusterConfig) -> list[WorkerConfig]:
    """Return the settings that the worker processes will read."""
    specs = process_specs(config, Path("/run"))
    commands = [spec.argv for spec in specs if spec.argv[:2] == ["-m", "kvmesh.workers"]]
    return [load(WorkerConfig, argv[2:], {}, prefix="KVMESH_WORKER_", prog="worker") for argv in commands]


def frontend_of(config: ClusterConfig, config_file: str = "") -> tuple[FrontendConfig, RouterConfig]:
    """Return the settings that the frontend's process will read, and those of its embedded router."""
    spec = process_specs(config, Path("/run"), config_file)[0]
    frontend = load(
        FrontendConfig, spec.argv[2:], spec.env, prefix="KVMESH_FRONTEND_", prog="frontend", section="frontend"
    )
    flags = ["--config", config_file] if config_file else []
    router = load(RouterConfig, flags, spec.env, prefix="KVMESH_ROUTER_", prog="router", section="router")
    return frontend, router


def names_of(up: UpConfig) -> list[str]:
    return [spec.name for spec in process_specs(ClusterConfig(up), Path("/run"))]


def test_each_worker_behind_one_frontend_has_a_process() -> None:
    names = names_of(UpConfig(prefill=1, decode=2, aggregated=1))
    assert names == ["frontend", "prefill-0", "decode-0", "decode-1", "aggregated-0"]
    assert names_of(UpConfig(router="remote", decode=0)) == ["frontend", "router", "prefill-0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("loras", "x"), ("tool_parser", "hermes"), ("reasoning_parser", "qwen3"), ("kv_connector", "x")],
)
def test_a_flag_of_a_worker_reaches_every_worker(name: str, value: str) -> None:
    workers = workers_of(load_cluster([f"--{name.replace('_', '-')}", value], {}))
    assert len(workers) == 3
    assert {getattr(worker, name) for worker in workers} == {value}
    assert {getattr(worker, name) for worker in workers_of(ClusterConfig())} == {""}


def test_worker_options_are_read_from_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[up]\nblock_size = 32\nnum_blocks = 64\nmax_num_seqs = 4\n[router]\nrecompute_price = 3.0\n")
    environ = {"KVMESH_UP_NUM_BLOCKS": "128"}
    config = load_cluster(["--config", str(file), "--max-num-seqs=8"], environ)
    assert {(w.block_size, w.num_blocks, w.max_num_seqs) for w in workers_of(config)} == {(32, 128, 8)}


def test_frontend_and_router_take_their_flags_and_tables(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[frontend]\nmax_inflight = 7\nmax_connections = 9\n[router]\nrecompute_price = 3.0\n")
    argv = ["--config", str(file), "--max-inflight", "8", "--policy", "random", "--no-gossip", "--log-format", "json"]
    config = load_cluster(argv, {})
    frontend, router = frontend_of(config, str(file))
    assert (frontend.max_inflight, frontend.max_connections) == (8, 9)
    assert (router.policy, router.gossip, router.recompute_price) == ("random", False, 3.0)
    assert {frontend.log_format, router.log_format, *(w.log_format for w in workers_of(config))} == {"json"}
    assert read_frontend(config, str(file), {}).max_inflight == 8


def test_the_origins_of_web_pages_come_from_flag_environment_or_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[frontend]\ncors_origins = "https://file.example"\n')
    assert frontend_of(load_cluster([], {}))[0].cors_origins == ""
    assert frontend_of(load_cluster(["--cors-origins", "*"], {}), str(file))[0].cors_origins == "*"
    config = load_cluster([], {})
    assert read_frontend(config, str(file), {}).cors_origins == "https://file.example"
    environ = {"KVMESH_FRONTEND_CORS_ORIGINS": "https://env.example"}
    assert read_frontend(config, str(file), environ).cors_origins == "https://env.example"


def test_the_names_of_a_mesh_without_keys_are_settings_of_its_frontend() -> None:
    config = load_cluster(["--allowed-hosts", "llm.example.com"], {})
    assert frontend_of(config)[0].allowed_hosts == "llm.example.com"
    assert not any("allowed_hosts" in settings for settings in (config.worker, config.router))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--blok-size", "3"], "--block-size"),
        (["--block-size", "many"], "want INT"),
        (["--max-inflight", "0"], "--max-inflight"),
        (["--policy", "nonsense"], "policy"),
        (["--engine", "attach"], "--engine"),
        (["--attach-url", "http://x"], "--attach-url"),
    ],
)
def test_a_mistaken_option_is_named_before_anything_starts(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_cluster(argv, {})


def test_help_groups_the_options_by_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_cluster(["--help-all"], {})
    text = capsys.readouterr().out
    places = [
        text.index(part)
        for part in ("\noptions:", "--prefill INT", "options of every worker:", "--block-size INT")
        + ("options of the frontend:", "--max-inflight INT", "options of the router:", "--policy {")
    ]
    assert places == sorted(places)
    assert text.count("--log-format") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_directory_that_is_closed_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="set --run-dir"):
        make_run_dir(str(tmp_path / "run"))


def test_a_run_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot write to the run directory"):
        make_run_dir(str(tmp_path / "run"))
