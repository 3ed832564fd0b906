"""The settings and flags of a worker become vLLM's flags; contradictions are refused."""

import json
from typing import Any

import msgspec
import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig, with_engine_args
from kvmesh.workers.engines.vllm.arguments import Adapter, LaunchPlan, Surroundings, parse_adapters, plan_start
from kvmesh.workers.engines.vllm.transfer import TRANSFER

HERE = Surroundings(5600, num_cpus=8, events="ipc:///run/events", replay="ipc:///run/replay")


def plan(engine_args: str = "", adapters: list[Adapter] | None = None, **settings: Any) -> LaunchPlan:
    config = msgspec.convert({"model_path": "/models/m", "engine_args": engine_args, **settings}, WorkerConfig)
    return plan_start(config, "m", adapters or [], HERE)


def value(plan: LaunchPlan, flag: str) -> str:
    assert plan.flags.count(flag) == 1
    return plan.flags[plan.flags.index(flag) + 1]


def test_the_model_and_its_name_are_the_workers() -> None:
    assert plan().flags[:4] == ("--model", "/models/m", "--served-model-name", "m")


def test_what_stands_after_the_dashes_reaches_vllm_as_it_is() -> None:
    started = plan("--tensor-parallel-size 2 --chat-template 'a b'")
    assert started.flags[4:8] == ("--tensor-parallel-size", "2", "--chat-template", "a b")


def test_kv_events_are_bound_where_only_the_worker_hears_them() -> None:
    assert json.loads(value(plan(), "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/events",
        "replay_endpoint": "ipc:///run/replay",
    }


def test_each_of_several_ranks_binds_a_port_of_its_own() -> None:
    """A file would do for one rank only, and an address without a * vLLM would connect to instead of binding it."""
    started = plan(dp_size=4)
    assert value(started, "--data-parallel-size") == "4"
    told = json.loads(value(started, "--kv-events-config"))
    assert told["endpoint"] == told["replay_endpoint"] == "tcp://*:0"
    assert started.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert started.environ["OMP_NUM_THREADS"] == "1"


def test_a_single_rank_is_not_told_of_ranks() -> None:
    assert "--data-parallel-size" not in plan().flags


def test_without_a_prefix_cache_there_are_no_events() -> None:
    started = plan("--no-enable-prefix-caching")
    assert not started.tells_events
    assert "--kv-events-config" not in started.flags


def test_an_aggregated_worker_hands_no_kv_over() -> None:
    started = plan()
    assert started.transfer == ""
    assert "--kv-transfer-config" not in started.flags


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_each_role_has_its_side_of_nixl(role: str, kv_role: str) -> None:
    started = plan(role=role, offer_lease_s=12.4)
    transfer = json.loads(value(started, "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", kv_role)
    assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": 12, "num_threads": 0}
    assert transfer["kv_connector_module_path"] == "kvmesh.workers.engines.vllm.connector"
    assert started.transfer == TRANSFER


def test_a_connector_of_ones_own_is_completed_and_not_changed() -> None:
    mine = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 2}}
    transfer = json.loads(
        value(plan(f"--kv-transfer-config='{json.dumps(mine)}'", role="decode"), "--kv-transfer-config")
    )
    assert transfer["kv_buffer_device"] == "cpu"
    assert transfer["kv_connector_extra_config"]["num_threads"] == 2
    assert transfer["kv_role"] == "kv_consumer"


def test_nixl_may_stand_in_a_chain_of_connectors() -> None:
    chain = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}]
        },
    }
    started = plan(f"--kv_transfer_config '{json.dumps(chain)}'", role="prefill")
    nixl, offloading = json.loads(value(started, "--kv-transfer-config"))["kv_connector_extra_config"]["connectors"]
    assert nixl["kv_role"] == "kv_producer"
    assert offloading == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert started.transfer == TRANSFER


def test_another_connector_alone_keeps_kv_for_an_aggregated_worker() -> None:
    started = plan('--kv-transfer-config \'{"kv_connector": "LMCacheConnectorV1"}\'')
    assert json.loads(value(started, "--kv-transfer-config"))["kv_role"] == "kv_both"
    assert started.transfer == ""


