"""Many prompts over two workers at once, each with a secret of its own: no answer is that of another prompt."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvmesh.kvcache.transfer.nixl import why_unavailable
from tests.support.mesh import Mesh, running_mesh, until

CANARIES = 64
PROMPT_TOKENS = 120
ANSWER_TOKENS = 8
SALT = "canaries"  # one for all, so that nothing but the content keeps them apart


@pytest.fixture(scope="module")
def small_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Caches that hold a third of the prompts, so that blocks change hands while others are pulled."""
    transfer = "shm" if why_unavailable() else "nixl"
    flags = ["--kv-transfer", transfer, "--num-blocks", "200", "--saturation-blocks-share", "0"]
    with running_mesh(tmp_path_factory.mktemp("canaries"), *flags) as mesh:
        until(lambda: mesh.workers_seen() == 3, what="all workers")
        yield mesh


def canaried_prompts(seed: int) -> list[list[int]]:
    """Return prompts that begin alike, have a secret each in the middle, and end alike."""
    rng = random.Random(seed)
    beginning, ending = ([rng.randrange(50, 1900) for _ in range(PROMPT_TOKENS // 2)] for _ in range(2))
    return [[*beginning, *rng.sample(range(50, 1900), 6), *ending] for _ in range(CANARIES)]


def answer(mesh: Mesh, prompt: list[int], *, disaggregate: bool, salt: str) -> tuple[list[str], list[float]]:
    """Return the tokens and their logprobs, which tell contexts apart even where the tokens are equal."""
    kvmesh = {"trace": True, "disaggregate": disaggregate}
    reply = mesh.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0, cache_salt=salt, kvmesh=kvmesh)
    assert (reply["kvmesh"]["prefill_worker"] is not None) == disaggregate
    logprobs = reply["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def test_64_canaried_requests_at_once_mix_no_contexts(small_mesh: Mesh) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    prompts = canaried_prompts(seed)
    alone = [answer(small_mesh, prompt, disaggregate=False, salt=f"alone {n}") for n, prompt in enumerate(prompts)]
    assert len({str(one) for one in alone}) == CANARIES, "every secret shows in its answer"
    with ThreadPoolExecutor(CANARIES) as pool:
        together = list(pool.map(lambda prompt: answer(small_mesh, prompt, disaggregate=True, salt=SALT), prompts))
    pulled = [small_mesh.metric("kvmesh_worker_kv_pulled_bytes_total", f"decode-{n}") for n in range(2)]
    assert min(pulled) > 0, "KV has moved to both decode workers"
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    for (_, logprobs), (_, right) in zip(together, alone, strict=True):
        assert logprobs == pytest.approx(right, abs=1e-3)
