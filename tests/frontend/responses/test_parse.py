"""Requests of the Responses API: what is honoured, what is refused, and by which name."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from kvmesh.frontend.generator import Hints
from kvmesh.frontend.request import ToolChoice
from kvmesh.frontend.responses.parse import ParsedResponses, parse_responses
from kvmesh.frontend.responses.shapes import ResponsesRequest
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import GuideKind
from tests.frontend.responses.serving import WEATHER

ASKED: dict[str, Any] = {"model": "tiny", "input": "hi"}
TIME = {"type": "function", "name": "time"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "weather", "arguments": {"city": "Ulm"}}
CALLED = {"id": "c1", "type": "function", "function": FUNCTION}


def parsed(**fields: Any) -> ParsedResponses:
    return parse_responses(json.dumps(ASKED | fields).encode())


def said(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages that a template gets for these items."""
    messages = parsed(input=list(items), **fields).messages
    assert messages is not None
    return [dict(message) for message in messages]


def refused(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parsed(**fields)
    return caught.value


# --- parameters ---------------------------------------------------------------------------------------


def test_defaults_are_openais() -> None:
    call = parsed()
    assert (call.names.prompt, call.model) == ("input", "tiny")
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_logprobs) == (1.0, 1.0, None)
    assert (call.max_tokens, call.stream, call.tools, call.guide, call.hints) == (None, False, None, None, Hints())


def test_no_parameter_of_the_official_client_is_unknown() -> None:
    """The shape has a field for each parameter, to be honoured or refused on purpose."""
    ours = set(ResponsesRequest.__struct_fields__)
    assert set(ResponseCreateParamsBase.__annotations__) - ours == set()


def test_defaults_of_what_is_not_supported_are_harmless() -> None:
    parsed(
        background=False, conversation=None, include=[], max_tool_calls=None, metadata={}, moderation=None,
        parallel_tool_calls=True, previous_response_id=None, prompt=None, prompt_cache_key="k",
        prompt_cache_retention="24h", prompt_cache_options={"mode": "implicit"}, reasoning={}, safety_identifier="x",
        service_tier="auto", store=True, text={}, tool_choice="auto", tools=[], truncation="disabled", n=1,
        context_management=[], stop=None, seed=None, stream_options=None, max_output_tokens=None,
    )  # fmt: skip
    parsed(reasoning={"effort": None, "summary": "auto", "mode": "standard", "context": "auto"})
    parsed(text={"format": {"type": "text"}, "verbosity": "medium"})
    parsed(tools=[TIME | {"async": False, "defer_loading": False, "allowed_callers": ["direct"]}])


def test_logprobs_are_included_on_request() -> None:
    included = ["message.output_text.logprobs"]
    assert parsed(include=included).sampling.top_logprobs == 0
    assert parsed(include=included, top_logprobs=20).sampling.top_logprobs == 20
    assert parsed(top_logprobs=0).sampling.top_logprobs is None