@pytest.mark.parametrize(
    ("engine_args", "settings", "message"),
    [
        ("--model other", {}, "--model stands after --.*set --model-path before"),
        ("--served-model-name=x", {}, "--served-model-name stands after --.*set --model before"),
        ("--port 80", {}, "--port stands after"),
        ("--kv_events_config {}", {}, "wires KV events itself"),
        ("--kv-events-config.endpoint=tcp://*:1", {}, "wires KV events itself"),
        ("--data-parallel-size 2", {}, "set --dp-size before the --"),
        ("-dp 2", {}, "set --dp-size before the --"),
        ("--data-parallel-rank 1", {"dp_size": 2}, "the router chooses among the ranks"),
        ("--dtype float32", {"dtype": "bfloat16"}, "--dtype stands after"),
        ("--load-format dummy", {"random_weights": True}, "--load-format stands after"),
        ("", {"block_size": 32}, "-- --block-size 32"),
        ("", {"num_blocks": 9}, "-- --num-gpu-blocks-override 9"),
        ("", {"device": "cuda"}, "--device is not for vLLM"),
        ("", {"kv_transfer": "shm"}, "moves no KV by shm"),
        ("'", {}, "cannot be read"),
        ("--kv-offloading-size 4", {"role": "prefill"}, "set --kv-connector offloading"),
        ("--kv-transfer-config {}", {"kv_connector": "nixl"}, "leave one of them out"),
        ("--kv-transfer-config", {}, "has no value"),
        ("--kv-transfer-config {} --kv-transfer-config {}", {}, "given twice"),
        ("--kv-transfer-config.kv_role kv_both", {}, "in parts"),
        ("--kv-transfer-config nonsense", {}, "is no JSON"),
        ("--kv-transfer-config []", {}, "is no JSON object"),
        (
            '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}\'',
            {"role": "decode"},
            "'kv_producer' does not fit --role decode",
        ),
        (
            '--kv-transfer-config \'{"kv_connector": "OffloadingConnector"}\'',
            {"role": "prefill"},
            "--role prefill hands KV over by NixlConnector",
        ),
    ],
)
def test_contradictions_are_refused_with_the_way_out(engine_args: str, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(engine_args, **settings)


def test_the_dtype_may_be_said_on_either_side() -> None:
    assert value(plan("--dtype float16"), "--dtype") == "float16"
    assert value(plan(dtype="bfloat16"), "--dtype") == "bfloat16"


def test_adapters_bring_the_flags_that_they_need() -> None:
    started = plan(adapters=[Adapter("a", "/a", 8), Adapter("b", "/b", 20)])
    assert value(started, "--max-loras") == "2"
    assert value(started, "--max-lora-rank") == "32"
    assert "--enable-lora" in started.flags


def test_limits_for_adapters_may_be_ones_own() -> None:
    started = plan("--enable-lora --max-loras 9 --max-lora-rank 64", [Adapter("a", "/a", 8)])
    assert (value(started, "--max-loras"), value(started, "--max-lora-rank")) == ("9", "64")
    assert started.flags.count("--enable-lora") == 1


def test_workers_on_one_cpu_share_its_cores() -> None:
    assert plan().environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert plan().environ["OMP_NUM_THREADS"] == "4"
    assert plan(num_threads=3).environ["OMP_NUM_THREADS"] == "3"


def test_nothing_is_compiled_where_vllm_runs_eagerly() -> None:
    assert plan("--enforce-eager").environ["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in plan().environ


def test_peers_find_the_side_channel_at_the_workers_address() -> None:
    environ = plan(host="0.0.0.0", advertise_host="10.0.0.7").environ
    assert (environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("10.0.0.7", "5600")


def test_adapters_are_named_with_their_folders() -> None:
    assert parse_adapters("a=/x, b=/y/z", "m") == [("a", "/x"), ("b", "/y/z")]
    assert parse_adapters("", "m") == []


@pytest.mark.parametrize(
    ("loras", "message"),
    [("a", "name=path"), ("=x", "name=path"), ("a=x,a=y", "is taken"), ("m=x", "is taken")],
)
def test_adapters_need_a_folder_and_a_unique_name(loras: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_adapters(loras, "m")


@pytest.mark.parametrize(
    ("argv", "engine_args"),
    [
        (["--role", "decode", "--", "--max-model-len", "99"], "--max-model-len 99"),
        (["--", "--chat-template", "a b", "--", "c"], "--chat-template 'a b' -- c"),
        (["--"], ""),
    ],
)
def test_all_that_stands_after_the_dashes_is_for_the_engine(argv: list[str], engine_args: str) -> None:
    assert with_engine_args(argv) == [*argv[: argv.index("--")], f"--engine-args={engine_args}"]


def test_without_the_dashes_nothing_is_for_the_engine() -> None:
    assert with_engine_args(["--role", "decode"]) == ["--role", "decode"]
