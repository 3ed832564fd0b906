"""The mesh turns texts and chats into tokens and back, over real sockets; no worker is asked."""

from pathlib import Path
from typing import Any

import pytest

from kvmesh.frontend.mesh_api.tokenize import LONG_TOKENS
from kvmesh.frontend.tokenizing.probes import HARD_TEXTS
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, CHAT, Served, able_card, ids, serving

BOS = BACKEND.token_to_id("<s>")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def tokens_of(served: Served, **fields: Any) -> list[int]:
    status, _, body = await served.post("/tokenize", {"model": "tiny"} | fields)
    assert status == 200, body
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 4096)
    tokens: list[int] = body["tokens"]
    return tokens


async def text_of(served: Served, tokens: list[int]) -> str:
    status, _, body = await served.post("/detokenize", {"model": "tiny", "tokens": tokens})
    assert status == 200, body
    assert body.keys() == {"prompt"}
    return str(body["prompt"])


# --- there and back -----------------------------------------------------------------------------------


async def test_any_text_comes_back_as_it_was(able: Served) -> None:
    for text in [*HARD_TEXTS, "the fox 🦊 über den Zaun\n"]:
        tokens = await tokens_of(able, prompt=text, add_special_tokens=False)
        assert tokens == list(ids(text))
        assert await text_of(able, tokens) == text
    assert able.generator.requests == []


async def test_a_long_text_comes_back_as_well(tmp_path: Path) -> None:
    text = "Once upon a time there was a fox. " * 1000
    card = able_card(tiny.save_model(tmp_path), context_tokens=100_000)
    async with serving(card) as served:
        _, _, body = await served.post("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True})
        assert body["count"] > LONG_TOKENS
        assert "".join(body["token_strs"]) == "<s>" + text
        _, _, back = await served.post("/detokenize", {"model": "tiny", "tokens": body["tokens"]})
        assert back["prompt"] == "<s>" + text


@pytest.mark.parametrize(("fields", "has_bos"), [({}, True), ({"add_special_tokens": True}, True),
                                                 ({"add_special_tokens": None}, True),
                                                 ({"add_special_tokens": False}, False)], ids=str)  # fmt: skip
async def test_a_prompt_gets_the_special_tokens_of_a_completion(able: Served, fields: Any, has_bos: bool) -> None:
    tokens = await tokens_of(able, prompt="the fox", **fields)
    assert tokens == [BOS] * has_bos + list(ids("the fox"))
    await able.post("/v1/completions", {"model": "tiny", "prompt": "the fox"})
    assert (unpack_tokens(able.generator.requests[0].prompt) == tokens) == has_bos


async def test_special_tokens_show_by_their_names(able: Served) -> None:
    tokens = [BOS, *ids("a"), BACKEND.token_to_id("<|im_end|>"), BACKEND.token_to_id("<think>")]
    assert await text_of(able, tokens) == "<s>a<|im_end|><think>"


async def test_an_empty_list_is_an_empty_text(able: Served) -> None:
    assert await text_of(able, []) == ""
    assert await tokens_of(able, prompt="", add_special_tokens=False) == []


async def test_tokens_can_be_shown_one_by_one(able: Served) -> None:
    body = {"model": "tiny", "prompt": "fox 東", "add_special_tokens": False}
    _, _, silent = await able.post("/tokenize", body)
    assert silent["token_strs"] is None
    _, _, shown = await able.post("/tokenize", body | {"return_token_strs": True})
    assert len(shown["token_strs"]) == shown["count"]
    assert "".join(shown["token_strs"]).startswith("fox ")
    assert shown["token_strs"][-1] in ("東", "\ufffd"), "a part of a character"


# --- chats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"effort": "much"}},
        {"chat_template_kwargs": {"enable_thinking": False}, "tools": [TOOL]},
        {"add_generation_prompt": False},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
async def test_a_chat_is_tokenized_as_it_would_be_answered(able: Served, fields: dict[str, Any]) -> None:
    tokens = await tokens_of(able, messages=CHAT["messages"], **fields)
    status, _, body = await able.post("/v1/chat/completions", CHAT | fields)
    assert (status, unpack_tokens(able.generator.requests[0].prompt)) == (200, tokens)
    assert body["usage"]["prompt_tokens"] == len(tokens)


async def test_a_chat_ends_with_the_assistants_turn_unless_told_otherwise(able: Served) -> None:
    opened = await tokens_of(able, messages=CHAT["messages"])
    assert (await text_of(able, opened)).endswith("<|im_end|>\n<|im_start|>assistant\n")
    closed = await tokens_of(able, messages=CHAT["messages"], add_generation_prompt=False)
    assert (await text_of(able, closed)).endswith("hi<|im_end|>\n")


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "bogus": 1}, 400, "bogus"),
        ("/tokenize", {"prompt": "fox " * 50_000}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "fox " * 50_000}]}, 400, "messages"),
        ("/tokenize", {"model": "gpt", "prompt": "a"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**32]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [BACKEND.get_vocab_size()]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 4097}, 400, "tokens"),
        ("/detokenize", {"model": "gpt", "tokens": []}, 404, "model"),
        ("/tokenize", {"model": "gone", "prompt": "a"}, 503, None),
        ("/detokenize", {"model": "gone", "tokens": [5]}, 503, None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_requests_are_refused_by_name(
    able: Served, able_folder: Path, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    able.models.add(able_card(able_folder, worker_id=WorkerId("gone"), model="gone"))
    able.models.remove(WorkerId("gone"))
    got, _, reply = await able.post(path, {"model": "tiny"} | body)
    assert (got, reply["error"]["param"]) == (status, param), reply


async def test_a_lone_surrogate_is_no_text(able: Served) -> None:
    status, _, reply = await able.post("/tokenize", b'{"model": "tiny", "prompt": "\\ud800"}')
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


async def test_a_model_without_a_template_can_only_tokenize_prompts(tmp_path: Path) -> None:
    async with serving(able_card(tiny.save_model(tmp_path, template=None))) as served:
        status, _, reply = await served.post("/tokenize", {"model": "tiny", "messages": CHAT["messages"]})
        assert (status, reply["error"]["param"]) == (400, "model")
        assert await tokens_of(served, prompt="a") == [BOS, *ids("a")]
