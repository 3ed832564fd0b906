"""A text completion that echoes its prompt with logprobs, over real sockets."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.protocol.messages import Delta, Feature, FinishReason, TokenLogprob, pack_tokens
from tests.frontend.serving import (
    BACKEND,
    END,
    TEXT,
    Served,
    ids,
    read_events,
    scored,
)

FRAMED = BACKEND.encode("the fox").ids  # with the token that the tokenizer puts first
SCORED = {"echo": True, "logprobs": 1, "prompt": "the fox"}


def scores(tokens: Sequence[int]) -> list[Delta]:
    """A script: logprobs of a prompt's tokens, the n-th -n, in two deltas; the end of the text is the likeliest."""
    told = [TokenLogprob(token, float(-n), ((END, -0.25),)) for n, token in enumerate(tokens)][1:]
    return [Delta(logprobs=tuple(part)) for part in (told[:2], told[2:]) if part]


def answer(text: str) -> list[Delta]:
    """A script: a text whose tokens have the logprob -0.5, and then the stop token with -3."""
    end = Delta((END,), FinishReason.STOP, scored((END,), -3.0), stop_token=END)
    return [Delta(ids(text), logprobs=scored(ids(text))), end]


def ended(text: str, logprob: float) -> list[Delta]:
    return [Delta(ids(text), FinishReason.LENGTH, scored(ids(text), logprob))]


def logprobs_of(choices: Sequence[Any]) -> dict[str, list[Any]]:
    """The logprobs of all chunks of one choice, put together."""
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {name: [each for part in found for each in part[name]] for name in found[0]}


async def test_an_echo_with_logprobs_has_those_of_the_prompt(able: Served) -> None:
    able.generator.script = [*scores(FRAMED), *answer("Once")]
    _, _, body = await able.post("/v1/completions", TEXT | SCORED)
    [choice] = body["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "the foxOnce"
    assert told["tokens"] == [
        *[BACKEND.id_to_token(t).replace("Ġ", " ") for t in [*FRAMED, *ids("Once")]],
        "<|im_end|>",
    ]
    assert told["token_logprobs"] == [None, *[-n for n in range(1, len(FRAMED))], *[-0.5] * len(ids("Once")), -3.0]
    assert told["top_logprobs"][0] is None
    assert told["top_logprobs"][1] == {told["tokens"][1]: -1.0, "<|im_end|>": -0.25}
    assert told["text_offset"][0] == told["text_offset"][1] == 0, "<s> is not shown"
    for token, at in list(zip(told["tokens"], told["text_offset"], strict=True))[1:-1]:
        assert choice["text"].startswith(token, at)
    assert told["text_offset"][-1] == len(choice["text"])
    [request] = able.generator.requests
    assert (request.sampling.prompt_logprobs, request.sampling.top_logprobs) == (1, 1)


async def test_an_echo_with_logprobs_is_streamed_as_it_comes(able: Served) -> None:
    able.generator.script = [*scores(FRAMED), *answer("Once")]
    _, _, whole = await able.post("/v1/completions", TEXT | SCORED)
    *chunks, done = await able.events("/v1/completions", TEXT | SCORED)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert logprobs_of(choices) == whole["choices"][0]["logprobs"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert len([choice for choice in choices if choice["logprobs"]]) >= 3, "a chunk for each delta"
    for choice in choices[:2]:
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]).removeprefix("<s>")


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_and_an_echo_are_the_prompt_alone(able: Served, stream: bool) -> None:
    for fields in (SCORED, {"echo": True, "prompt": "the fox"}):
        able.generator.script = [*(scores(FRAMED) if "logprobs" in fields else []), *answer("Once")]
        body = TEXT | fields | {"max_tokens": 0}
        if stream:
            *chunks, _ = await able.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
            choices, usage = [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1]["usage"]
        else:
            _, _, whole = await able.post("/v1/completions", body)
            choices, usage = whole["choices"], whole["usage"]
        assert "".join(choice["text"] for choice in choices) == "the fox"
        assert choices[-1]["finish_reason"] == "length"
        assert usage["completion_tokens"] == 0
        if "logprobs" in fields:
            assert len(logprobs_of(choices)["tokens"]) == len(FRAMED)
    assert {request.stop.max_tokens for request in able.generator.requests} == {1}


