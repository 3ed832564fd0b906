"""A vLLM that guesses tokens from the prompt and checks several per step answers as before, only faster."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.vllm_mesh import VllmMesh, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

GUESSES = 4
NGRAMS = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
MAX_TOKENS = 60

Pair = tuple[VllmMesh, VllmMesh]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two meshes of one worker: the first guesses, the second does not."""
    with (
        running_vllm_mesh(tmp_path_factory.mktemp("guessing")) as guessing,
        running_vllm_mesh(tmp_path_factory.mktemp("plain")) as plain,
    ):
        guessing.start_worker("w", "aggregated", "--speculative-config", json.dumps(NGRAMS))
        plain.start_worker("w", "aggregated")
        guessing.until_ready("w")
        plain.until_ready("w")
        yield guessing, plain


def prompt(first: int) -> list[int]:
    """Text that repeats itself: there is something to guess from."""
    return [*range(first, first + 23)] * 4


def counted(mesh: VllmMesh, what: str) -> float:
    """Return vLLM's count, which has vLLM's own name in the worker's metrics."""
    return mesh.metric(f"vllm:spec_decode_num_{what}_total", "w")


def choice(mesh: VllmMesh, tokens: Sequence[int], **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answer and the usage."""
    reply = mesh.complete(tokens, **{"max_tokens": MAX_TOKENS, **body})
    return reply["choices"][0], reply["usage"]


def test_several_tokens_come_of_one_step_and_they_are_those_of_a_vllm_that_does_not_guess(pair: Pair) -> None:
    guessing, plain = pair
    names = ("drafts", "draft_tokens", "accepted_tokens")
    before = [counted(guessing, name) for name in names]
    for first in (100, 500, 900, 1300):
        with_guesses = choice(guessing, prompt(first), ignore_eos=True)
        assert with_guesses == choice(plain, prompt(first), ignore_eos=True)
        assert with_guesses[1]["completion_tokens"] == MAX_TOKENS
    drafts, guessed, accepted = (counted(guessing, name) - b for name, b in zip(names, before, strict=True))
    assert guessed <= drafts * GUESSES
    assert accepted >= 10, "tokens that took no step of their own"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_a_step_that_brings_too_many_is_cut_at_the_last_token_asked_for(pair: Pair, max_tokens: int) -> None:
    answers = [choice(mesh, prompt(100), max_tokens=max_tokens, ignore_eos=True) for mesh in pair]
    assert answers[0] == answers[1]
    assert answers[0][0]["finish_reason"] == "length"
    assert answers[0][1]["completion_tokens"] == max_tokens


def test_a_stop_string_ends_the_answer_in_the_middle_of_a_step(pair: Pair) -> None:
    """The stop string is tried in several places of the answer."""
    guessing, plain = pair
    whole = choice(plain, prompt(500), ignore_eos=True)[0]["text"]
    for start in range(3, len(whole) - 6, len(whole) // 6):
        stop = whole[start : start + 6]
        answers = [choice(mesh, prompt(500), stop=[stop], ignore_eos=True) for mesh in pair]
        assert answers[0] == answers[1]
        assert answers[0][0]["finish_reason"] == "stop"
        assert answers[0][0]["text"] == whole[: whole.index(stop)]


def test_every_token_of_a_step_has_its_logprobs(pair: Pair) -> None:
    told, expected = (choice(mesh, prompt(900), logprobs=2, ignore_eos=True)[0]["logprobs"] for mesh in pair)
    assert told["tokens"] == expected["tokens"]
    assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == MAX_TOKENS
    assert told["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)


def test_a_form_holds_for_guesses_too(pair: Pair) -> None:
    schema = {"enum": ["10111213 10111213 10111213", "10111213 10111213 99"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}}
    answers = [choice(mesh, prompt(100), **form)[0] for mesh in pair]
    assert answers[0] == answers[1]
    assert json.loads(answers[0]["text"]) in schema["enum"]


@pytest.mark.parametrize(("asked", "named"), [({"logit_bias": {"100": 5}}, "logit_bias"), ({"min_p": 0.2}, "min_p")])
def test_what_vllm_cannot_do_while_it_guesses_is_refused(pair: Pair, asked: dict[str, Any], named: str) -> None:
    guessing, plain = pair
    body = {"model": "tiny", "prompt": prompt(100), "temperature": 1.0, "max_tokens": 4, **asked}
    with guessing.http as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    choice(plain, prompt(100), **asked)
