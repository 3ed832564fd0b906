"""Request bodies: what is honoured, what is refused, and by which name."""

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from kvmesh.frontend.bodies import MAX_NESTS
from kvmesh.frontend.generator import Hints
from kvmesh.frontend.openai.parameters import CHAT_DEFAULTS, parse_chat, parse_completion, parse_either
from kvmesh.frontend.openai.shapes import ChatRequest, CompletionRequest
from kvmesh.frontend.parameters import LEAST_TOP_P, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, is_deeper
from kvmesh.frontend.request import ParsedRequest, ToolChoice
from kvmesh.frontend.shapes import MAX_MESSAGES, MAX_TOOLS
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind

USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": USER}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NAMED = {"function": {"name": "weather"}}
TIME = {"type": "function", "function": {"name": "time", "description": "What time is it?", "strict": True}}


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps(CHAT | fields).encode())


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps(TEXT | fields).encode())


def test_defaults_are_openais() -> None:
    call = chat()
    assert call.sampling.temperature == 1.0
    assert (call.sampling.top_p, call.sampling.top_k, call.sampling.top_logprobs) == (1.0, 0, None)
    assert (call.max_tokens, call.has_seed, call.stream, call.hints) == (None, False, False, Hints())
    assert completion().max_tokens == 16


@pytest.mark.parametrize("nest", [b"[]", b"{}"])
def test_a_body_with_too_many_brackets_is_refused_unread(nest: bytes) -> None:
    body = b'{"model":"tiny","messages":[],"metadata":{"a":[' + b",".join([nest] * (MAX_NESTS + 1)) + b"]}}"
    with pytest.raises(InvalidRequestError, match="opening brackets and braces, more than"):
        parse_chat(body)


def test_numbers_of_messages_and_tool_calls_are_bounded() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=USER * (MAX_MESSAGES + 1))
    assert caught.value.param == "messages"
    call = {"id": "a", "function": {"name": "f"}}
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=[{"role": "assistant", "tool_calls": [call] * (MAX_TOOLS + 1)}])
    assert caught.value.param == "messages[0].tool_calls"


def test_every_parameter_arrives() -> None:
    call = chat(
        stream=True, stream_options={"include_usage": True}, max_completion_tokens=9, min_tokens=2,
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.5, stop=["a", "b"], stop_token_ids=[7], ignore_eos=True, logprobs=True,
        top_logprobs=3, cache_salt="tenant", kvmesh={"disaggregate": True, "worker": "w1", "trace": True},
    )  # fmt: skip
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 1.5)
    assert (sampling.seed, sampling.top_logprobs, call.has_seed) == (2**64 - 1, 3, True)
    assert (call.max_tokens, call.min_tokens, call.stops) == (9, 2, ("a", "b"))
    assert (call.stop_token_ids, call.ignore_eos, call.cache_salt) == ((7,), True, "tenant")
    assert (call.stream, call.include_usage, call.trace) == (True, True, True)
    assert call.hints == Hints(True, "w1")
    call = chat(kvmesh={"explain": True}, user="me")
    assert call.hints == Hints(session="me", explain=True)
    assert completion(user="me").hints == Hints(session="me")


def test_a_body_of_either_endpoint_is_known_by_its_messages() -> None:
    assert parse_either(json.dumps(CHAT).encode()).messages is not None
    assert parse_either(json.dumps(TEXT).encode()).prompts == ["hi"]
    for body, param in ((CHAT | TEXT, "prompt"), ({"model": "tiny"}, "prompt"), (CHAT | {"bogus": 1}, "bogus")):
        with pytest.raises(InvalidRequestError) as refused:
            parse_either(json.dumps(body).encode())
        assert refused.value.param == param
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_either(b'{"messages":')


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_a_refusal_of_the_assistant_is_its_content() -> None:
    call = chat(messages=[*USER, {"role": "assistant", "content": None, "refusal": "I cannot help with that."}])
    assert call.messages[1]["content"] == "I cannot help with that."


def test_content_parts_are_joined_and_tool_arguments_are_objects() -> None:
    tool_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    call = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ]
    )
    assert call.messages is not None
    assert call.messages[0]["content"] == "a\nb"
    assert call.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert call.messages[2]["tool_call_id"] == "c"


FOREIGN: dict[str, Any] = {"provider_specific_fields": {"refusal": None}, "cache_control": {"type": "ephemeral"}}


