"""Scores of texts: a mesh gives the logprobs that the transformers library computes, wherever a prompt is computed."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from tests.support.mesh import Mesh, running_mesh, until

LENGTHS = (2, 16, 65, 300)  # tokens; a step of the meshes computes 128
CLOSE = 1e-3


@cache
def model_and_tokenizer() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(CHECKPOINT_DIR)


@cache
def prompts() -> list[list[int]]:
    from kvmesh.lab.tiny_model.corpus import prose_documents

    _, tokenizer = model_and_tokenizer()
    text = tokenizer("".join(document.text for document in itertools.islice(prose_documents(seed=98), 20)))["input_ids"]
    return [text[100 * n : 100 * n + length] for n, length in enumerate(LENGTHS)]


def expected(prompt: Sequence[int]) -> list[float]:
    """The logprobs of the tokens from the second on."""
    import torch

    model, _ = model_and_tokenizer()
    with torch.inference_mode():
        logprobs = model(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


def score(mesh: Mesh, prompt: Any, **fields: Any) -> dict[str, Any]:
    return mesh.complete(prompt, **{"echo": True, "logprobs": 1, "max_tokens": 0, **fields})


def check(choice: dict[str, Any], prompt: Sequence[int], *, is_text: bool = False) -> None:
    """`is_text`: it was sent as text; else the echo shows no special tokens."""
    told = choice["logprobs"]
    _, tokenizer = model_and_tokenizer()
    assert choice["text"] == tokenizer.decode(prompt, skip_special_tokens=not is_text)
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1:] == pytest.approx(expected(prompt), abs=CLOSE)
    for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert logprob <= max(top.values())
        assert len(top) in (1, 2)
    texts = [choice["text"][a:b] for a, b in itertools.pairwise([*told["text_offset"], None])]
    hidden = [] if is_text else tokenizer.all_special_tokens
    assert texts == ["" if token in hidden else token for token in told["tokens"]]


@pytest.mark.parametrize("disaggregate", [True, False])
def test_scores_are_those_of_transformers(shm_mesh: Mesh, disaggregate: bool) -> None:
    for prompt in prompts():
        for _ in range(2):  # the second time its blocks are cached
            answer = score(shm_mesh, prompt, kvmesh={"trace": True, "disaggregate": disaggregate})
            check(answer["choices"][0], prompt)
            assert (answer["kvmesh"]["prefill_worker"] is not None) == disaggregate
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert answer["kvmesh"]["overlap_tokens"] == 0, "the router expects no hit"


@pytest.mark.parametrize("disaggregate", [True, False])
def test_an_answer_follows_its_scored_prompt(shm_mesh: Mesh, disaggregate: bool) -> None:
    prompt = prompts()[-1]
    fields = {"max_tokens": 12, "ignore_eos": True, "kvmesh": {"disaggregate": disaggregate}}
    plain = shm_mesh.complete(prompt, logprobs=1, **fields)["choices"][0]
    scored = score(shm_mesh, prompt, **fields)["choices"][0]
    _, tokenizer = model_and_tokenizer()
    assert scored["text"] == tokenizer.decode(prompt, skip_special_tokens=True) + plain["text"]
    assert scored["logprobs"]["tokens"][len(prompt) :] == plain["logprobs"]["tokens"]
    assert scored["logprobs"]["token_logprobs"][1 : len(prompt)] == pytest.approx(expected(prompt), abs=CLOSE)


def test_eight_requests_of_texts_and_tokens_at_once(shm_mesh: Mesh) -> None:
    _, tokenizer = model_and_tokenizer()
    some = prompts()
    asked: list[Any] = [some, *some, [tokenizer.decode(prompt) for prompt in some], *some[1:3]]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: score(shm_mesh, prompt), asked))
    of_each = [some, *[[prompt] for prompt in some], some, *[[prompt] for prompt in some[1:3]]]
    for n, (answer, of) in enumerate(zip(answers, of_each, strict=True)):
        for choice, prompt in zip(answer["choices"], of, strict=True):
            check(choice, prompt, is_text=n == 1 + len(some))


# --- behind a prefix that is cached ---------------------------------------------------------------------------


def check_scores_behind(mesh: Mesh, salt: str, hints: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> None:
    """Ask for scores of prompts whose beginnings are cached, and then for an answer over the same blocks.

    `hints` say where the scores are computed; `others` are more ways to ask for the same scores.
    """
    prompt = prompts()[-1]
    fields = {"max_tokens": 12, "ignore_eos": True, "logprobs": 1, "cache_salt": salt, "kvmesh": hints}
    plain = mesh.complete(prompt, **fields)["choices"][0]
    for length in (len(prompt), len(prompt) - 1, 128, 33):
        check(score(mesh, prompt[:length], cache_salt=salt, kvmesh=hints)["choices"][0], prompt[:length])
    together = [prompt, prompt[:128], prompt]
    for choice, of in zip(score(mesh, together, cache_salt=salt, kvmesh=hints)["choices"], together, strict=True):
        check(choice, of)
    for other in others:
        check(score(mesh, prompt, cache_salt=salt, kvmesh=other)["choices"][0], prompt)
    again = mesh.complete(prompt, **fields)["choices"][0]
    assert again["text"] == plain["text"]
    assert again["logprobs"]["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=CLOSE)


def test_scores_do_not_need_the_prefix_that_a_worker_has_cached(mesh: Mesh) -> None:
    at = [{"worker": f"decode-{n}", "disaggregate": whole} for n in (0, 1) for whole in (True, False)]
    check_scores_behind(mesh, "cached alone", {"worker": "decode-0", "disaggregate": False}, at)
    check_scores_behind(mesh, "cached by a prefill worker", {"worker": "decode-1", "disaggregate": True}, at)


@pytest.mark.long
@pytest.mark.parametrize("tier", [["--kv-host-mib", "16"], ["--kv-shared"]], ids=["host", "shared"])
def test_scores_do_not_need_a_prefix_of_another_worker_or_in_a_tier(tmp_path: Path, tier: list[str]) -> None:
    flags = [
        "--prefill",
        "0",
        "--decode",
        "0",
        "--aggregated",
        "2",
        "--kv-transfer",
        "shm",
        "--num-blocks",
        "48",
        *tier,
    ]
    with running_mesh(tmp_path / "run", *flags, *[f"dir:{tmp_path / 'kv'}"][: len(tier) % 2]) as mesh:
        first, other = sorted(mesh.workers())
        prompt = prompts()[-1]
        for _ in range(3):  # shared storage gets what is asked for again
            mesh.complete(prompt, max_tokens=2, kvmesh={"worker": first})
        name = "kvmesh_worker_kv_tier_saved_bytes_total"
        until(lambda: mesh.metric(name, first) > 0, what="blocks in a tier")
        for salt in "abcd":  # takes the blocks of the device
            mesh.complete(prompt, max_tokens=2, kvmesh={"worker": first}, cache_salt=salt)
        for worker in (first, other):
            hints = {"worker": worker, "trace": True}
            check(score(mesh, prompt, kvmesh=hints)["choices"][0], prompt)
            answer = mesh.complete(prompt, max_tokens=2, kvmesh=hints)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            check(score(mesh, prompt, kvmesh=hints)["choices"][0], prompt)
