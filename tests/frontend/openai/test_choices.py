"""Several answers to one request, and text around them, over real sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kvmesh.protocol.errors import EngineError, OverloadedError
from kvmesh.protocol.messages import Delta, FinishReason, unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, CHAT, END, TEXT, Served, able_card, ids, scored, serving, words
from tests.support.patience import PATIENCE_S

PATHS = ("/v1/chat/completions", "/v1/completions")
BODIES: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
SEEDED = {"seed": 7}


def asked(served: Served) -> list[str]:
    """The prompts that workers got, in the order in which they were asked."""
    return [BACKEND.decode(unpack_tokens(r.prompt), skip_special_tokens=False) for r in served.generator.requests]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def texts_by_index(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return texts


# --- n ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_n_choices_are_ordered_and_count_the_prompt_once(able: Served, path: str) -> None:
    able.generator.scripts = [words("one"), words("two", " two"), [Delta(ids("three"), FinishReason.LENGTH)]]
    _, _, body = await able.post(path, BODIES[path] | {"n": 3})
    assert [(choice["index"], text_of(choice), choice["finish_reason"]) for choice in body["choices"]] == [
        (0, "one", "stop"), (1, "two two", "stop"), (2, "three", "length"),
    ]  # fmt: skip
    [prompt] = set(asked(able))
    told = [*ids("one"), END, *ids("two"), *ids(" two"), END, *ids("three")]
    counts = (len(BACKEND.encode(prompt, add_special_tokens=False).ids), len(told))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == counts
    assert body["usage"]["total_tokens"] == sum(counts)


async def test_every_answer_has_its_own_request_id_and_seed(able: Served) -> None:
    for _ in range(2):
        _, _, body = await able.post("/v1/chat/completions", CHAT | SEEDED | {"n": 3})
        names = [request.request_id for request in able.generator.requests[-3:]]
        assert names == [body["id"], f"{body['id']}-1", f"{body['id']}-2"]
    seeds = [request.sampling.seed for request in able.generator.requests]
    assert seeds[:3] == seeds[3:], "what is drawn follows from the seed that was sent"
    assert seeds[0] == SEEDED["seed"]
    assert len(set(seeds[:3])) == 3


@pytest.mark.parametrize("path", PATHS)
async def test_streamed_answers_are_told_apart_by_their_index(able: Served, path: str) -> None:
    able.generator.scripts = [words("one", " 1"), words("two"), [Delta(ids("three"), FinishReason.LENGTH)]]
    body = BODIES[path] | {"n": 3, "stream_options": {"include_usage": True}}
    *chunks, usage, done = await able.events(path, body)
    assert done == "[DONE]"
    assert texts_by_index(chunks) == {0: "one 1", 1: "two", 2: "three"}
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted((end["index"], end["finish_reason"]) for end in ends) == [(0, "stop"), (1, "stop"), (2, "length")]
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    told = [*ids("one"), *ids(" 1"), END, *ids("two"), END, *ids("three")]
    assert usage["usage"]["completion_tokens"] == len(told)


async def test_each_streamed_chat_answer_begins_with_its_role(able: Served) -> None:
    *chunks, _ = await able.events("/v1/chat/completions", CHAT | {"n": 2})
    first: dict[int, Any] = {}
    for chunk in chunks:
        first.setdefault(chunk["choices"][0]["index"], chunk["choices"][0]["delta"])
    role = {"role": "assistant", "content": "", "refusal": None}
    assert first == {0: role, 1: role}


@pytest.mark.parametrize("path", PATHS)
async def test_usage_in_every_chunk_counts_up_to_the_last(able: Served, path: str) -> None:
    """Load generators ask for it in this way."""
    able.generator.scripts = [[*words("one", " 2", " 3", " 4")]]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = await able.events(path, BODIES[path] | {"stream_options": options})
    told = [chunk["usage"] for chunk in chunks]
    counts = [each["completion_tokens"] for each in told]
    assert counts == sorted(counts)
    assert len(set(counts)) >= 4
    assert told[-1] == usage["usage"]
    assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in told)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": False}, {"include_obfuscation": False}, {"continuous_usage_stats": True}],
)
async def test_without_include_usage_a_stream_has_none(able: Served, path: str, options: Any) -> None:
    *chunks, done = await able.events(path, BODIES[path] | {"n": 2, "stream_options": options})
    assert done == "[DONE]"
    assert not any("usage" in chunk or not chunk["choices"] for chunk in chunks)


async def test_the_others_wait_for_the_first_ones_first_token(able: Served) -> None:
    """The prompt is cached by then, so that it is computed once."""
    gate = asyncio.Event()
    able.generator.scripts = [[gate, *words("one")], words("two"), words("three")]
    running = asyncio.create_task(able.post("/v1/chat/completions", CHAT | {"n": 3}))
    async with asyncio.timeout(PATIENCE_S):
        await able.generator.started.wait()
        assert (await able.get("/live"))[0] == 200  # a round trip, in which others could have begun
        assert len(able.generator.requests) == 1
        gate.set()
        status, _, body = await running
    assert (status, [text_of(choice) for choice in body["choices"]]) == (200, ["one", "two", "three"])


async def test_a_stop_string_ends_one_answer_and_not_its_siblings(able: Served) -> None:
    able.generator.scripts = [[Delta(ids("a STOP")), asyncio.Event()], words("b", " and c")]
    _, _, body = await able.post("/v1/completions", TEXT | {"n": 2, "stop": "STOP"})
    assert [text_of(choice) for choice in body["choices"]] == ["a ", "b and c"]
    assert able.admission.inflight == 0


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_answer_failing_at_once_starts_no_other(able: Served, stream: bool) -> None:
    able.generator.scripts = [[OverloadedError("full")]]
    status, headers, body = await able.post("/v1/chat/completions", CHAT | {"n": 3, "stream": stream})
    assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "overloaded", "1")
    assert len(able.generator.requests) == 1


async def test_one_failed_answer_cancels_the_others(able: Served) -> None:
    able.generator.scripts = [words("one"), [Delta(ids("two")), EngineError("broken")], [Delta(ids("three")),
                              asyncio.Event()]]  # fmt: skip
    status, _, body = await able.post("/v1/chat/completions", CHAT | {"n": 3})
    assert (status, body["error"]["code"]) == (502, "engine")
    assert able.generator.cancelled == [able.generator.requests[2].request_id]
    assert able.admission.inflight == 0


async def test_one_streamed_answer_that_fails_is_the_last_event(able: Served) -> None:
    able.generator.scripts = [words("one"), [Delta(ids("two")), EngineError("broken")], [asyncio.Event()]]
    *_, last = await able.events("/v1/chat/completions", CHAT | {"n": 3})
    assert last["error"]["code"] == "engine"
    assert able.generator.cancelled == [able.generator.requests[2].request_id]


async def test_a_deadline_cancels_all_answers(able: Served) -> None:
    able.generator.script = [Delta(ids("one")), asyncio.Event()]
    status, _, body = await able.post("/v1/chat/completions", CHAT | {"n": 3}, x_request_timeout_s="0.1")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert sorted(able.generator.cancelled) == sorted(request.request_id for request in able.generator.requests)
    assert able.generator.closed_early == len(able.generator.requests) == 3


# --- several prompts ----------------------------------------------------------------------------------


async def test_several_prompts_have_their_answers_one_after_the_other(able: Served) -> None:
    able.generator.scripts = [words(f"answer {number}") for number in range(4)]
    prompts = ["hi", "the fox"]
    _, _, body = await able.post("/v1/completions", TEXT | {"prompt": prompts, "n": 2})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    numbers = [int(name.removeprefix(body["id"]).removeprefix("-") or 0) for name in names_of(able)]
    assert sorted(numbers) == [0, 1, 2, 3]
    by_number = dict(zip(numbers, asked(able), strict=True))
    assert [by_number[number] for number in range(4)] == ["<s>hi", "<s>hi", "<s>the fox", "<s>the fox"]
    said = {number: f"answer {order}" for order, number in enumerate(numbers)}
    assert [text_of(choice) for choice in body["choices"]] == [said[number] for number in range(4)]
    assert body["usage"]["prompt_tokens"] == sum(len(BACKEND.encode(prompt).ids) for prompt in prompts)


def names_of(served: Served) -> list[str]:
    return [request.request_id for request in served.generator.requests]


async def test_prompts_do_not_wait_for_each_other(able: Served) -> None:
    gate = asyncio.Event()
    able.generator.scripts = [[gate, *words("one")], words("two")]
    running = asyncio.create_task(able.post("/v1/completions", TEXT | {"prompt": ["hi", [5, 6]]}))
    async with asyncio.timeout(PATIENCE_S):
        while able.generator.deltas_taken < 2:  # all of the second one's
            await asyncio.sleep(0)
        gate.set()
        _, _, body = await running
    assert [text_of(choice) for choice in body["choices"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("prompts", "param"), [(["hi", ""], None), (["hi", [10**6]], "prompt"), (["hi", [5] * 4096], "prompt")]
)
async def test_one_prompt_that_cannot_be_taken_is_all(able: Served, prompts: list[Any], param: str | None) -> None:
    status, _, body = await able.post("/v1/completions", TEXT | {"prompt": prompts})
    if param is None:  # an empty text is a prompt where the tokenizer begins texts with a token
        assert (status, asked(able)) == (200, ["<s>hi", "<s>"])
    else:
        assert (status, body["error"]["param"]) == (400, param)
        assert able.generator.requests == []


# --- best_of ------------------------------------------------------------------------------------------


def likely(text: str, logprob: float) -> list[Delta]:
    return [Delta(ids(text), FinishReason.LENGTH, scored(ids(text), logprob))]


async def test_best_of_returns_the_n_likeliest_answers_in_order(able: Served) -> None:
    able.generator.scripts = [likely("one", -2.0), likely("two", -0.1), likely("a longer three", -0.5)]
    _, _, body = await able.post("/v1/completions", TEXT | {"best_of": 3, "n": 2})
    chosen = [(choice["index"], choice["text"], choice["logprobs"]) for choice in body["choices"]]
    assert chosen == [(0, "two", None), (1, "a longer three", None)], "by the mean of a token, not by the sum"
    assert [request.sampling.top_logprobs for request in able.generator.requests] == [0, 0, 0]
    assert body["usage"]["completion_tokens"] == len(ids("one")) + len(ids("two")) + len(ids("a longer three"))


async def test_best_of_shows_logprobs_only_on_request(able: Served) -> None:
    able.generator.scripts = [likely("one", -2.0), likely("two", -0.1)]
    _, _, body = await able.post("/v1/completions", TEXT | {"best_of": 2, "logprobs": 1})
    [choice] = body["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("two", [-0.1] * len(ids("two")))


async def test_each_prompt_has_its_own_likeliest(able: Served) -> None:
    able.generator.script = likely("same", -1.0)
    _, _, body = await able.post("/v1/completions", TEXT | {"prompt": ["hi", "the fox"], "best_of": 3})
    assert [choice["text"] for choice in body["choices"]] == ["same", "same"]
    assert sorted(asked(able)) == ["<s>hi"] * 3 + ["<s>the fox"] * 3


# --- echo ---------------------------------------------------------------------------------------------


async def test_an_echo_begins_the_answer_with_the_prompt(able: Served) -> None:
    body = TEXT | {"echo": True, "prompt": ["the fox", list(ids("a dog"))]}
    _, _, whole = await able.post("/v1/completions", body)
    texts = ["the foxOnce upon a time", "a dogOnce upon a time"]
    assert [text_of(choice) for choice in whole["choices"]] == texts
    *chunks, _ = await able.events("/v1/completions", body)
    assert texts_by_index(chunks) == dict(enumerate(texts))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:2]] == ["the fox", "a dog"]


async def test_an_echo_neither_stops_the_answer_nor_counts(able: Served) -> None:
    _, _, body = await able.post("/v1/completions", TEXT | {"echo": True, "prompt": "STOP here", "stop": "STOP"})
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("STOP hereOnce upon a time", "stop")
    assert body["usage"]["completion_tokens"] == len([*ids("Once"), *ids(" upon"), *ids(" a time"), END])


async def test_an_echo_of_every_answer(able: Served) -> None:
    able.generator.scripts = [words("one"), words("two")]
    _, _, body = await able.post("/v1/completions", TEXT | {"echo": True, "n": 2})
    assert [text_of(choice) for choice in body["choices"]] == ["hione", "hitwo"]


# --- suffix -------------------------------------------------------------------------------------------

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STAR_CODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def infilling(tokens: tuple[str, ...], *, special: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tiny.byte_level().to_str())
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return tokenizer


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "added tokens"])
@pytest.mark.parametrize("marks", [QWEN, STAR_CODER, DEEPSEEK], ids=["qwen", "starcoder", "deepseek"])
async def test_a_gap_is_filled_between_prompt_and_suffix(tmp_path: Path, marks: tuple[str, ...], special: bool) -> None:
    tokenizer = infilling(marks, special=special)
    async with serving(able_card(tiny.save_model(tmp_path, tokenizer=tokenizer))) as served:
        body = TEXT | {"prompt": "def f(", "suffix": "):\n    pass", "echo": True}
        status, _, reply = await served.post("/v1/completions", body)
        assert (status, text_of(reply["choices"][0])) == (200, "def f(Once upon a time")
        prompt = unpack_tokens(served.generator.requests[0].prompt)
    before, after, here = (tokenizer.token_to_id(mark) for mark in marks)
    parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in (body["prompt"], body["suffix"])]
    assert prompt == [tokenizer.token_to_id("<s>"), before, *parts[0], after, *parts[1], here]


@pytest.mark.parametrize(("fields", "says"), [({}, "no tokens for filling a gap"), ({"prompt": [5]}, "prompt of text")])
async def test_where_no_gap_can_be_filled_a_suffix_is_refused(able: Served, fields: Any, says: str) -> None:
    status, _, body = await able.post("/v1/completions", TEXT | {"suffix": "end"} | fields)
    assert (status, body["error"]["param"]) == (400, "suffix")
    assert says in body["error"]["message"]
    assert able.generator.requests == []


# --- the official client ------------------------------------------------------------------------------


async def test_several_answers_with_the_official_client(able: Served) -> None:
    async with able.openai() as client:
        able.generator.scripts = [words("one"), words("two")]
        whole = await client.chat.completions.create(model="tiny", messages=CHAT["messages"], n=2)
        assert [choice.message.content for choice in whole.choices] == ["one", "two"]
        able.generator.scripts = [words("one"), words("two")]
        async with client.chat.completions.stream(model="tiny", messages=CHAT["messages"], n=2) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["one", "two"]
        able.generator.scripts = [likely("one", -2.0), likely("two", -0.1), likely("three", -1.0)]
        best = await client.completions.create(model="tiny", prompt="hi", best_of=3, n=2, echo=True)
        assert [choice.text for choice in best.choices] == ["hitwo", "hithree"]
        pieces = await client.completions.create(model="tiny", prompt=["a", "b"], stream=True, echo=True)
        texts = ["", ""]
        async for piece in pieces:
            texts[piece.choices[0].index] += piece.choices[0].text
        assert texts == ["aOnce upon a time", "bOnce upon a time"]


# --- our extension ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_only_the_first_answer_is_traced_on_request(able: Served, path: str) -> None:
    able.generator.script.insert(0, lambda trace: setattr(trace, "decode_worker", "d1"))
    _, _, body = await able.post(path, BODIES[path] | {"n": 2, "kvmesh": {"trace": True}})
    assert body["kvmesh"]["decode_worker"] == "d1"
    for silent in ({}, {"kvmesh": None}, {"kvmesh": {}}, {"kvmesh": {"trace": False, "explain": False}}):
        _, headers, body = await able.post(path, BODIES[path] | {"n": 2} | silent)
        assert "kvmesh" not in body
        assert not [name for name in headers if name.startswith("x-kvmesh")]
        *chunks, _ = await able.events(path, BODIES[path] | {"n": 2} | silent)
        assert not any("kvmesh" in chunk for chunk in chunks)
