"""Calls of tools by chats, over real sockets: what templates, engines and clients see of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from kvmesh.protocol.messages import Delta, Feature, FinishReason, GuideKind, unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, CHAT, Served, able_card, ids, scored, serving, words

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time", "description": "What time is it?"}}
ASKED = CHAT | {"tools": [WEATHER, TIME]}
NAMED = {"type": "function", "function": {"name": "weather"}}
ONE_BY_ONE = [False, True]


def written(name: str, arguments: str) -> str:
    """A call as this model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER_CALL, TIME_CALL = written("weather", '{"city": "Köln"}'), written("time", "{}")


def token_by_token(text: str, reason: FinishReason = FinishReason.STOP) -> list[Delta]:
    return [*[Delta((token,)) for token in ids(text)], Delta((), reason)]


def prompt_of(served: Served) -> str:
    return str(BACKEND.decode(unpack_tokens(served.generator.requests[-1].prompt), skip_special_tokens=False))


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, arguments) of each call."""
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]


async def message_for(served: Served, text: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message that a model's `text` becomes, and why it ended."""
    served.generator.script = words(text)
    status, _, body = await served.post(PATH, ASKED | fields)
    assert status == 200, body
    [choice] = body["choices"]
    return choice["message"], choice["finish_reason"]


async def deltas_for(served: Served, script: Sequence[Delta], **fields: Any) -> tuple[list[dict[str, Any]], str]:
    served.generator.script = list(script)
    *chunks, done = await served.events(PATH, ASKED | fields)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


# --- auto ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_the_model_is_shown_its_tools_and_is_free(able: Served, choice: Any) -> None:
    message, reason = await message_for(able, "No need.", tool_choice=choice)
    assert (message, reason) == (
        {"role": "assistant", "content": "No need.", "refusal": None, "annotations": []},
        "stop",
    )
    shown = TIME["function"] | {"parameters": {"type": "object", "properties": {}}}
    assert json.dumps([WEATHER, TIME | {"function": shown}]) in prompt_of(able)
    assert able.generator.requests[0].guide is None


async def test_a_call_takes_the_place_of_content(able: Served) -> None:
    message, reason = await message_for(able, WEATHER_CALL)
    assert (message["content"], calls_of(message), reason) == (None, [("weather", {"city": "Köln"})], "tool_calls")
    [call] = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")


async def test_prose_and_several_calls(able: Served) -> None:
    message, reason = await message_for(able, f"Let me see.\n{WEATHER_CALL}\n{TIME_CALL}")
    assert message["content"].strip() == "Let me see."
    assert (calls_of(message), reason) == ([("weather", {"city": "Köln"}), ("time", {})], "tool_calls")
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_answer_ends_before_a_second_one(able: Served, stream: bool) -> None:
    text = f"{WEATHER_CALL}\n{TIME_CALL}"
    if stream:
        deltas, reason = await deltas_for(able, token_by_token(text), parallel_tool_calls=False)
        assert {call["index"] for delta in deltas for call in delta.get("tool_calls", [])} == {0}
    else:
        message, reason = await message_for(able, text, parallel_tool_calls=False)
        assert calls_of(message) == [("weather", {"city": "Köln"})]
    assert reason == "tool_calls"
    assert able.admission.inflight == 0


async def test_arguments_are_streamed_as_they_come(able: Served) -> None:
    deltas, reason = await deltas_for(able, token_by_token(f"See:{WEATHER_CALL}{TIME_CALL}"))
    assert reason == "tool_calls"
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas) == "See:"
    begun = [call for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "time", "arguments": ""}),
    ]
    fragments = [call for delta in deltas for call in delta.get("tool_calls", []) if "id" not in call]
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in fragments)
    arguments = [[c["function"]["arguments"] for c in fragments if c["index"] == index] for index in (0, 1)]
    assert len(arguments[0]) > 3, "not all at once"
    assert ["".join(each) for each in arguments] == ['{"city": "Köln"}', "{}"]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=str)
