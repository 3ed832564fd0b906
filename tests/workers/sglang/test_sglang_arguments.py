"""SGLang's flags: what the worker sets, what it lets through, and what it refuses."""

import json

import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.sglang.arguments import EventEndpoints, adapter_paths, argv_of, bootstrap_host, read_flags

ENDPOINTS = EventEndpoints("ipc:///run/events", "ipc:///run/replay")


def config(flags: str = "", **fields: object) -> WorkerConfig:
    return WorkerConfig(model_path="/models/m", engine_args=flags, **fields)  # type: ignore[arg-type]


def argv(flags: str = "", **fields: object) -> list[str]:
    settings = config(flags, **fields)
    return argv_of(settings, read_flags(settings), "served", ENDPOINTS)


def value(name: str, given: list[str]) -> str | None:
    return next((part.partition("=")[2] for part in given if part.startswith(f"{name}=")), None)


def test_the_worker_sets_model_name_and_block_size() -> None:
    given = argv(block_size=64)
    assert (value("--model-path", given), value("--served-model-name", given)) == ("/models/m", "served")
    assert value("--page-size", given) == "64"


@pytest.mark.parametrize(
    ("role", "mode"), [(Role.AGGREGATED, "null"), (Role.PREFILL, "prefill"), (Role.DECODE, "decode")]
)
def test_the_role_becomes_the_disaggregation_mode(role: Role, mode: str) -> None:
    assert value("--disaggregation-mode", argv(role=role)) == mode


def test_the_halves_move_kv_by_nixl_unless_told_otherwise() -> None:
    assert "--disaggregation-transfer-backend=nixl" in argv(role=Role.PREFILL)
    assert read_flags(config("--disaggregation-transfer-backend mooncake", role=Role.DECODE)).transfer == "mooncake"
    assert value("--disaggregation-transfer-backend", argv()) is None


def test_events_are_bound_where_the_worker_listens() -> None:
    events = json.loads(value("--kv-events-config", argv()) or "")
    assert events == {
        "publisher": "zmq",
        "endpoint": "ipc:///run/events",
        "replay_endpoint": "ipc:///run/replay",
        "topic": "",
        "bind": True,
    }


def test_a_rank_publishes_as_many_ports_further_on() -> None:
    endpoints = EventEndpoints("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6004")
    assert endpoints.of(0) == ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:6004")
    assert endpoints.of(3) == ("tcp://127.0.0.1:6003", "tcp://127.0.0.1:6007")


@pytest.mark.parametrize("flags", ["--dp-size 4", "--dp-size=4", "--data-parallel-size 4", "--dp-size 2 --dp-size 4"])
def test_the_number_of_ranks_is_read_from_the_flags(flags: str) -> None:
    assert read_flags(config(flags)).dp_size == 4


def test_a_node_rank_above_zero_does_not_lead() -> None:
    assert read_flags(config("--nnodes 2 --node-rank 0")).is_leader
    assert not read_flags(config("--nnodes 2 --node-rank 1")).is_leader


def test_a_grammar_backend_brings_the_tokenizer_that_it_needs() -> None:
    assert "--skip-tokenizer-init" in argv()
    assert "--skip-tokenizer-init" in argv("--grammar-backend none")
    assert "--skip-tokenizer-init" not in argv("--grammar-backend xgrammar")


def test_caches_experts_and_all_else_pass_through_as_given() -> None:
    flags = (
        "--enable-hierarchical-cache --hicache-ratio 2 --hicache-storage-backend nixl --enable-eplb "
        "--eplb-rebalance-num-iterations 500 --expert-distribution-recorder-mode stat --speculative-algorithm EAGLE3 "
        "--json-model-override-args '{\"a b\": 1}'"
    )
    given = argv(flags)
    assert given[-2:] == ["--json-model-override-args", '{"a b": 1}']
    for part in ("--enable-hierarchical-cache", "--hicache-ratio", "--enable-eplb", "--speculative-algorithm"):
        assert part in given


def test_adapters_are_given_by_name_and_path() -> None:
    settings = config(loras="poet=/adapters/poet, cook=/adapters/cook")
    assert tuple(adapter_paths(settings)) == ("poet", "cook")
    given = argv_of(settings, read_flags(settings), "served", ENDPOINTS)
    at = given.index("--lora-paths")
    assert given[at - 1 : at + 3] == ["--enable-lora", "--lora-paths", "poet=/adapters/poet", "cook=/adapters/cook"]


@pytest.mark.parametrize("loras", ["poet", "poet=", "=/x", "poet=/x,poet=/y"])
def test_adapters_need_a_unique_name_and_a_path(loras: str) -> None:
    with pytest.raises(ConfigError, match="name=path"):
        adapter_paths(config(loras=loras))


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--model-path /other", "--model-path of the worker"),
        ("--model /other", "--model-path of the worker"),
        ("--port 30000", "not started"),
        ("--page-size=1", "--block-size"),
        ("--page 1", "--block-size"),  # SGLang's parser takes the beginning of a name
        ("--disaggregation-mode decode", "--role"),
        ("--kv-events-config {}", "the worker wires"),
        ("--skip-tokenizer-init", "--grammar-backend"),
        ("--config my.yaml", "the flags themselves"),
    ],
)
def test_what_contradicts_the_worker_is_refused_with_what_to_do(flags: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        read_flags(config(flags))


def test_flags_that_need_a_role_or_clash_are_refused() -> None:
    with pytest.raises(ConfigError, match="--role prefill"):
        read_flags(config("--disaggregation-bootstrap-port 9000"))
    assert read_flags(config("--disaggregation-bootstrap-port 9000", role=Role.PREFILL))
    with pytest.raises(ConfigError, match="leave one of them out"):
        read_flags(config("--enable-lora", loras="poet=/x"))
    with pytest.raises(ConfigError, match="a number was expected"):
        read_flags(config("--dp-size many"))


def test_a_prefill_worker_has_to_say_where_it_is_reached() -> None:
    assert bootstrap_host(config(host="10.0.0.7")) == "10.0.0.7"
    assert bootstrap_host(config(host="0.0.0.0", advertise_host="node-3")) == "node-3"
    with pytest.raises(ConfigError, match="--advertise-host"):
        bootstrap_host(config(host="0.0.0.0"))