async def test_every_prompt_and_answer_is_echoed_with_its_logprobs(able: Served) -> None:
    prompts = ["the fox", list(ids("a dog")), "hi"]
    framed = [FRAMED, list(ids("a dog")), BACKEND.encode("hi").ids]
    scripts = {pack_tokens(tokens): [*scores(tokens), *answer("Once")] for tokens in framed}
    able.generator.script_of = lambda request: scripts[request.prompt]
    body = TEXT | SCORED | {"prompt": prompts, "n": 2}
    _, _, whole = await able.post("/v1/completions", body)
    assert [choice["text"] for choice in whole["choices"]] == ["the foxOnce"] * 2 + ["a dogOnce"] * 2 + ["hiOnce"] * 2
    *chunks, _ = await able.events("/v1/completions", body)
    for choice in whole["choices"]:
        streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert logprobs_of(streamed) == choice["logprobs"]
        assert "".join(part["text"] for part in streamed) == choice["text"]


async def test_the_likeliest_answer_is_chosen_whatever_the_prompts_logprobs(able: Served) -> None:
    told = scores(FRAMED)
    able.generator.scripts = [[*told, *ended("bad bad bad bad", -1.0)], [*told, *ended("good", -0.5)]]
    _, _, body = await able.post("/v1/completions", TEXT | SCORED | {"best_of": 2})
    assert [choice["text"] for choice in body["choices"]] == ["the foxgood"]


async def test_an_echo_of_one_token_has_no_logprob(able: Served) -> None:
    able.generator.script = answer("Once")
    [token] = ids("a")
    _, _, body = await able.post("/v1/completions", TEXT | SCORED | {"prompt": [token]})
    told = body["choices"][0]["logprobs"]
    assert (told["tokens"][0], told["token_logprobs"][0], told["top_logprobs"][0]) == ("a", None, None)
    assert body["choices"][0]["text"] == "aOnce"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script", [answer("Once"), [*scores(FRAMED)[:1], *answer("Once")], scores(ids("a dog")), scores(FRAMED * 2)],
    ids=["none", "some", "of others", "too many"],
)  # fmt: skip
async def test_wrong_logprobs_of_a_prompt_are_the_workers_failure(able: Served, script: Any, stream: bool) -> None:
    able.generator.script = script
    body = TEXT | SCORED | {"stream": stream}
    status, _, reply = await able.post("/v1/completions", body)
    if status == 200:
        assert "[DONE]" not in reply
        reply = read_events(reply)[-1]
    assert reply["error"]["code"] == "engine"


async def test_an_engine_without_logprobs_of_prompts_refuses_the_echo(able: Served) -> None:
    features = tuple(feature for feature in Feature if feature is not Feature.PROMPT_LOGPROBS)
    served = able.models.find("tiny")
    able.models.add(replace(next(iter(served.cards.values())), features=features))
    status, _, body = await able.post("/v1/completions", TEXT | SCORED)
    assert (status, body["error"]["param"]) == (400, "echo")
    status, _, _ = await able.post("/v1/completions", TEXT | {"echo": True})
    assert status == 200


async def test_too_many_logprobs_of_prompts_are_refused(able: Served) -> None:
    body = TEXT | {"echo": True, "logprobs": 5, "prompt": [[5] * 1000] * 12, "n": 8}
    status, _, reply = await able.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, "logprobs")
    assert not able.generator.requests


async def test_tokens_of_one_text_have_logprobs_of_their_own(able: Served) -> None:
    first, second, third = [*ids("東"), *ids("京")][:3]
    entry = TokenLogprob(third, -5.0, ((first, -0.25), (second, -1.0)))
    able.generator.script = [Delta((third,), FinishReason.LENGTH, (entry,))]
    _, _, body = await able.post("/v1/completions", TEXT | {"logprobs": 2})
    [top] = body["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"\ufffd": -0.25, f"token_id:{second}": -1.0, f"token_id:{third}": -5.0}
