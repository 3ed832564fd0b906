"""Chains of vLLM's KV connectors, as far as they run on a CPU.

There vLLM refuses to copy KV into host memory, where it is already: what the worker tells it of `offloading` is tested
without vLLM (tests/workers/test_vllm_transfer.py). The second one of the chain here is the connector that vLLM brings
as an example: it writes the KV of prompts to files.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.engines.vllm.driver import open_driver
from tests.support.vllm_mesh import BLOCK, VllmMesh, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

LENGTH = 10 * BLOCK + 5


def chain(folder: Path) -> str:
    files = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    parts = [{"kv_connector": "NixlConnector"}, files]
    return json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[VllmMesh]:
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        mesh.start_worker("p", "prefill", "--kv-transfer-config", chain(folder))
        mesh.start_worker("d", "decode", "--disable-hybrid-kv-cache-manager")  # the example turns it off, and NIXL asks
        mesh.until_ready("p", "d")
        yield mesh


def test_a_prefill_worker_hands_over_by_one_connector_and_keeps_by_another(mesh: VllmMesh, folder: Path) -> None:
    before = {*folder.rglob("*.safetensors")}
    prompt = [(7 + 43 * i) % 1900 + 50 for i in range(LENGTH)]
    body = {"max_tokens": 8, "ignore_eos": True}
    reply = mesh.complete(prompt, kvmesh={"trace": True, "disaggregate": True}, **body)
    assert not reply["kvmesh"].get("pull_error")
    assert mesh.prompt_tokens("d", "external_kv_transfer") == LENGTH
    assert len({*folder.rglob("*.safetensors")} - before) == 4, "one file for each layer"
    alone = mesh.complete(prompt, kvmesh={"disaggregate": False}, **body)
    assert reply["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize(
    ("connector", "message"),
    [("OffloadingConnector", "this vLLM computes on the CPU"), ("LMCacheConnectorV1", "--kv-connector lmcache-mp")],
)
def test_what_cannot_run_here_is_refused_before_anything_starts(connector: str, message: str) -> None:
    told = json.dumps({"kv_connector": connector, "kv_role": "kv_both"})
    with pytest.raises(ConfigError, match=message):
        open_driver(["--model", str(CHECKPOINT_DIR), "--kv-transfer-config", told], {})
