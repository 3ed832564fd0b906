"""Thoughts beside the answer, over real sockets, and what a request can say about them."""

from pathlib import Path
from typing import Any

import pytest

from kvmesh.protocol.messages import Delta, FinishReason, unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, CHAT, END, TEMPLATE, TEXT, Served, able_card, ids, scored, serving, words

PATH = "/v1/chat/completions"
THOUGHT = "<think>\nFirst a.\n</think>\n\nIt is b."
WEATHER = {"type": "function", "function": {"name": "weather"}}
ALWAYS_THINKS = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")


def token_by_token(text: str) -> list[Delta]:
    return [*[Delta((token,)) for token in ids(text)], *words()]


def prompt_of(served: Served) -> str:
    return str(BACKEND.decode(unpack_tokens(served.generator.requests[-1].prompt), skip_special_tokens=False))


async def message_for(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    served.generator.script = words(text)
    status, _, body = await served.post(PATH, CHAT | fields)
    assert status == 200, body
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


async def deltas_for(served: Served, text: str, **fields: Any) -> list[dict[str, Any]]:
    served.generator.script = token_by_token(text)
    *chunks, done = await served.events(PATH, CHAT | fields)
    assert done == "[DONE]"
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def joined(deltas: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


# --- told apart ---------------------------------------------------------------------------------------


async def test_thoughts_stand_beside_the_answer(able: Served) -> None:
    message = await message_for(able, THOUGHT)
    assert message == {
        "role": "assistant", "content": "It is b.", "refusal": None, "annotations": [], "reasoning_content": "First a.",
    }  # fmt: skip


async def test_streamed_thoughts_have_deltas_of_their_own(able: Served) -> None:
    deltas = await deltas_for(able, THOUGHT)
    assert (joined(deltas, "reasoning_content"), joined(deltas, "content")) == ("First a.", "It is b.")
    thoughts = [n for n, delta in enumerate(deltas) if "reasoning_content" in delta]
    contents = [n for n, delta in enumerate(deltas) if delta.get("content")]
    assert len(thoughts) > 1, "as they come"
    assert max(thoughts) < min(contents)
    assert not any("reasoning_content" in deltas[n] for n in contents)


async def test_an_answer_without_thoughts_has_no_such_field(able: Served) -> None:
    assert "reasoning_content" not in await message_for(able, "It is b.")
    assert not any("reasoning_content" in delta for delta in await deltas_for(able, "It is b."))


async def test_thoughts_that_break_off_are_not_the_answer(able: Served) -> None:
    able.generator.script = [Delta(ids("<think>Let me"), FinishReason.LENGTH)]
    _, _, body = await able.post(PATH, CHAT)
    [choice] = body["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "Let me")
    assert choice["finish_reason"] == "length"


async def test_thoughts_count_as_tokens_of_the_answer(able: Served) -> None:
    able.generator.script = words(THOUGHT)
    _, _, body = await able.post(PATH, CHAT)
    assert body["usage"]["completion_tokens"] == len([*ids(THOUGHT), END])


async def test_after_the_thoughts_a_tool_may_be_called(able: Served) -> None:
    text = 'a<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for thought in ("<think>Hm.</think>", "<think>Is <tool_call> right?</think>"):
        message = await message_for(able, thought + text, tools=[WEATHER])
        assert message["reasoning_content"] == thought.removeprefix("<think>").removesuffix("</think>")
        assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("a", "weather")
        deltas = await deltas_for(able, thought + text, tools=[WEATHER])
        assert joined(deltas, "reasoning_content") == message["reasoning_content"]
        assert sum("tool_calls" in delta for delta in deltas) >= 2


async def test_a_stop_string_is_looked_for_in_thoughts_as_well(able: Served) -> None:
    message = await message_for(able, "<think>one STOP two</think>three", stop="STOP")
    assert (message["reasoning_content"].strip(), message["content"]) == ("one", "")


async def test_each_of_several_answers_has_its_own_thoughts(able: Served) -> None:
    able.generator.scripts = [words("<think>a</think>b"), words("c")]
    _, _, body = await able.post(PATH, CHAT | {"n": 2})
    first, second = [choice["message"] for choice in body["choices"]]
    assert (first["reasoning_content"], first["content"]) == ("a", "b")
    assert (second.get("reasoning_content"), second["content"]) == (None, "c")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_thoughts_and_answer(able: Served, stream: bool) -> None:
    tokens = ids(THOUGHT)
    able.generator.script = [Delta(tokens, FinishReason.STOP, scored(tokens))]
    if stream:
        *chunks, _ = await able.events(PATH, CHAT | {"logprobs": True})
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        _, _, body = await able.post(PATH, CHAT | {"logprobs": True})
        entries = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == THOUGHT


async def test_a_text_completion_is_not_read(able: Served) -> None:
    able.generator.script = words(THOUGHT)
    _, _, body = await able.post("/v1/completions", TEXT)
    assert body["choices"][0]["text"] == THOUGHT


# --- which models think, and when ---------------------------------------------------------------------


async def test_a_worker_can_say_that_its_model_does_not_think(able_folder: Path) -> None:
    async with serving(able_card(able_folder, reasoning_parser="none")) as served:
        message = await message_for(served, THOUGHT)
    assert (message["content"], "reasoning_content" in message) == (THOUGHT, False)


async def test_that_a_model_thinks_is_guessed_from_its_template(able_folder: Path) -> None:
    async with serving(able_card(able_folder, reasoning_parser="")) as served:
        assert (await message_for(served, THOUGHT))["reasoning_content"] == "First a."


async def test_an_answer_begins_in_thoughts_opened_by_the_prompt(tmp_path: Path) -> None:
    async with serving(able_card(tiny.save_model(tmp_path, ALWAYS_THINKS))) as served:
        message = await message_for(served, "First a.\n</think>\n\nIt is b.")
        assert prompt_of(served).endswith("<|im_start|>assistant\n<think>\n")
    assert (message["reasoning_content"], message["content"]) == ("First a.", "It is b.")


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}], ids=str
)
async def test_thoughts_can_be_switched_off(able: Served, fields: dict[str, Any]) -> None:
    message = await message_for(able, "It is b.", **fields)
    assert prompt_of(able).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (message["content"], "reasoning_content" in message) == ("It is b.", False)