async def test_a_stream_says_what_a_whole_answer_says(able: Served, choice: Any) -> None:
    text = {"auto": f"Hm. {WEATHER_CALL}", "required": '[{"name": "weather", "parameters": {"city": "Köln"}}]'}
    answer = text.get(str(choice), '{"city": "Köln"}')
    message, reason = await message_for(able, answer, tool_choice=choice)
    deltas, streamed_reason = await deltas_for(able, token_by_token(answer), tool_choice=choice)
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert [function["name"] for function in functions if "name" in function] == ["weather"]
    [(_, arguments)] = calls_of(message)
    assert json.loads("".join(function["arguments"] for function in functions)) == arguments
    assert streamed_reason == reason == "tool_calls"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnothing of the kind\n</tool_call>",
        '<tool_call>{"city": "Köln"}</tool_call>',
        "a < b and <tool_ is no call",
        '{"name": "weather", "arguments": {}}',
    ],
)
@pytest.mark.parametrize("one_by_one", ONE_BY_ONE)
async def test_what_is_no_call_is_content_as_it_was_written(able: Served, text: str, one_by_one: bool) -> None:
    deltas, reason = await deltas_for(able, token_by_token(text) if one_by_one else words(text))
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert (reason, any("tool_calls" in delta for delta in deltas)) == ("stop", False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_by_the_limit_is_not_finished(able: Served, stream: bool) -> None:
    able.generator.script = [Delta(ids('<tool_call>{"name": "weather", "arguments": {"ci'), FinishReason.LENGTH)]
    if stream:
        *chunks, _ = await able.events(PATH, ASKED)
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        _, _, body = await able.post(PATH, ASKED)
        [call] = body["choices"][0]["message"]["tool_calls"]
        arguments, reason = call["function"]["arguments"], body["choices"][0]["finish_reason"]
    assert (arguments, reason) == ("{}", "length"), "arguments are closed where they can be"


async def test_a_cut_off_call_is_accepted_as_history(able: Served) -> None:
    able.generator.script = [Delta(ids('<tool_call>{"name": "weather", "arguments": {"ci'), FinishReason.LENGTH)]
    _, _, body = await able.post(PATH, ASKED)
    cut = body["choices"][0]["message"]
    assert cut["tool_calls"][0]["function"]["arguments"] == "{}"
    cut["tool_calls"][0]["function"]["arguments"] = '{"ci'  # as other servers leave it
    result = {"role": "tool", "tool_call_id": cut["tool_calls"][0]["id"], "content": "not run"}
    status, _, body = await able.post(PATH, ASKED | {"messages": [*CHAT["messages"], cut, result]})
    assert status == 200, body
    assert '{\\"ci' in prompt_of(able)


async def test_each_of_several_answers_has_its_own_calls(able: Served) -> None:
    able.generator.scripts = [words(WEATHER_CALL), words("No."), words(TIME_CALL)]
    _, _, body = await able.post(PATH, ASKED | {"n": 3})
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "stop", "tool_calls"]
    messages = [choice["message"] for choice in body["choices"]]
    assert [calls_of(messages[0]), "tool_calls" in messages[1], calls_of(messages[2])] == [
        [("weather", {"city": "Köln"})], False, [("time", {})],
    ]  # fmt: skip


async def test_logprobs_count_every_token_of_a_call(able: Served) -> None:
    tokens = ids(WEATHER_CALL)
    able.generator.script = [Delta(tokens, FinishReason.STOP, scored(tokens))]
    for stream in (False, True):
        body = ASKED | {"logprobs": True, "stream": stream}
        if stream:
            *chunks, _ = await able.events(PATH, body)
            found = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        else:
            _, _, whole = await able.post(PATH, body)
            found = [whole["choices"][0]["logprobs"]]
        shown = [entry["token"] for logprobs in found for entry in logprobs["content"]]
        assert len(shown) == len(tokens)


# --- required, named, none ----------------------------------------------------------------------------


async def test_required_holds_the_answer_to_calls(able: Served) -> None:
    text = '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Rom"}}]'
    message, reason = await message_for(able, text, tool_choice="required")
    assert (calls_of(message), message["content"], reason) == (
        [("time", {}), ("weather", {"city": "Rom"})], None, "tool_calls",
    )  # fmt: skip
    guide = able.generator.requests[0].guide
    assert guide is not None
    assert (guide.kind, json.loads(guide.value)["type"]) == (GuideKind.JSON_SCHEMA, "array")
    assert "weather" in prompt_of(able)


async def test_a_named_function_holds_the_answer_to_its_arguments(able: Served) -> None:
    message, reason = await message_for(able, '{"city": "Rom"}', tool_choice=NAMED)
    assert (calls_of(message), reason) == ([("weather", {"city": "Rom"})], "tool_calls")
    guide = able.generator.requests[0].guide
    assert guide is not None
    assert json.loads(guide.value) == CITY


