"""A pull stands still while the prefill worker evicts and reuses the blocks: the answer is that of a single worker."""

import random
import time
from collections.abc import Iterator

import pytest

from kvmesh.kvcache.transfer.nixl import why_unavailable
from tests.faults.conftest import PAIR, watched
from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.streams import Stream, check_answer

LEASE_S = 0.5
BLOCKS = 200  # of each worker's cache
PROMPT = 640  # tokens, 40 blocks
P_D = {"trace": True, "disaggregate": True}


@pytest.fixture(scope="module", params=["nixl", "shm"])
def small_mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Real KV in caches so small that ten prompts evict everything; offers end after half a second."""
    if request.param == "nixl" and (reason := why_unavailable()):
        pytest.skip(f"NIXL: {reason}")
    flags = ["--kv-transfer", request.param, "--offer-lease-s", str(LEASE_S), "--num-blocks", str(BLOCKS)]
    with running_mesh(tmp_path_factory.mktemp("small"), *flags, "--no-kv-peers") as mesh:
        yield mesh


@pytest.fixture
def mesh(small_mesh: Mesh) -> Iterator[Mesh]:
    yield from watched(small_mesh, PAIR)


def ask(mesh: Mesh, first: int, salt: str, worker: str = "decode-0") -> Stream:
    return Stream(mesh.url, prompt_of(PROMPT, first), 12, kvmesh=P_D | {"worker": worker}, cache_salt=salt)


def right_answers(mesh: Mesh, firsts: list[int]) -> list[list[str]]:
    """Return the greedy answers of one worker that computes the prompts itself."""
    alone = {"kvmesh": {"disaggregate": False, "worker": "decode-1"}}
    return [Stream(mesh.url, prompt_of(PROMPT, n), 12, **alone).join().tokens for n in firsts]  # type: ignore[arg-type]


def evict(mesh: Mesh, salt: str) -> None:
    """Fill the whole cache of the prefill worker with other prompts."""
    for number in range(BLOCKS * 16 // PROMPT + 1):
        assert ask(mesh, 900 + number, salt, "decode-1").join().is_done


def test_blocks_reused_before_the_pull_are_not_read(mesh: Mesh) -> None:
    firsts = [1, 2, 3]
    answers = right_answers(mesh, firsts)
    with mesh.stopped("decode-0"):
        streams = [ask(mesh, n, "reused") for n in firsts]
        until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == len(streams), what="offers")
        until(lambda: mesh.metric("kvmesh_worker_kv_offers", "prefill-0") == 0, what="the offers' end")
        evict(mesh, "evicting")
    for stream, answer in zip(streams, answers, strict=True):
        check_answer(stream.join(), answer)
        assert "ended before it was fetched" in stream.trace["pull_error"]


def busy(mesh: Mesh) -> float:
    """Return how many requests and offers the prefill worker has."""
    names = ("running_requests", "waiting_requests", "kv_offers")
    return sum(mesh.metric(f"kvmesh_worker_{name}", "prefill-0") for name in names)


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_a_worker_stopped_at_any_moment_of_a_pull_answers_right(mesh: Mesh) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    firsts = [1, 2, 3, 4]
    answers = right_answers(mesh, firsts)
    outcomes: set[bool] = set()
    for number in range(40):
        streams = [ask(mesh, n, f"moment {number}") for n in firsts]
        time.sleep(rng.random() * 0.4)  # the moment is what the seed chooses
        with mesh.stopped("decode-0"):
            until(lambda: not busy(mesh), what="the prefill worker to have nothing left")
            evict(mesh, f"evict {number}")
        for stream, answer in zip(streams, answers, strict=True):
            check_answer(stream.join(), answer)
            outcomes.add(bool(stream.trace["pull_error"]))
    assert outcomes == {True, False}, "some moments lie before the end of the pull, some after it"