async def test_what_a_template_may_read_reaches_it(able: Served) -> None:
    await message_for(able, "b", chat_template_kwargs={"effort": "much"})
    assert prompt_of(able).endswith("<|im_start|>assistant\n[much]")


async def test_a_harmony_models_channels_are_thoughts_and_answer(tmp_path: Path) -> None:
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
    tokenizer = type(BACKEND).from_str(BACKEND.to_str())
    tokenizer.add_special_tokens(marks)
    text = "<|channel|>analysis<|message|>First a.<|end|><|start|>assistant<|channel|>final<|message|>It is b."
    card = able_card(tiny.save_model(tmp_path, TEMPLATE, tokenizer), reasoning_parser="harmony", tool_parser="harmony")
    async with serving(card) as served:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        end = tokenizer.token_to_id("<|return|>")
        served.generator.script = [
            *[Delta((token,)) for token in tokens], Delta((end,), FinishReason.STOP, stop_token=end),
        ]  # fmt: skip
        _, _, body = await served.post(PATH, CHAT)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("First a.", "It is b.")


# --- the official client ------------------------------------------------------------------------------


async def test_thoughts_with_the_official_client(able: Served) -> None:
    """The client knows no such field and hands it on as it came."""
    async with able.openai() as client:
        able.generator.script = words(THOUGHT)
        whole = await client.chat.completions.create(model="tiny", messages=CHAT["messages"])
        assert whole.choices[0].message.model_extra == {"reasoning_content": "First a."}
        able.generator.script = token_by_token(THOUGHT)
        stream = await client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        assert "".join(thoughts) == "First a."
        assert "".join(delta.content or "" for delta in deltas) == "It is b."
        messages: list[Any] = [*CHAT["messages"], whole.choices[0].message, *CHAT["messages"]]
        again = await client.chat.completions.create(model="tiny", messages=messages, reasoning_effort="none")
        assert again.choices[0].message.content == "It is b."
