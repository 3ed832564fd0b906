"""Measure the worth of routing by cached prefixes on two real vLLM workers, by vLLM's own count of hits."""

import random
from collections.abc import Iterator

import httpx
import pytest

from tests.support.vllm_mesh import BLOCK, VllmMesh, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

WORKERS = ("w-0", "w-1")
DOCUMENTS, ROUNDS = 8, 4
ORDER = 4  # one in which taking turns does as well as in the mean of many: by chance it hits half as much or twice
DOCUMENT_BLOCKS = 16
NUM_BLOCKS = 80  # a worker has room for four documents and what is asked about them, not for all eight
BEST_SHARE = (ROUNDS - 1) / ROUNDS  # the first question about a document finds nothing


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmMesh]:
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        for name in WORKERS:
            mesh.start_worker(name, "aggregated", "--num-gpu-blocks-override", str(NUM_BLOCKS))
        mesh.until_ready(*WORKERS)
        yield mesh


def questions(seed: int) -> list[list[int]]:
    """Prompts. Every round asks one question about each document, in another order: the same one for all seeds."""
    order, draw = random.Random(ORDER), random.Random(seed)
    documents = [[draw.randrange(50, 1950) for _ in range(DOCUMENT_BLOCKS * BLOCK)] for _ in range(DOCUMENTS)]
    asked = [number for _ in range(ROUNDS) for number in order.sample(range(DOCUMENTS), DOCUMENTS)]
    return [[*documents[number], *(draw.randrange(50, 1950) for _ in range(20))] for number in asked]


def counted(mesh: VllmMesh, what: str) -> float:
    """Tokens, of both workers."""
    return sum(mesh.metric(f"vllm:prefix_cache_{what}_total", worker) for worker in WORKERS)


def hit_share(mesh: VllmMesh, policy: str, seed: int) -> float:
    """Return the share of the looked-up prompt tokens that vLLM found, while one question after the other is asked."""
    hits, queries = counted(mesh, "hits"), counted(mesh, "queries")
    with mesh.routed_by(policy) as url, httpx.Client(base_url=url, timeout=120) as http:
        for prompt in questions(seed):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200
    return (counted(mesh, "hits") - hits) / (counted(mesh, "queries") - queries)


def test_prefixes_are_found_where_the_router_sends_them(mesh: VllmMesh) -> None:
    """Both policies get the same pattern of questions about different documents, so that neither profits from the
    other.
    """
    by_turns, by_prefix = (hit_share(mesh, policy, seed) for seed, policy in enumerate(("round-robin", "kv")))
    print(f"hits of what was looked up: {by_prefix:.3f} by prefix, {by_turns:.3f} by turns")
    assert by_prefix > 0.9 * BEST_SHARE
    assert by_prefix > 1.6 * by_turns
