"""A server's words about itself are read, as they were recorded and as nobody should write them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.errors import ConfigError, WireError
from kvmesh.workers.engines.attached.kinds import LLAMACPP, OPENAI, SGLANG, TRTLLM, kind_of
from kvmesh.workers.engines.attached.kinds import VLLM as VLLM_KIND
from kvmesh.workers.engines.attached.probe import (
    only_rank,
    reachable,
    read_cache_config,
    read_event_sources,
    read_load,
    read_models,
    read_props,
)
from kvmesh.workers.engines.attached.server import EventSource, LoadMetrics, ServerKind, ServerLoad

VLLM = {"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/tiny", "parent": None,
        "max_model_len": 2048, "permission": [{"id": "modelperm-1"}]}  # fmt: skip
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 70.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="16384"} 1.0
"""


VLLM_LOAD = VLLM_KIND.load_metrics or LoadMetrics("", "", "")


def models(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": list(cards)}).encode()


def test_vllm_tells_its_model_context_and_adapters() -> None:
    adapter = VLLM | {"id": "poet", "root": "/adapters/poet", "parent": "tiny"}
    server = read_models(models(VLLM, adapter), "", kind_of)
    assert (server.kind, server.model, server.loras, server.context_tokens) == (
        VLLM_KIND, "tiny", ("poet",), 2048,
    )  # fmt: skip
    assert server.root == "/models/tiny"


@pytest.mark.parametrize(
    ("owner", "kind"),
    [("sglang", SGLANG), ("tensorrt_llm", TRTLLM), ("llamacpp", LLAMACPP), ("me", OPENAI)],
)
def test_servers_are_told_apart_by_who_owns_the_model(owner: str, kind: ServerKind) -> None:
    assert read_models(models({"id": "m", "owned_by": owner}), "", kind_of).kind is kind


def test_llama_cpp_has_its_context_in_meta() -> None:
    body = models({"id": "m", "owned_by": "llamacpp", "meta": {"vocab_type": 2, "n_ctx_train": 4096}})
    assert read_models(body, "", kind_of).context_tokens == 4096
    assert read_props(b'{"total_slots": 4, "default_generation_settings": {"n_ctx": 2048, "x": []}}') == (4, 2048)


def test_a_missing_model_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"no model 'big'.*tiny"):
        read_models(models(VLLM), "big", kind_of)
    with pytest.raises(ConfigError, match=r"no single model.*a, b"):
        read_models(models(VLLM | {"id": "a", "root": "/a"}, VLLM | {"id": "b", "root": "/b"}), "", kind_of)
    assert (
        read_models(models(VLLM | {"id": "a", "root": "/a"}, VLLM | {"id": "b", "root": "/b"}), "b", kind_of).model
        == "b"
    )


def test_two_names_of_one_model_are_one() -> None:
    assert read_models(models(VLLM, VLLM | {"id": "alias"}), "", kind_of).model == "tiny"


@given(st.binary(max_size=200))
def test_an_unreadable_list_of_models_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        read_models(body, "", kind_of)


def test_block_size_and_blocks_are_in_the_metrics() -> None:
    assert read_cache_config(METRICS) == (32, 16384)
    assert read_cache_config("") is None
    assert read_cache_config('vllm:cache_config_info{block_size="0",num_gpu_blocks="9"} 1.0') is None
    assert read_cache_config('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0') is None


def test_load_is_summed_over_ranks_from_its_own_metrics() -> None:
    assert read_load(METRICS, VLLM_LOAD) == ServerLoad(running=4, waiting=2, cache_usage=0.375)
    assert read_load("", VLLM_LOAD) == ServerLoad()
    assert read_load("vllm:num_requests_running NaN\nvllm:num_requests_waiting 1e300", VLLM_LOAD).running == 0


@given(st.text())
def test_any_metrics_can_be_read(text: str) -> None:
    load = read_load(text + "\nvllm:kv_cache_usage_perc 7", VLLM_LOAD)
    assert 0 <= load.cache_usage <= 1
    assert read_cache_config(text) is None


def rank(**fields: Any) -> dict[str, Any]:
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://10.0.0.7:41",
            "replay_endpoint": "tcp://10.0.0.7:42", "buffer_steps": 10000, "hwm": 100000, "topic": "kv@w"}  # fmt: skip
    return told | fields


def test_where_events_are_is_asked_by_rank() -> None:
    sources = read_event_sources(json.dumps({"0": rank(), "1": rank(replay_endpoint=None)}).encode(), "h")
    assert sources == {
        0: EventSource("tcp://10.0.0.7:41", "tcp://10.0.0.7:42", "kv@w"),
        1: EventSource("tcp://10.0.0.7:41", "", "kv@w"),
    }
    assert only_rank(sources) is None, "any rank may answer a request: what one of them caches says nothing"
    assert only_rank({0: sources[0]}) == sources[0]


@pytest.mark.parametrize("silent", [{"enable_kv_cache_events": False}, {"publisher": "null"}, {"endpoint": ""}])
def test_a_rank_that_publishes_nothing_is_no_source(silent: dict[str, Any]) -> None:
    assert read_event_sources(json.dumps({"0": rank(**silent)}).encode(), "h") == {}


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
def test_a_wildcard_is_read_as_the_servers_host(wildcard: str) -> None:
    assert reachable(f"tcp://{wildcard}:5557", "gpu-3") == "tcp://gpu-3:5557"
    assert reachable("ipc:///run/kv", "gpu-3") == "ipc:///run/kv"
