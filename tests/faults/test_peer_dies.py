"""Two workers that compute and decode: the second pulls a prefix from the first one, also while that one dies."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh import Mesh, running_mesh, until

BLOCKS = 120  # so long that a pull pays on a fast machine too: to ask for one takes 20 ms
PULLS = "kvmesh_worker_kv_peer_pulls_total"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("peers")
    # The torch engine, so that an answer says whether its KV was right.
    with running_mesh(
        folder / "run", "--prefill", "0", "--decode", "0", "--aggregated", "2", "--engine", "torch"
    ) as mesh:
        yield mesh


def prompt(number: int) -> list[int]:
    return [number + 10, *[(7 * i) % 400 + 10 for i in range(16 * BLOCKS + 2)]]


def ask(mesh: Mesh, worker: str, tokens: list[int]) -> dict[str, Any]:
    return mesh.complete(tokens, max_tokens=6, kvmesh={"trace": True, "worker": worker})


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def knows_source(mesh: Mesh, tokens: list[int]) -> bool:
    """Return whether the router would have the second worker pull from the first."""
    headers = {"x-kvmesh-worker": "aggregated-1"}
    return "pulls up to" in mesh.route(tokens, headers)["explanation"]["why"]


def let_it_be_known(mesh: Mesh, tokens: list[int]) -> None:
    """Wait until the router knows the source. Other prompts let the workers measure their speed again."""
    for fresh in range(5):
        try:
            until(lambda: knows_source(mesh, tokens), timeout_s=10.0, what="the router to know of a source")
            return
        except AssertionError:
            ask(mesh, f"aggregated-{fresh % 2}", prompt(50 + fresh))
    until(lambda: knows_source(mesh, tokens), what="the router to know of a source")


@pytest.mark.long
def test_the_second_worker_pulls_what_the_first_has_computed(two: Mesh) -> None:
    computed = ask(two, "aggregated-0", prompt(1))
    let_it_be_known(two, prompt(1))
    pulled = ask(two, "aggregated-1", prompt(1))
    assert (cached(computed), cached(pulled)) == (0, 16 * BLOCKS)
    assert text(pulled) == text(computed)
    assert two.metric(PULLS, "aggregated-1", outcome="ok") == 1
    assert two.metric("kvmesh_worker_kv_peer_pulled_blocks_total", "aggregated-1") == BLOCKS
    until(lambda: two.metric("kvmesh_worker_kv_offers", "aggregated-0") == 0, what="the blocks to be given back")
    until(lambda: two.metric("kvmesh_worker_used_blocks", "aggregated-0") == 0, what="free blocks")


@pytest.mark.long
def test_a_peer_that_is_killed_in_a_pull_costs_time_alone(two: Mesh) -> None:
    computed = ask(two, "aggregated-0", prompt(2))
    let_it_be_known(two, prompt(2))
    pid = two.pid("aggregated-0")
    two.signal("aggregated-0", signal.SIGSTOP)  # the pull asks a worker that will not answer any more
    with ThreadPoolExecutor(1) as thread:
        pulling = thread.submit(ask, two, "aggregated-1", prompt(2))
        until(lambda: two.metric("kvmesh_worker_running_requests", "aggregated-1") == 1, what="the pull to begin")
        assert two.kill("aggregated-0") == pid
        answer = pulling.result()
    assert text(answer) == text(computed)
    assert cached(answer) == 0
    assert two.metric(PULLS, "aggregated-1", outcome="failed") == 1
    assert "computes its prompt itself" in two.logs()
    until(lambda: two.metric("kvmesh_worker_used_blocks", "aggregated-1") == 0, what="the blocks to be free")
    two.until_replaced("aggregated-0", pid)