HINTS = [
    *[{"reasoning": {name: kind}} for name in ("summary", "generate_summary") for kind in ("concise", "detailed")],
    *[{"text": {"verbosity": verbosity}} for verbosity in ("low", "high")],
    *[{"service_tier": tier} for tier in ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")],
    {"prompt_cache_key": "k"},
    {"safety_identifier": "s"},
    {"metadata": {"a": "b"}},
]


@pytest.mark.parametrize("hint", HINTS, ids=json.dumps)
def test_hints_change_nothing_but_the_settings_in_the_answer(hint: dict[str, Any]) -> None:
    with_hint = parsed(**hint)
    assert msgspec.structs.replace(with_hint, settings=parsed().settings) == parsed()
    shown = msgspec.to_builtins(with_hint.settings)
    if "generate_summary" in hint.get("reasoning", {}):
        hint = {"reasoning": {"summary": hint["reasoning"]["generate_summary"]}}
    for name, value in hint.items():
        if isinstance(value, dict):
            assert shown[name] | value == shown[name]
        elif name != "service_tier":  # which says how the request was served
            assert shown[name] == value


def test_asking_for_encrypted_thoughts_is_accepted() -> None:
    parsed(include=["reasoning.encrypted_content"])


def test_effort_is_a_name_for_the_template() -> None:
    assert parsed(reasoning={"effort": "high"}).template_options == {"reasoning_effort": "high"}
    options = parsed(reasoning={"effort": "none"}, chat_template_kwargs={"a": 1}).template_options
    assert options == {"a": 1, "reasoning_effort": "none", "enable_thinking": False}


DEEP: dict[str, Any] = json.loads('{"a":' * 200 + "1" + "}" * 200)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 1}, "input"),
    ({"instructions": 1}, "instructions"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 2**40}, "max_output_tokens"),
    ({"min_tokens": 6, "max_output_tokens": 5}, "min_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"include": ["message.output_text.logprobs", "x"]}, "include[1]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a" * 65: ""}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"truncation": "some"}, "truncation"),
    ({"service_tier": "free"}, "service_tier"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"access_programs": {"cyber": "standard"}}, "access_programs"),
    ({"image": {"context_compression": "auto"}}, "image"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"generate_summary": "long"}}, "reasoning.generate_summary"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"reasoning": {"effort": "very much"}}, "reasoning.effort"),
    ({"reasoning": {"bogus": 1}}, "reasoning.bogus"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": DEEP}}}, "text.format.schema"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"bogus": 1}, "bogus"),
    ({"kvmesh": {"nothing": 1}}, "kvmesh.nothing"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.param or "").removesuffix("[...]") == param, error
    assert param.split("[")[0].split(".")[-1] in str(error)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"input": "\\ud800"}', b'{"a":' * 100_000, b"{} {}",
     b'{"model": "m", "input": ' + b"[" * 100_000, b'{"model": "m", "input": [' + b'{"a":' * 100_000],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_what_is_no_request_is_a_clear_error(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_responses(body)


# --- tools and formats --------------------------------------------------------------------------------


def test_functions_are_shown_to_templates_in_the_chats_shape() -> None:
    tools = parsed(tools=[WEATHER, TIME], parallel_tool_calls=False).tools
    assert tools is not None
    assert [tool.name for tool in tools.functions] == ["weather", "time"]
    assert (tools.choice, tools.parallel) == (ToolChoice.AUTO, False)
    described = {name: WEATHER[name] for name in ("name", "description", "parameters")}
    assert tools.shown[0] == {"type": "function", "function": described}


def test_calls_are_forced_by_a_guide() -> None:
    free = parsed(tools=[WEATHER], tool_choice="auto")
    named = parsed(tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "weather"})
    required = parsed(tools=[WEATHER, TIME], tool_choice="required")
    assert free.guide is None
    assert named.tools is not None and (named.tools.choice, named.tools.named) == (ToolChoice.NAMED, "weather")
    assert required.tools is not None and required.tools.choice is ToolChoice.REQUIRED
    for call in (named, required):
        assert call.guide is not None and call.guide.kind is GuideKind.JSON_SCHEMA


def test_tool_choice_none_hides_all_tools() -> None:
    call = parsed(tools=[WEATHER], tool_choice="none")
    assert call.tools is None
    assert [tool.name for tool in call.settings.tools] == ["weather"], "the answer repeats them all the same"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called_and_all_are_shown(mode: str) -> None:
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time"}]}
    tools = parsed(tools=[WEATHER, TIME], tool_choice=choice).tools
    assert tools is not None
    assert [tool.name for tool in tools.functions] == ["time"]
    assert [tool["function"]["name"] for tool in tools.shown] == ["weather", "time"]
    assert tools.choice == mode


