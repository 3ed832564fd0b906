"""A real vLLM worker on two nodes, here two processes: each has half of every layer, or a rank of its own."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.mesh import until
from tests.support.vllm_mesh import BLOCK, START_S, VllmMesh, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[VllmMesh]:
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        both = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")
        both += ("--master-port", str(free_port()))
        settings = ("--metrics-port", str(metrics_port))
        mesh.start_worker("node-1", "aggregated", *both, "--node-rank", "1", settings=settings)
        mesh.start_worker("node-0", "aggregated", *both, "--node-rank", "0")
        mesh.until_ready("node-0", within_s=2 * START_S)  # three processes start one after the other
        yield mesh


def test_ranks_on_two_nodes_are_ranks_of_one_worker(tmp_path: Path) -> None:
    """The nodes run the engine of one rank each; the first node's worker follows the events of both.

    This test comes first, because the others leave a mesh of their own running.
    """
    with running_vllm_mesh(tmp_path) as mesh:
        both = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
        for rank in (1, 0):
            flags = (*both, "--node-rank", str(rank))
            mesh.start_worker(f"node-{rank}", "aggregated", *flags, settings=("--dp-size", "2"))
        mesh.until_ready("node-0", within_s=2 * START_S)
        found = set()
        for number in range(4):
            prompt = [(211 * number + 43 * i) % 1900 + 50 for i in range(4 * BLOCK + 5)]
            mesh.complete(prompt, max_tokens=2)
            until(lambda: overlap_blocks(mesh, prompt)[1] == 4, what="the rank's KV events")  # noqa: B023
            found.add(overlap_blocks(mesh, prompt)[0])
        assert found == {0, 1}
        assert all(mesh.metric("vllm:prompt_tokens_total", "node-0", engine=str(rank)) > 4 * BLOCK for rank in found)
        assert mesh.workers().keys() == {"node-0"}


def overlap_blocks(mesh: VllmMesh, prompt: list[int]) -> tuple[int, int]:
    """The rank that would be chosen, and what it holds of the prompt."""
    with mesh.http as http:
        decode = http.post("/kvmesh/route", json={"model": "tiny", "prompt": prompt}).json()["decode"]
    return decode["dp_rank"], decode["overlap_blocks"]


def test_both_compute_and_the_first_alone_serves(mesh: VllmMesh, metrics_port: int) -> None:
    reply = mesh.complete(list(range(100, 150)), max_tokens=4, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 4
    assert reply["kvmesh"]["decode_worker"] == "node-0"
    assert mesh.workers().keys() == {"node-0"}
    until(lambda: httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").status_code == 200, what="its metrics")
    assert mesh.started["node-1"].poll() is None


def test_a_node_whose_vllm_has_died_ends_for_its_supervisor_to_start_it_anew(mesh: VllmMesh) -> None:
    """The last test: nothing is left to ask."""
    [computing] = [process for process in mesh.tree("node-1") if " ".join(process.cmdline()).startswith("VLLM::")]
    computing.kill()
    assert mesh.started["node-1"].wait(60) not in (0, None)