def test_unknown_fields_in_messages_and_tools_are_ignored() -> None:
    function = {"name": "f", "arguments": "{}"}
    called = {"id": "c", "type": "function", "index": 0, "function": function}
    foreign_call = called | FOREIGN | {"function": function | FOREIGN}
    weather = WEATHER | FOREIGN | {"function": WEATHER["function"] | FOREIGN}

    def body(foreign: dict[str, Any], call: Any, tool: Any) -> dict[str, Any]:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "hi"} | foreign]} | foreign,
            {"role": "assistant", "content": None, "tool_calls": [call], "annotations": {}} | foreign,
            {"role": "tool", "tool_call_id": "c", "content": "42"} | foreign,
        ]
        return {"messages": messages, "tools": [tool]}

    assert chat(**body(FOREIGN, foreign_call, weather)) == chat(**body({}, called, WEATHER))


def test_unknown_parameters_and_their_unknown_fields_are_refused() -> None:
    choice = {"type": "function", "function": {"name": "weather", "cache_control": {}}}
    for fields, param in (
        (FOREIGN, "provider_specific_fields"),
        ({"tools": [WEATHER], "tool_choice": choice}, "tool_choice.function.cache_control"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            chat(**fields)
        assert refused.value.param == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_thoughts_of_a_turn_have_two_names(name: str) -> None:
    call = chat(messages=[*USER, {"role": "assistant", "content": None, name: "Hm."}])
    assert call.messages is not None
    assert (call.messages[1]["reasoning_content"], call.messages[1]["content"]) == ("Hm.", None)


def test_nulls_and_defaults_of_what_is_not_supported_are_harmless() -> None:
    call = chat(
        n=1, logit_bias={}, tools=[], tool_choice="none", functions=[], response_format={"type": "text"},
        modalities=["text"], audio=None, prediction=None, service_tier="auto", parallel_tool_calls=True,
        user="me", metadata={"a": "b"}, store=True, seed=None, stop=None, temperature=None, stream_options=None,
        safety_identifier="x", prompt_cache_key="x", function_call="none", verbosity="medium",
    )  # fmt: skip
    assert (call.tools, call.guide, call.n) == (None, None, 1)
    completion(n=1, best_of=1, echo=False, suffix=None, user="me", logprobs=None)
    chat(**dict.fromkeys(set(ChatRequest.__struct_fields__) - {"model", "messages"}))
    completion(**dict.fromkeys(set(CompletionRequest.__struct_fields__) - {"model", "prompt"}))


@pytest.mark.parametrize(
    "hint",
    [
        {"prediction": {"type": "content", "content": "x"}},
        *[{"verbosity": value} for value in ("low", "medium", "high")],
        *[{"service_tier": value} for value in ("auto", "default", "flex", "scale", "priority")],
        {"prompt_cache_key": "user 7"},
        {"prompt_cache_retention": "24h"},
        {"safety_identifier": "user 7"},
        {"metadata": {str(n): "x" * 512 for n in range(15)} | {"k" * 64: ""}},
        {"store": False},
    ],
    ids=lambda hint: json.dumps(hint)[:40],
)
def test_hints_are_accepted_and_change_nothing(hint: dict[str, Any]) -> None:
    assert chat(**hint) == chat()


# --- several answers ----------------------------------------------------------------------------------


def test_several_answers_are_asked_for_by_n_and_best_of() -> None:
    assert (chat(n=3).n, chat(n=3).best_of) == (3, 3)
    assert [(c.n, c.best_of) for c in (completion(n=2), completion(n=2, best_of=5), completion(best_of=0))] == [
        (2, 2), (2, 5), (1, 1),
    ]  # fmt: skip
    assert completion(n=64, prompt=["a", "b"]).n == 64


def test_echo_and_suffix_are_for_texts() -> None:
    call = completion(echo=True, suffix="end")
    assert (call.echo, call.suffix) == (True, "end")


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    asked = [completion(echo=echo, logprobs=3, max_tokens=0 if echo else 1) for echo in (True, False)]
    assert [call.sampling.prompt_logprobs for call in asked] == [3, None]
    assert [call.sampling.top_logprobs for call in asked] == [3, 3]
    assert [call.max_tokens for call in asked] == [0, 1]
    assert completion(echo=True).sampling.prompt_logprobs is None


# --- tools and formats --------------------------------------------------------------------------------


def test_tools_are_shown_to_templates_in_openais_shape() -> None:
    tools = chat(tools=[WEATHER, TIME]).tools
    assert tools is not None
    assert [(tool.name, tool.parameters) for tool in tools.functions] == [("weather", CITY), ("time", {})]
    assert tools.shown[0] == WEATHER
    assert tools.shown[1]["function"] == {
        "name": "time",
        "description": "What time is it?",
        "parameters": {"type": "object", "properties": {}},
    }
    assert (tools.choice, tools.parallel) == (ToolChoice.AUTO, True)


@pytest.mark.parametrize(
    ("choice", "kind", "named"),
    [
        ("auto", ToolChoice.AUTO, ""),
        (None, ToolChoice.AUTO, ""),
        ("required", ToolChoice.REQUIRED, ""),
        ({"type": "function", "function": {"name": "time"}}, ToolChoice.NAMED, "time"),
    ],
)
def test_forced_tool_choices_hold_the_answer_to_a_schema(choice: Any, kind: ToolChoice, named: str) -> None:
    call = chat(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert call.tools is not None
    assert (call.tools.choice, call.tools.named, call.tools.parallel) == (kind, named, False)
    assert (call.guide is not None) == (kind is not ToolChoice.AUTO)


def test_a_forced_call_has_the_schema_of_its_tools() -> None:
    required = schema_of(chat(tools=[WEATHER, TIME], tool_choice="required"))
    assert (required["type"], required["minItems"], "maxItems" in required) == ("array", 1, False)
    names = [item["properties"]["name"]["enum"] for item in required["items"]["anyOf"]]
    assert names == [["weather"], ["time"]]
    alone = schema_of(chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False))
    assert alone["maxItems"] == 1
    choice = {"type": "function", "function": {"name": "weather"}}
    assert schema_of(chat(tools=[WEATHER, TIME], tool_choice=choice)) == CITY


def test_tool_choice_none_hides_the_tools() -> None:
    assert chat(tools=[WEATHER], tool_choice="none").tools is None


def test_a_response_format_is_a_guide() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for parse in (chat, completion):
        assert parse(response_format={"type": "json_object"}).guide == Guide(kind=GuideKind.JSON)
        assert schema_of(parse(response_format=schema)) == CITY


def schema_of(call: ParsedRequest) -> Any:
    assert call.guide is not None
    assert call.guide.kind is GuideKind.JSON_SCHEMA
    return json.loads(call.guide.value)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_schemas_are_bounded_in_depth_and_size() -> None:
    deepest, deeper = nested(MAX_SCHEMA_DEPTH), nested(MAX_SCHEMA_DEPTH + 1)
    named = {"type": "function", "function": {"name": "f"}}

    def bodies(schema: dict[str, Any]) -> list[dict[str, Any]]:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        return [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {"tools": tools, "tool_choice": named},
        ]

    for body in bodies(deepest):
        chat(**body)
    for schema in (deeper, {"enum": ["x" * MAX_SCHEMA_BYTES]}):
        for body in bodies(schema):
            with pytest.raises(InvalidRequestError) as refused:
                chat(**body)
            assert refused.value.param in ("tools", "response_format.json_schema.schema")
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": deeper}}], tool_choice="required")


JSON = st.recursive(st.none() | st.text(max_size=2), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(depth, items), default=0)


@given(JSON, st.integers(0, 5))
def test_depth_counts_brackets(value: Any, most: int) -> None:
    assert is_deeper(value, most) == (depth(value) > most)


# --- templates ----------------------------------------------------------------------------------------


def test_what_a_template_may_read() -> None:
    call = chat(chat_template_kwargs={"enable_thinking": True, "date": "today"}, reasoning_effort="high")
    assert call.template_options == {"enable_thinking": True, "date": "today", "reasoning_effort": "high"}
    assert chat(reasoning_effort="none").template_options == {"reasoning_effort": "none", "enable_thinking": False}
    assert chat(add_generation_prompt=False).add_generation_prompt is False


def test_a_template_may_read_documents() -> None:
    documents = [{"title": "Rain", "text": "It rains."}]
    for call in (chat(documents=documents), chat(chat_template_kwargs={"documents": documents})):
        assert call.template_options == {"documents": documents}
        rendered = ChatTemplate("{% for d in documents or [] %}{{ d.text }}{% endfor %}", {}).render(
            call.messages or (), options=call.template_options
        )
        assert rendered == "It rains."


def test_a_final_message_is_continued_without_a_new_turn() -> None:
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    call = chat(messages=messages, continue_final_message=True)
    assert (call.continue_final_message, call.add_generation_prompt) == (True, False)


# --- sampling -----------------------------------------------------------------------------------------


def test_a_top_p_of_zero_leaves_the_likeliest_token() -> None:
    assert chat(top_p=0).sampling.top_p == LEAST_TOP_P


def test_biases_and_allowed_tokens_reach_the_sampling() -> None:
    sampling = chat(logit_bias={"5": -100, "70000": 1.5}, allowed_token_ids=[3, 4]).sampling
    assert sampling.logit_bias == ((5, -100.0), (70000, 1.5))
    assert sampling.allowed_token_ids == (3, 4)


# --- refusals -----------------------------------------------------------------------------------------

BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[1].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 1}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [2**32]}, "stop_token_ids[0]"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": True}, "n"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(2**32): 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": "x" * 97}}]}, "tools[1].function.name"),
    ({"tools": [WEATHER] * (MAX_TOOLS + 1)}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": [WEATHER], "tool_choice": allowed("none", WEATHER)}, "tool_choice.allowed_tools.mode"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto", WEATHER, TIME)}, "tool_choice.allowed_tools.tools[1]"),
    ({"tool_choice": allowed("auto", TIME)}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto", WEATHER) | NAMED}, "tool_choice.allowed_tools"),
    (
        {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": "content"}, "prediction"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"metadata": {"x" * 65: "x"}}, "metadata"),
    ({"metadata": {"x": "x" * 513}}, "metadata[...]"),
    ({"metadata": {"x": 1}}, "metadata[...]"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"safety_identifier": 1}, "safety_identifier"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"documents": "It rains."}, "documents"),
    ({"chat_template_kwargs": {"documents": ["It rains."]}}, "chat_template_kwargs.documents"),
    ({"documents": [], "chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [{"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    ({"verbosity": 1}, "verbosity"),
    ({"service_tier": "first class"}, "service_tier"),
    ({"moderation": {}}, "moderation"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"kvmesh": {"disaggregate": "yes"}}, "kvmesh.disaggregate"),
    ({"kvmesh": {"nothing": 1}}, "kvmesh.nothing"),
    ({"kvmesh": {"worker": ""}}, "kvmesh.worker"),
    ({"kvmesh": {"explain": 1}}, "kvmesh.explain"),
    ({"user": 7}, "user"),
    ({"user": "x" * 513}, "user"),
    ({"bogus": 1}, "bogus"),
    ({"prompt": "hi"}, "prompt"),
    ({"best_of": 1}, "best_of"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda value: json.dumps(value)[:60])
def test_bad_chat_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.split("[")[0].split(".")[-1] in str(caught.value)


BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a", "b"], "n": 65}, "n"),
    ({"prompt": ["a"] * 7, "best_of": 20}, "best_of"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [[-1]]}, "prompt[0][0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"echo": True, "logprobs": 1, "suffix": "end"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": 1}, "suffix"),
    ({"n": 129}, "n"),
    ({"tools": []}, "tools"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"messages": USER}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=lambda value: json.dumps(value)[:60])