HOSTED = ["web_search", "file_search", "code_interpreter", "mcp", "computer_use_preview", "image_generation", "custom"]
BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    *[({"tools": [TIME, {"type": kind, "more": 1}]}, "tools[1].type") for kind in [*HOSTED, None, 7, {}]],
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
    ({"tools": [TIME | {"name": "two words"}]}, "tools[0].name"),
    ({"tools": [TIME | {"name": ""}]}, "tools[0].name"),
    ({"tools": [TIME | {"parameters": []}]}, "tools[0].parameters"),
    ({"tools": [TIME | {"async": True}]}, "tools[0].async"),
    ({"tools": [TIME | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TIME | {"allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({"tools": [TIME | {"output_schema": {}}]}, "tools[0].output_schema"),
    ({"tools": [1]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TIME], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [TIME], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
        "tool_choice.tools[0].description",
    ),
    (
        {
            "tools": [TIME],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TIME | {"name": "other"}]},
        },
        "tool_choice.tools[0]",
    ),
    ({"tools": [TIME], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_TOOLS, ids=lambda value: json.dumps(value)[:70])
def test_bad_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


# --- the conversation ---------------------------------------------------------------------------------


def test_a_text_is_what_the_user_says() -> None:
    assert parsed().messages == [{"role": "user", "content": "hi"}]


def test_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert said({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    answered = {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None,
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    assert said(USER, answered)[1] == {"role": "assistant", "content": "a"}


def test_instructions_come_first() -> None:
    assert said(USER, instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    assert said(USER, instructions="") == [USER]


def test_instructions_and_what_opens_the_input_are_one_system_message() -> None:
    """Most templates take one, at the beginning."""
    opening = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}]
    later = {"role": "developer", "content": "d"}
    assert said(*opening, USER, later, instructions="a") == [{"role": "system", "content": "a\n\nb\n\nc"}, USER, later]
    assert said(*opening, USER) == [*opening, USER]


def test_calls_belong_to_the_assistants_message() -> None:
    assistant = {"role": "assistant", "content": "Let me see."}
    result = {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}
    assert said(USER, assistant, CALL, OUTPUT) == [USER, assistant | {"tool_calls": [CALLED]}, result]
    assert said(USER, CALL, OUTPUT)[1] == {"role": "assistant", "content": None, "tool_calls": [CALLED]}


def test_parallel_calls_are_one_message_and_later_ones_another() -> None:
    second = CALL | {"call_id": "c2"}
    messages = said(USER, CALL, second, OUTPUT, OUTPUT | {"call_id": "c2"}, CALL | {"call_id": "c3"})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [call["id"] for call in messages[4]["tool_calls"]] == ["c3"]


def test_the_output_of_a_call_may_come_in_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert said(USER, CALL, OUTPUT | {"output": parts})[-1]["content"] == "a\nb"


def test_thoughts_belong_to_what_follows_them() -> None:
    answer = {"role": "assistant", "content": "x"}
    assert said(USER, THOUGHT, answer)[1] == answer | {"reasoning_content": "Hm."}
    called = said(USER, THOUGHT, CALL)[1]
    assert (called["reasoning_content"], called["tool_calls"]) == ("Hm.", [CALLED])
    assert said(USER, THOUGHT, answer, THOUGHT, CALL)[1]["reasoning_content"] == "Hm.\nHm."
    assert said(USER, THOUGHT, USER, answer) == [USER, USER, answer], "of an answer that was not sent along"
    assert said(USER, THOUGHT) == [USER]


def test_thoughts_that_cannot_be_read_are_dropped() -> None:
    answer = {"role": "assistant", "content": "x"}
    encrypted = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gibberish"}
    summed_up = encrypted | {"summary": [{"type": "summary_text", "text": "Short."}]}
    assert said(USER, encrypted, answer) == [USER, answer]
    assert said(USER, summed_up, answer)[1] == answer | {"reasoning_content": "Short."}
    assert said(USER, THOUGHT | {"summary": summed_up["summary"]}, answer)[1]["reasoning_content"] == "Hm."


EXTRA = {"bogus": {"deep": [1]}, "$odd": None, "provider_specific_fields": {"refusal": None}, "phase": "final"}


def test_unknown_fields_inside_items_are_ignored() -> None:
    """Clients send back what a server answered, with fields of their own."""
    parts = [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]
    plain = [USER, THOUGHT, {"role": "assistant", "content": parts}, CALL, OUTPUT | {"output": parts}]
    echoed = json.loads(json.dumps(plain))
    for item in echoed:
        for holder in [item, *[part for name in ("content", "output") for part in item.get(name, ())]]:
            if isinstance(holder, dict):
                holder |= EXTRA
    assert said(*echoed) == said(*plain)


KINDS = ["web_search_call", "file_search_call", "computer_call", "mcp_call", "custom_tool_call", "item_reference"]
BAD_ITEMS: list[tuple[list[Any], str]] = [
    *[([USER, {"type": kind, "id": "x"}], "input[1].type") for kind in [*KINDS, None, 7]],
    ([1], "input[0]"),
    ([{}], "input[0].type"),
    ([{"role": "robot", "content": "x"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": None}], "input[0].content"),
    ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[0].content[0].type"),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}], "input[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "input_text", "text": 1}]}], "input[0].content[0].text"),
    ([USER, CALL | {"arguments": {}}], "input[1].arguments"),
    ([USER, CALL | {"name": None}], "input[1].name"),
    ([USER, OUTPUT], "input[1].call_id"),
    ([USER, CALL, OUTPUT | {"call_id": "other"}], "input[2].call_id"),
    ([USER, CALL, {"type": "function_call_output", "call_id": "c1"}], "input[2].output"),
    ([USER, {"type": "reasoning", "summary": "x"}], "input[1].summary"),
    ([THOUGHT], "input"),
]


@pytest.mark.parametrize(("items", "param"), BAD_ITEMS, ids=lambda value: json.dumps(value)[-70:])
def test_bad_items_are_refused_by_name(items: list[Any], param: str) -> None:
    assert refused(input=items).param == param


def test_messages_say_what_to_do() -> None:
    assert "send the whole conversation as input" in str(refused(previous_response_id="resp_1"))
    assert "send max_output_tokens" in str(refused(max_tokens=1))
    assert "only functions are" in str(refused(tools=[{"type": "web_search"}]))
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        error = str(refused(input=[reference]))
        assert "'msg_1'" in error and "send the item itself" in error and "--responses-store" in error
