"""The KV connectors of vLLM are chosen by short names; contradictions are refused."""

from typing import Any

import msgspec
import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.engines.vllm.transfer import check_can_run, hands_over, keeps_kv, transfer_config

GIB = 1 << 30


def told(kv_connector: str = "", **settings: Any) -> dict[str, Any] | None:
    config = msgspec.convert({"model_path": "/m", "kv_connector": kv_connector, **settings}, WorkerConfig)
    return transfer_config(config, None)


def test_host_memory_keeps_what_the_gpu_has_no_room_for() -> None:
    assert told("offloading", kv_offloading_gib=1.5) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 3 * GIB // 2},
    }


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_in_a_chain_nixl_takes_the_role_and_others_keep(role: str, kv_role: str) -> None:
    chain = told("nixl, offloading,lmcache", role=role)
    assert chain is not None
    assert (chain["kv_connector"], chain["kv_role"]) == ("MultiConnector", kv_role)
    parts = chain["kv_connector_extra_config"]["connectors"]
    assert [(part["kv_connector"], part["kv_role"]) for part in parts] == [
        ("NixlConnector", kv_role),
        ("OffloadingConnector", "kv_both"),
        ("LMCacheConnectorV1", "kv_both"),
    ]
    assert parts[0]["kv_connector_module_path"] == "kvmesh.workers.engines.vllm.connector"
    assert hands_over(chain)


def test_one_name_is_no_chain() -> None:
    assert told("nixl", role="decode") == told(role="decode")
    lmcache = told("lmcache")
    assert lmcache == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    assert not hands_over(lmcache)


def test_none_is_what_an_aggregated_worker_has_anyway() -> None:
    assert told("none") is None
    assert told() is None


def test_lmcaches_server_is_told_where_it_is_and_what_the_weights_are() -> None:
    config = msgspec.convert({"model_path": "/m", "lmcache_server": "10.0.0.7:6000"}, WorkerConfig)
    own = '{"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": {"lmcache.mp.port": 7000}}'
    for named, given, port in (("lmcache-mp", None, 6000), ("", own, 7000)):
        found = transfer_config(msgspec.structs.replace(config, kv_connector=named), given, "abc")
        assert found == {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvmesh.workers.engines.vllm.lmcache",
            "kv_connector_extra_config": {
                "kvmesh.weights": "abc",
                "lmcache.mp.host": "tcp://10.0.0.7",
                "lmcache.mp.port": port,
            },
        }


def test_only_kv_that_outlives_the_worker_needs_a_hash_of_the_weights() -> None:
    def keeps(**settings: str) -> bool:
        return keeps_kv(msgspec.convert({"model_path": "/m", **settings}, WorkerConfig))

    assert keeps(kv_connector="nixl,lmcache-mp")
    assert keeps(engine_args='--kv-transfer-config \'{"kv_connector": "LMCacheMPConnector"}\'')
    assert not keeps(kv_connector="nixl")
    assert not keeps()


@pytest.mark.parametrize(
    ("kv_connector", "settings", "message"),
    [
        ("nixl,mooncake", {}, "has 'mooncake'.*nixl, offloading, lmcache, lmcache-mp.*or none"),
        ("nixl,", {}, "has ''"),
        ("nixl,nixl", {}, "name each connector once"),
        ("none,offloading", {}, "contradicts itself"),
        ("offloading", {"role": "prefill"}, "--role prefill hands KV over by nixl.*has none"),
        ("none", {"role": "decode"}, "--role decode hands KV over by nixl"),
        ("lmcache", {"kv_transfer": "nixl"}, "--kv-transfer nixl hands KV over"),
        ("offloading,nixl", {}, "nixl does not come first"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(kv_connector: str, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        told(kv_connector, **settings)


def test_other_engines_have_no_such_connectors() -> None:
    config = WorkerConfig(model_path="/m", engine="mock", kv_connector="offloading")
    with pytest.raises(ConfigError, match="--kv-connector is for vllm, not for"):
        open_engine(config)


def test_an_unusable_connector_is_refused_before_vllm_starts() -> None:
    chain = told("nixl,offloading")
    assert chain is not None
    check_can_run(chain, on_cpu=False, has_module=lambda name: False)
    with pytest.raises(ConfigError, match="computes on the CPU"):
        check_can_run(chain, on_cpu=True, has_module=lambda name: True)
    lmcache = told("lmcache")
    assert lmcache is not None
    check_can_run(lmcache, on_cpu=False, has_module=lambda name: name == "lmcache")
    with pytest.raises(ConfigError, match="pip install lmcache"):
        check_can_run(lmcache, on_cpu=False, has_module=lambda name: False)
    with pytest.raises(ConfigError, match="an adapter would get the KV of another one"):
        check_can_run(lmcache, on_cpu=False, has_module=lambda name: True, has_adapters=True)


def test_on_a_cpu_lmcache_has_to_be_its_server() -> None:
    """In the worker's process it finds no connector there, and every prompt would wait for 3 s."""
    chain = told("nixl,lmcache")
    assert chain is not None
    with pytest.raises(ConfigError, match=r"computes on the CPU.*--kv-connector lmcache-mp"):
        check_can_run(chain, on_cpu=True, has_module=lambda name: True)
    server = told("nixl,lmcache-mp")
    assert server is not None
    check_can_run(server, on_cpu=True, has_module=lambda name: name == "lmcache")