def test_bad_completion_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nope", b"[]", b"null", b'"x"', b"\xff", b'{"model": "\\ud800"}', b'{"model": "a\xff"}',
     b'{"a":' * 100_000, b'{"model": "m", "messages": ' + b"[" * 100_000, b"{} {}", b'{"temperature": NaN}',
     b'{"model": "m", "messages": [], "logit_bias": ' + b'{"a":' * 100_000],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_what_is_no_request_is_a_clear_error(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_chat(body)


def test_many_byte_order_marks_are_read_once() -> None:
    body = b"\xef\xbb\xbf" * 5000
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_chat(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "m",\n "messages": [}', "invalid character at line 2, column 15"),
        (b'{"model": "m",\n "messages": [', "the text ends too early, at line 2, column 15"),
        (b"", "the text ends too early, at line 1, column 1"),
        (b"\t%", "invalid character at line 1, column 2"),
        (rb'{"user": "a\ud83d"}', "half of a utf-16 surrogate pair at line 1, column 12"),
        (rb'{"user": "a\ud83d\n"', "half of a utf-16 surrogate pair at line 1, column 12"),
        (rb'{"user": "a\ud83d', "the text ends too early, at line 1, column 18"),
        (rb'{"user": "\\ud83d"', "the text ends too early, at line 1, column 19"),
        ('{"model":\n"é", x'.encode(), "object keys must be strings at line 2, column 6"),
        (b'{"seed": 7,\n\n "user": "a\xff"}', "invalid start byte of UTF-8 at line 3, column 12"),
    ],
)
def test_what_is_not_json_is_told_with_its_place(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the request body is not valid JSON: {says}$"):
        parse_chat(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[1].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
        ({"tool_choice": {"function": {"name": 5}}}, "tool_choice.function.name"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": 5}}}, "response_format.json_schema.name"),
    ],
)
def test_a_fault_inside_a_union_is_named_by_its_inner_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_messages_are_worded_as_openais() -> None:
    with pytest.raises(InvalidRequestError, match="Unrecognized request argument supplied: bogus"):
        chat(bogus=1)
    with pytest.raises(InvalidRequestError, match="Missing required parameter: 'messages'"):
        parse_chat(b'{"model": "m"}')
    with pytest.raises(InvalidRequestError, match="Invalid value for 'temperature': expected `float` <= 2"):
        chat(temperature=3)


def test_deprecated_functions_are_refused_with_what_to_send_instead() -> None:
    with pytest.raises(InvalidRequestError, match="send tools"):
        chat(functions=[{"name": "f"}])
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        chat(function_call={"name": "f"})


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 10**6: 1},
        {"messages": [{"role": "r" * 10**6, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "t" * 10**6}]}]},
        {"tool_choice": "c" * 10**6},
        {"response_format": {"type": "t" * 10**6}},
        {"tools": [WEATHER], "tool_choice": {"type": "t" * 10**6, "function": {"name": "f"}}},
        {"logit_bias": {"b" * 10**6: 1}},
    ],
    ids=lambda fields: next(iter(fields))[:12],
)
def test_an_error_does_not_repeat_megabytes(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(**fields)
    assert len(str(refused.value)) + len(refused.value.param or "") < 1500


# --- the official client ------------------------------------------------------------------------------


def parameters_of(module: ModuleType) -> set[str]:
    """Return all that the official client's request type knows, streamed or not."""
    kinds = [kind for name, kind in vars(module).items() if name.startswith("CompletionCreateParams")]
    return {field for kind in kinds for field in getattr(kind, "__annotations__", {})}


@pytest.mark.parametrize(
    ("module", "ours"),
    [(chat_create_params, ChatRequest), (completion_create_params, CompletionRequest)],
    ids=["chat", "completions"],
)
def test_every_parameter_of_the_official_client_is_known_here(module: ModuleType, ours: type[msgspec.Struct]) -> None:
    """Honoured, or refused by its name. This fails when the client learns a new one."""
    theirs = parameters_of(module)
    assert {"model", "seed", "stream"} <= theirs
    assert theirs - set(ours.__struct_fields__) == set()


NOT_HONOURED: Mapping[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "moderation": {},
}


@pytest.mark.parametrize("name", CHAT_DEFAULTS)
def test_unsupported_parameters_are_refused_by_name_with_a_hint(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat(**{name: NOT_HONOURED[name]})
    assert refused.value.param == name
    assert f"'{name}' is not supported; " in str(refused.value)


# --- annotations of schemas ---------------------------------------------------------------------------

NAMED_F = {"type": "function", "function": {"name": "f"}}
ANNOTATED = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "format": "password"},
        "list": {"type": "array", "items": {"anyOf": [{"type": "string", "format": "binary"}, {"format": "date"}]}},
    },
    "$defs": {"a": {"format": "uri-reference"}},
}


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_string_format_that_no_engine_knows_counts_only_if_strict(strict: bool | None) -> None:
    function = {"name": "f", "parameters": ANNOTATED, "strict": strict}
    schema = {"name": "f", "schema": ANNOTATED, "strict": strict}
    for more in (
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": function}], "tool_choice": NAMED_F},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ):
        guide = chat(**more).guide
        assert guide is not None
        assert [name in guide.value for name in ('"password"', '"binary"', '"uri-reference"')] == [strict is True] * 3
        assert '"date"' in guide.value
        assert '"properties":{"format":{"type":"string"' in guide.value