def only(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_leave_the_prompt_as_it_is(able: Served, mode: str) -> None:
    await able.post(PATH, ASKED)
    whole = prompt_of(able)
    status, _, _ = await able.post(PATH, ASKED | {"tool_choice": only(mode, "time")})
    assert (status, prompt_of(able)) == (200, whole)


async def test_required_allowed_tools_hold_the_answer_to_their_calls(able: Served) -> None:
    message, _ = await message_for(able, '[{"name": "time", "parameters": {}}]', tool_choice=only("required", "time"))
    assert calls_of(message) == [("time", {})]
    guide = able.generator.requests[0].guide
    assert guide is not None
    assert [item["properties"]["name"]["enum"] for item in json.loads(guide.value)["items"]["anyOf"]] == [["time"]]


async def test_a_call_of_a_tool_that_is_not_allowed_is_content(able: Served) -> None:
    message, reason = await message_for(able, f"{WEATHER_CALL}{TIME_CALL}", tool_choice=only("auto", "time"))
    assert (calls_of(message), reason) == ([("time", {})], "tool_calls")
    assert json.loads(message["content"]) == {"name": "weather", "arguments": {"city": "Köln"}}
    deltas, reason = await deltas_for(able, token_by_token(WEATHER_CALL), tool_choice=only("auto", "time"))
    assert (any("tool_calls" in delta for delta in deltas), reason) == (False, "stop")
    text = "".join(delta.get("content", "") for delta in deltas)
    assert json.loads(text) == {"name": "weather", "arguments": {"city": "Köln"}}


async def test_a_harmony_models_calls_are_limited_as_well(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}<|start|>assistant<|channel|>commentary to=functions.f<|message|>"
    folder = tiny.save_model(tmp_path, template)
    text = "<|channel|>commentary to=functions.weather<|message|>{}<|call|>"
    async with serving(able_card(folder, tool_parser="harmony")) as served:
        message, reason = await message_for(served, text, tool_choice=only("auto", "time"))
        assert (json.loads(message["content"]), reason) == ({"name": "weather", "arguments": {}}, "stop")
        message, reason = await message_for(served, text, tool_choice=only("auto", "weather"))
        assert (calls_of(message), reason) == ([("weather", {})], "tool_calls")


async def test_none_hides_the_tools_and_no_text_is_a_call(able: Served) -> None:
    message, reason = await message_for(able, WEATHER_CALL, tool_choice="none")
    assert (message["content"], "tool_calls" in message, reason) == (WEATHER_CALL, False, "stop")
    assert "weather" not in prompt_of(able)


async def test_without_tools_no_text_is_a_call(able: Served) -> None:
    message, _ = await message_for(able, WEATHER_CALL, tools=None)
    assert (message["content"], "tool_calls" in message) == (WEATHER_CALL, False)


# --- what a model or an engine cannot do --------------------------------------------------------------

UNGUIDED = tuple(feature for feature in Feature if feature is not Feature.GUIDED)


@pytest.mark.parametrize(("choice", "status"), [("required", 400), (NAMED, 400), ("auto", 200), ("none", 200)])
async def test_a_forced_call_needs_an_engine_with_guides(able_folder: Path, choice: Any, status: int) -> None:
    async with serving(able_card(able_folder, features=UNGUIDED)) as served:
        got, _, body = await served.post(PATH, ASKED | {"tool_choice": choice})
    assert got == status
    if status == 400:
        assert body["error"]["param"] == "tool_choice"
        assert "'tool_choice' is not supported by the engine of 'tiny'" in body["error"]["message"]


@pytest.mark.parametrize(("choice", "status"), [("auto", 400), ("required", 200), (NAMED, 200), ("none", 200)])
async def test_a_model_without_a_parser_can_only_be_forced(able_folder: Path, choice: Any, status: int) -> None:
    async with serving(able_card(able_folder, tool_parser="none")) as served:
        got, _, body = await served.post(PATH, ASKED | {"tool_choice": choice})
    assert got == status
    if status == 400:
        assert body["error"]["param"] == "tools"
        assert "--tool-parser" in body["error"]["message"]


async def test_how_calls_are_written_is_guessed_from_the_template(able_folder: Path) -> None:
    async with serving(able_card(able_folder, tool_parser="")) as served:
        message, _ = await message_for(served, WEATHER_CALL)
    assert calls_of(message) == [("weather", {"city": "Köln"})]


async def test_a_templates_refusal_of_tools_reaches_the_client(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path, "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}hi")
    response = {"model": "tiny", "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    async with serving(able_card(folder)) as served:
        for path, asked, param in ((PATH, ASKED, "messages"), ("/v1/responses", response, "input")):
            status, _, body = await served.post(path, asked)
            assert (status, body["error"]["param"]) == (400, param)
            assert "no tools here" in body["error"]["message"]


# --- the official client ------------------------------------------------------------------------------


class Weather(pydantic.BaseModel):
    """Ask for the weather."""

    city: str


class Time(pydantic.BaseModel):
    """Ask for the time."""


async def test_a_round_of_tools_with_the_official_client(able: Served) -> None:
    able.generator.script = words(f"Let me see.{WEATHER_CALL}")
    messages: list[Any] = list(CHAT["messages"])
    async with able.openai() as client:
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        [call] = answer.choices[0].message.tool_calls or []
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        able.generator.script = words("It is sunny.")
        final = await client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    assert final.choices[0].message.content == "It is sunny."
    assert 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in prompt_of(able)
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt_of(able)


async def test_the_official_clients_stream_puts_calls_together(able: Served) -> None:
    able.generator.script = token_by_token(f"See:{WEATHER_CALL}{TIME_CALL}")
    tools = [openai.pydantic_function_tool(kind, name=name) for kind, name in ((Weather, "weather"), (Time, "time"))]
    async with (
        able.openai() as client,
        client.chat.completions.stream(model="tiny", messages=CHAT["messages"], tools=tools) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    message = final.choices[0].message
    assert message.content == "See:"
    assert [call.function.name for call in message.tool_calls or []] == ["weather", "time"]
    assert (message.tool_calls or [])[0].function.parsed_arguments == Weather(city="Köln")


async def test_the_official_client_parses_a_forced_call(able: Served) -> None:
    able.generator.script = words('[{"name": "weather", "parameters": {"city": "Rom"}}]')
    async with able.openai() as client:
        answer = await client.chat.completions.parse(
            model="tiny", messages=CHAT["messages"], tool_choice="required",
            tools=[openai.pydantic_function_tool(Weather, name="weather")],
        )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Rom")
