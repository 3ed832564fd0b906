"""Real vLLM workers of two data-parallel ranks: each caches, tells of it, offers and pulls for itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.mesh import until
from tests.support.vllm_mesh import BLOCK, VllmMesh, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmMesh]:
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        for name, role in (("p", "prefill"), ("d", "decode")):
            mesh.start_worker(name, role, settings=("--dp-size", str(len(RANKS))))
            mesh.until_ready(name)  # four engines that start at once take longer than one after the other
        yield mesh


def prompt(length: int, first: int) -> list[int]:
    return [(first + 43 * i) % 1900 + 50 for i in range(length)]


def counted(mesh: VllmMesh, metric: str, worker: str, **labels: str) -> list[float]:
    """Return vLLM's count for each rank."""
    return [mesh.metric(metric, worker, engine=str(rank), **labels) for rank in RANKS]


def whole(mesh: VllmMesh, tokens: Sequence[int]) -> str:
    """The answer of the decode worker alone."""
    reply = mesh.complete(tokens, max_tokens=8, ignore_eos=True, kvmesh={"disaggregate": False})
    return str(reply["choices"][0]["text"])


def placed(mesh: VllmMesh, tokens: Sequence[int]) -> dict[str, Any]:
    with mesh.http as http:
        decode: dict[str, Any] = http.post("/kvmesh/route", json={"model": "tiny", "prompt": list(tokens)}).json()[
            "decode"
        ]
        return decode


def test_a_prefix_is_found_on_the_rank_that_has_it(mesh: VllmMesh) -> None:
    ranks = []
    for number in range(6):
        first = prompt(10 * BLOCK + 5, first=211 * number)
        whole(mesh, first)
        second = [*first, *prompt(40, 1000 + number)]
        until(lambda: placed(mesh, second)["overlap_blocks"] == 10, what="the rank's KV events")  # noqa: B023
        rank = placed(mesh, second)["dp_rank"]
        before = counted(mesh, "vllm:prefix_cache_hits_total", "d")
        whole(mesh, second)
        after = counted(mesh, "vllm:prefix_cache_hits_total", "d")
        assert [b - a for a, b in zip(before, after, strict=True)] == [10 * BLOCK * (rank == own) for own in RANKS]
        ranks.append(rank)
    assert set(ranks) == set(RANKS)


def test_every_rank_prefills_for_every_rank_that_decodes(mesh: VllmMesh) -> None:
    """All of the prompt comes by NIXL, and the answer is that of one worker."""
    sources = ("external_kv_transfer", "local_compute")
    lengths = [200 + 17 * number for number in range(8)]
    before = [counted(mesh, "vllm:prompt_tokens_by_source_total", "d", source=source) for source in sources]
    computed = counted(mesh, "vllm:prompt_tokens_by_source_total", "p", source="local_compute")
    for number, length in enumerate(lengths):
        tokens = prompt(length, first=5000 + 97 * number)
        reply = mesh.complete(tokens, max_tokens=8, ignore_eos=True, kvmesh={"trace": True, "disaggregate": True})
        assert not reply["kvmesh"].get("pull_error")
        assert reply["kvmesh"]["transfer"] == "vllm-nixl"
    after = [counted(mesh, "vllm:prompt_tokens_by_source_total", "d", source=source) for source in sources]
    pulled, alone = ([b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True))
    assert (sum(pulled), sum(alone)) == (sum(lengths), 0)
    assert all(pulled), "both ranks decoded"
    now = counted(mesh, "vllm:prompt_tokens_by_source_total", "p", source="local_compute")
    assert all(b > a for a, b in zip(computed, now, strict=True)), "both ranks prefilled"


def test_an_answer_is_the_same_whichever_ranks_it_took(mesh: VllmMesh) -> None:
    for number in range(3):
        tokens = prompt(150, first=9000 + 31 * number)
        reply = mesh.complete(tokens, max_tokens=8, ignore_eos=True, kvmesh={"disaggregate": True})
        assert reply["choices"][0]["text"] == whole(mesh, tokens)
