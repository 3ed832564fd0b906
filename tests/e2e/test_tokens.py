"""Token for token: the mesh answers as the transformers library does on the same checkpoint, however it works."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.budget import LARGE
from tests.support.mesh import Mesh

NEW_TOKENS = 20
LENGTHS = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 144, 191, 256, 257, 300]
PROMPTS = 2 * len(LENGTHS) if LARGE else len(LENGTHS)

pytestmark = pytest.mark.budget


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[str]]]:
    """Return a prompt and the greedy answer's tokens as text, from transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvmesh.lab.tiny_model.corpus import prose_documents

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32).eval()
    rng = random.Random(5)
    text = tokenizer("".join(document.text for document in itertools.islice(prose_documents(seed=99), 40)))["input_ids"]
    answers = []
    for i in range(PROMPTS):
        start = rng.randrange(len(text) - 400)
        prompt = text[start : start + LENGTHS[i % len(LENGTHS)]]
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append((prompt, [tokenizer.decode([t]) for t in out[0, len(prompt) :].tolist()]))
    return answers


def ask(mesh: Mesh, prompt: list[int], salt: str, disaggregate: bool) -> dict[str, Any]:
    return mesh.complete(
        prompt,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        cache_salt=salt,
        kvmesh={"trace": True, "disaggregate": disaggregate},
    )


def tokens_of(answer: dict[str, Any]) -> list[str]:
    return answer["choices"][0]["logprobs"]["tokens"]


@pytest.mark.parametrize("disaggregate", [True, False])
def test_one_after_the_other(mesh: Mesh, expected: list[tuple[list[int], list[str]]], disaggregate: bool) -> None:
    salt = f"alone-{disaggregate}"
    for prompt, tokens in expected:
        answer = ask(mesh, prompt, salt, disaggregate)
        trace = answer["kvmesh"]
        assert tokens_of(answer) == tokens, f"a prompt of {len(prompt)} tokens: {trace}"
        assert (trace["prefill_worker"] is not None) == disaggregate
        assert not trace["pull_error"]


@pytest.mark.parametrize("disaggregate", [True, False])
def test_32_in_flight_and_then_again_over_cached_prefixes(
    mesh: Mesh, expected: list[tuple[list[int], list[str]]], disaggregate: bool
) -> None:
    salt = f"together-{disaggregate}"
    with ThreadPoolExecutor(32) as pool:
        for _ in range(2):
            answers = list(pool.map(lambda pair: ask(mesh, pair[0], salt, disaggregate), expected))
            assert [tokens_of(answer) for answer in answers] == [tokens for _, tokens in expected]
    hits = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert sum(hits) > 0, "the second round shall have gone over cached prefixes"
