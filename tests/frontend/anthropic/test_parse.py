"""Bodies of the Messages API: what is honoured, what is refused, and by which name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.anthropic.errors import ThreadsUnsupportedError
from kvmesh.frontend.anthropic.parse import ParsedMessages, parse_count, parse_messages
from kvmesh.frontend.anthropic.shapes import MessagesRequest
from kvmesh.frontend.generator import Hints
from kvmesh.frontend.request import ToolChoice
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import GuideKind
from tests.frontend.anthropic.serving import ASKED, WEATHER
from tests.support.budget import examples

WORDS = ("type", "text", "role", "user", "content", "name", "input", "id", "tool_use_id", "input_schema", "source")
ANY_JSON = {"type": "json_schema", "schema": {}}


def parsed(**fields: Any) -> ParsedMessages:
    return parse_messages(json.dumps(ASKED | fields).encode())


def refused(parse: Any = parse_messages, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        parse(json.dumps(ASKED | fields).encode())
    return refused.value


def test_defaults_are_anthropics() -> None:
    call = parsed()
    assert (call.names.prompt, call.model, call.max_tokens) == ("messages", "tiny", 2000)
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (1.0, 1.0, 0)
    assert (call.stream, call.stops, call.tools, call.guide, call.hints) == (False, (), None, None, Hints())
    assert (call.template_options, call.omits_thoughts, call.has_seed) == ({}, False, False)
    assert (call.add_generation_prompt, call.continue_final_message) == (True, False)


def test_every_parameter_arrives() -> None:
    call = parsed(
        stream=True, max_tokens=9, temperature=0, top_p=0.5, top_k=7, stop_sequences=["a", "b"], system="be kind",
        metadata={"user_id": "me"}, cache_salt="tenant", kvmesh={"worker": "w1", "trace": True, "explain": True},
        output_config={"effort": "high"}, thinking={"type": "adaptive", "display": "omitted"},
    )  # fmt: skip
    assert (call.stream, call.max_tokens, call.stops, call.cache_salt) == (True, 9, ("a", "b"), "tenant")
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (0, 0.5, 7)
    assert call.hints == Hints(pin="w1", session="me", explain=True)
    assert call.trace
    assert call.messages is not None
    assert call.messages[0] == {"role": "system", "content": "be kind"}
    assert call.template_options == {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}
    assert call.omits_thoughts


def test_what_changes_nothing_is_accepted() -> None:
    assert parsed(
        service_tier="auto", speed="standard", container=None, inference_geo=None, diagnostics=None, mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control={"type": "ephemeral"}, metadata={"user_id": None},
        stop_sequences=None, tools=[], tool_choice={"type": "auto"}, output_config={}, thinking=None,
    ) == parsed()  # fmt: skip
    assert parsed(service_tier="standard_only") == parsed()
    assert parsed(
        diagnostics={"previous_message_id": "msg_1"}, fallbacks="default", fallback_credit_token=None, compaction=None,
        billing_policy={"type": "billing_policy", "bill_to": "self"}, output_config={"task_budget": {"total": 1}},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]}, thread=None,
    ) == parsed()  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"metadata": {"user": "me"}}, "metadata.user"),
        ({"bogus": 1}, "bogus"),
        ({"n": 2}, "n"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c1"}, "container"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"user_profile_id": "u"}, "user_profile_id"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]}},
            "context_management.edits[0].keep",
        ),
        ({"compaction": {"type": "compaction"}}, "compaction"),
        ({"fallbacks": [{"model": "other"}]}, "fallbacks"),
        ({"fallback_credit_token": "t"}, "fallback_credit_token"),
        ({"billing_policy": {"type": "billing_policy", "bill_to": "user_profile"}}, "billing_policy"),
        ({"thread": {"type": "create"}}, "thread"),
        (
            {"output_format": ANY_JSON, "output_config": {"format": ANY_JSON}},
            "output_format",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "a lot"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]}, "tools[1].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param.partition("[")[0].partition(".")[0] in str(error)


def test_unknown_fields_inside_messages_blocks_and_tools_are_ignored() -> None:
    extra = {"provider_specific_fields": {"refusal": None}, "citations": None, "extra": [1]}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}, "caller": {"type": "direct", "by": "me"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"} | extra]}
    turns: list[tuple[str, list[dict[str, Any]]]] = [
        ("user", [{"type": "text", "text": "hi"}]),
        ("assistant", [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "I look"}, call]),
        ("user", [result]),
    ]
    plain = [{"role": role, "content": blocks} for role, blocks in turns]
    told = [{"role": role, "content": [block | extra for block in blocks]} | extra for role, blocks in turns]
    system = [{"type": "text", "text": "be kind"}]
    assert parsed(messages=told, tools=[WEATHER | extra], system=[system[0] | extra]) == parsed(
        messages=plain, tools=[WEATHER], system=system
    )


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}], ids=str)
@pytest.mark.parametrize("messages", [ASKED["messages"], []], ids=["a turn", "nothing new"])
def test_a_thread_is_refused_before_anything_else(thread: dict[str, Any], messages: list[Any]) -> None:
    error = refused(thread=thread, messages=messages, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert isinstance(error, ThreadsUnsupportedError)
    assert error.param == "thread"


def test_the_older_name_of_the_output_format_is_read() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert parsed(output_format=form).guide == parsed(output_config={"format": form}).guide


def test_a_deferred_tool_is_known_once_a_search_has_found_it() -> None:
    deferred = [WEATHER, WEATHER | {"name": "time", "defer_loading": True}]
    search = {"type": "tool_use", "id": "s", "name": "search", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "s", "content": [{"type": "tool_reference", "tool_name": "time"}]}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [search]}, {"role": "user", "content": [found]}]
    before, after = parsed(tools=deferred).tools, parsed(tools=deferred, messages=turns).tools
    assert before is not None
    assert after is not None
    assert [tool.name for tool in before.functions] == ["weather"]
    assert [tool.name for tool in after.functions] == ["weather", "time"]
    assert parsed(tools=deferred[1:]).tools is None
    assert refused(tools=deferred, tool_choice={"type": "tool", "name": "time"}).param == "tool_choice"


def test_examples_of_a_tool_reach_the_model() -> None:
    tools = parsed(tools=[WEATHER | {"input_examples": [{"city": "Ulm"}], "allowed_callers": ["direct", "code"]}]).tools
    assert tools is not None
    assert tools.shown[0]["function"]["parameters"] == WEATHER["input_schema"] | {"examples": [{"city": "Ulm"}]}


THOUGHTFUL = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Yes"}]}


@pytest.mark.parametrize(
    ("keep", "thoughts"),
    [
        ({}, 1),
        ({"keep": "all"}, 3),
        ({"keep": {"type": "all"}}, 3),
        ({"keep": {"type": "thinking_turns", "value": 2}}, 2),
    ],
    ids=str,
)
def test_older_thoughts_are_cleared_as_the_client_wants(keep: dict[str, Any], thoughts: int) -> None:
    turns = [THOUGHTFUL, {"role": "user", "content": "and?"}] * 3
    edits = [{"type": "clear_thinking_20251015"} | keep]
    messages = parsed(messages=turns, context_management={"edits": edits}).messages
    assert messages is not None
    assert sum(1 for message in messages if message.get("reasoning_content")) == thoughts


@pytest.mark.parametrize("missing", ["model", "messages", "max_tokens"])
def test_what_is_missing_is_named(missing: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_messages(json.dumps({name: value for name, value in ASKED.items() if name != missing}).encode())
    assert error.value.param == missing


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
        {"source": "x", "type": "search_result", "title": "x", "content": []},
        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
    ],
    ids=lambda block: block["type"],
)
@pytest.mark.parametrize("parse", [parse_messages, parse_count])
def test_content_that_is_no_text_is_refused_by_name(parse: Any, block: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "look"}, block]
    messages = [*ASKED["messages"], {"role": "user", "content": content}]
    with pytest.raises(InvalidRequestError, match=block["type"]) as error:
        parse(json.dumps({"model": "tiny", "messages": messages}).encode())
    assert error.value.param == "messages[1].content[1].type"


def test_an_image_in_a_result_is_refused_by_name() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}
    error = refused(messages=[{"role": "user", "content": [result]}])
    assert error.param == "messages[0].content[0].content[0].type"
    assert "image" in str(error)


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"model": 1', b"\xff", b"[" * 100_000], ids=lambda b: b[:9])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    for parse in (parse_messages, parse_count):
        with pytest.raises(InvalidRequestError):
            parse(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(st.dictionaries(st.sampled_from(MessagesRequest.__struct_fields__), JSON, max_size=3))
def test_no_body_breaks_the_parser(fields: dict[str, Any]) -> None:
    for parse, base in ((parse_messages, ASKED), (parse_count, {"model": "tiny", "messages": ASKED["messages"]})):
        try:
            call = parse(json.dumps(base | fields).encode())
        except InvalidRequestError:
            continue
        assert call.messages


# --- tools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "kind", "parallel"),
    [
        (None, ToolChoice.AUTO, True),
        ({"type": "auto"}, ToolChoice.AUTO, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice.AUTO, False),
        ({"type": "any"}, ToolChoice.REQUIRED, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice.REQUIRED, False),
        ({"type": "tool", "name": "weather"}, ToolChoice.NAMED, True),
    ],
    ids=str,
)
def test_tools_and_their_choice(choice: Any, kind: ToolChoice, parallel: bool) -> None:
    call = parsed(tools=[WEATHER | {"type": "custom", "strict": True, "cache_control": None}], tool_choice=choice)
    assert call.tools is not None
    assert (call.tools.choice, call.tools.parallel) == (kind, parallel)
    assert call.tools.named == ("weather" if kind is ToolChoice.NAMED else "")
    assert call.tools.functions[0].parameters == WEATHER["input_schema"]
    [shown] = call.tools.shown
    described = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert shown == {"type": "function", "function": described}
    assert (call.guide is None) == (kind is ToolChoice.AUTO), "a forced call is held to its schema"


def test_with_tool_choice_none_the_model_knows_of_no_tool() -> None:
    assert parsed(tools=[WEATHER], tool_choice={"type": "none"}).tools is None
    assert parsed(tool_choice={"type": "none"}).tools is None


def test_an_answer_can_be_held_to_a_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    guide = parsed(output_config=form).guide
    assert guide is not None
    assert (guide.kind, json.loads(guide.value)) == (GuideKind.JSON_SCHEMA, {"type": "object"})
    assert parsed(output_config=form, tools=[WEATHER]).guide == guide
    error = refused(output_config=form, tools=[WEATHER], tool_choice={"type": "any"})
    assert error.param == "output_config.format"


# --- thoughts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking_budget": 1024}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
    ids=str,
)
def test_thinking_is_the_chat_templates_business(thinking: Any, options: dict[str, Any]) -> None:
    options["thinking"] = options["enable_thinking"]  # templates know it by either name
    assert parsed(thinking=thinking).template_options == options


# --- counting -----------------------------------------------------------------------------------------


def test_what_is_counted_is_what_would_be_asked() -> None:
    fields: dict[str, Any] = {
        "system": "be kind", "tools": [WEATHER], "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"}, "messages": [*ASKED["messages"], {"role": "assistant", "content": "I"}],
    }  # fmt: skip
    asked = parsed(**fields)
    counted = parse_count(json.dumps({"model": "tiny"} | fields).encode())
    for name in ("messages", "tools", "template_options", "add_generation_prompt", "continue_final_message"):
        assert getattr(counted, name) == getattr(asked, name)


def test_counting_knows_no_parameter_of_the_answer() -> None:
    for name in ("max_tokens", "temperature", "stream"):
        with pytest.raises(InvalidRequestError) as error:
            parse_count(json.dumps({"model": "tiny", "messages": ASKED["messages"], name: 1}).encode())
        assert error.value.param == name
