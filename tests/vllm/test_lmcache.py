"""LMCache's server beside real vLLM workers: blocks that a worker has evicted come back, and answers stay the same."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.mesh import until
from tests.support.vllm_adapters import write_adapter
from tests.support.vllm_mesh import BLOCK, VllmMesh, needs_vllm, running_vllm_mesh

FOLDER = os.environ.get("KVMESH_LMCACHE", "")

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not FOLDER, reason="KVMESH_LMCACHE names no folder that has LMCache: make test-vllm"),
    pytest.mark.timeout(900),
]

CHUNK = 2 * BLOCK  # tokens that LMCache stores and finds together
NUM_BLOCKS = 80  # a worker has room for four documents, not for all eight
LENGTH = 16 * BLOCK + 5
ADAPTERS = ("poet", "cook")
SOURCES = ("external_kv_transfer", "local_compute")


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def environ() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH", ""))))}


@contextmanager
def lmcache_server(folder: Path) -> Iterator[str]:
    """Run `lmcache server` as docs/workers.md says; yield its HOST:PORT."""
    port, http_port = free_ports(2)
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--l1-size-gb", "0.5"]
    command += ["--eviction-policy", "LRU", "--chunk-size", str(CHUNK), "--supported-transfer-mode", "auto"]
    env = {**os.environ, **environ(), "LMCACHE_TRACK_USAGE": "false"}
    with (folder / "lmcache.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        until(lambda: answers(http_port), 120, f"LMCache's server\n{(folder / 'lmcache.log').read_text()[-2000:]}")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def answers(http_port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{http_port}/healthcheck", timeout=5).status_code < 500
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with lmcache_server(tmp_path_factory.mktemp("lmcache")) as address:
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the tiny model whose weights a test may change."""
    return Path(shutil.copytree(CHECKPOINT_DIR, tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, server: str, model: Path) -> Iterator[VllmMesh]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = ",".join(f"{name}={write_adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS))
    settings = ("--kv-connector", "lmcache-mp", "--lmcache-server", server, "--loras", adapters)
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        start(mesh, "with", model, *settings)
        start(mesh, "without", model)
        mesh.until_ready("with", "without")
        yield mesh


def start(mesh: VllmMesh, name: str, model: Path, *settings: str) -> None:
    flags = ("--num-gpu-blocks-override", str(NUM_BLOCKS))
    mesh.start_worker(name, "aggregated", *flags, settings=settings, model_path=model, environ=environ())


def document(number: int) -> list[int]:
    return [(311 * number + 43 * i) % 1900 + 50 for i in range(LENGTH)]


def ask(mesh: VllmMesh, worker: str, prompt: Sequence[int], **body: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "prompt": list(prompt), "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    with mesh.http as http:
        response = http.post("/v1/completions", json={**fields, **body}, headers={"x-kvmesh-worker": worker})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def counted(mesh: VllmMesh, worker: str) -> list[float]:
    return [mesh.prompt_tokens(worker, source) for source in SOURCES]


def scores(answer: dict[str, Any]) -> list[float]:
    return [float(score) for score in answer["choices"][0]["logprobs"]["token_logprobs"] if score is not None]


def test_evicted_blocks_come_back_and_the_answers_are_those_of_a_worker_without_it(mesh: VllmMesh) -> None:
    """The counters are vLLM's own. Eight documents are asked about in turn, so that each was evicted before."""
    documents = [document(number) for number in range(8)]
    for prompt in documents:
        ask(mesh, "with", prompt)
    before = counted(mesh, "with")
    found = [ask(mesh, "with", prompt, logprobs=1) for prompt in documents]
    external, computed = (b - a for a, b in zip(before, counted(mesh, "with"), strict=True))
    print(f"{external:.0f} tokens came from LMCache, {computed:.0f} were computed")
    assert external == 8 * (LENGTH // CHUNK) * CHUNK
    assert external + computed == 8 * LENGTH
    assert found[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == LENGTH // CHUNK * CHUNK
    plain = [ask(mesh, "without", prompt, logprobs=1) for prompt in documents]
    assert [a["choices"][0]["text"] for a in found] == [a["choices"][0]["text"] for a in plain]
    with_it, without = (sum(sum(scores(answer)) for answer in answers) for answers in (found, plain))
    print(f"sum of the answers' logprobs: {with_it:.4f} with LMCache, {without:.4f} without")
    assert with_it == pytest.approx(without, rel=0.01)


def test_the_logprobs_of_a_prompt_are_right_where_its_prefix_is_in_lmcache(mesh: VllmMesh) -> None:
    prompt = document(1)
    found, plain = (
        ask(mesh, worker, prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]["token_logprobs"]
        for worker in ("with", "without")
    )
    assert len(found) == LENGTH + 1
    assert found[1:] == pytest.approx(plain[1:], abs=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        [{"cache_salt": "ann"}, {"cache_salt": "ben"}, {"cache_salt": "a/b\\c@d"}, {"cache_salt": "é" * 200}],
        [{"model": name} for name in ("tiny", *ADAPTERS)],
    ],
    ids=["tenants", "adapters"],
)
def test_tenants_and_adapters_share_nothing_in_lmcache(mesh: VllmMesh, fields: list[dict[str, str]]) -> None:
    """Each one finds its own blocks again, and no others'; a salt may have any characters."""
    prompt = document(30 + len(fields))
    for found in (0, LENGTH // CHUNK * CHUNK):
        for each in fields:
            before = counted(mesh, "with")
            ask(mesh, "with", prompt, **each)
            assert counted(mesh, "with")[0] - before[0] == found
            for number in range(50, 55):  # so that the worker evicts it
                ask(mesh, "with", document(number), max_tokens=1)


def test_new_weights_in_the_same_folder_find_nothing_of_the_old_ones(mesh: VllmMesh, server: str, model: Path) -> None:
    """A worker that starts again with the old weights finds what an earlier one has stored."""
    settings = ("--kv-connector", "lmcache-mp", "--lmcache-server", server)
    start(mesh, "same", model, *settings)
    mesh.until_ready("same")
    old = answers_of(mesh, "same")
    assert mesh.prompt_tokens("same", "external_kv_transfer") >= LENGTH // CHUNK * CHUNK
    mesh.end_worker("same")
    change_weights(model / "model.safetensors")
    start(mesh, "new", model, *settings)
    mesh.until_ready("new")
    new = answers_of(mesh, "new")
    assert mesh.prompt_tokens("new", "external_kv_transfer") == 0
    assert not set(new) & set(old)


def answers_of(mesh: VllmMesh, worker: str) -> list[str]:
    """Ask about four documents that the first worker stored. LMCache may find nothing while a worker is joining."""
    return [str(ask(mesh, worker, document(number))["choices"][0]["text"]) for number in range(4)]


def change_weights(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(str(file))
    save_file({name: weight * 1.5 for name, weight in weights.items()}, str(file))
