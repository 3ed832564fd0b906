"""Request bodies: what is honoured, what is refused, and by which name."""

import json
from typing import Any

import pytest

from frontend.call import Call, ToolChoice
from frontend.generator import Hints
from frontend.parameters import parse_chat, parse_completion, parse_either
from protocol.errors import InvalidRequestError
from protocol.messages import Guide, GuideKind

USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": USER}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


def chat(**fields: Any) -> Call:
    return parse_chat(json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> Call:
    return parse_completion(json.dumps(TEXT | fields).encode())


def test_defaults_are_openais() -> None:
    call = chat()
    assert call.sampling.temperature == 1.0
    assert (call.sampling.top_p, call.sampling.top_k, call.sampling.top_logprobs) == (1.0, 0, None)
    assert (call.max_tokens, call.has_seed, call.stream, call.hints) == (None, False, False, Hints())
    assert completion().max_tokens == 16


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
        (["hi", "you"], ["hi", "you"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
    ],  # noqa: E501
)
def test_prompts_come_in_many_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_tools_and_the_choice_among_them() -> None:
    free = chat(tools=[TOOL])
    assert free.tools is not None
    assert (free.tools.choice, free.tools.parallel, free.guide) == (ToolChoice.AUTO, True, None)
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        forced = chat(tools=[TOOL], tool_choice=choice)
        assert forced.guide is not None
        assert forced.guide.kind is GuideKind.JSON_SCHEMA, "the answer can be nothing but calls"


def test_formats_become_guides() -> None:
    assert chat(response_format={"type": "text"}).guide is None
    assert chat(response_format={"type": "json_object"}).guide == Guide(kind=GuideKind.JSON)
    schema = {"name": "s", "schema": {"type": "object"}}
    guide = chat(response_format={"type": "json_schema", "json_schema": schema}).guide
    assert guide == Guide(kind=GuideKind.JSON_SCHEMA, value='{"type":"object"}')


def test_several_answers_biases_and_template_options() -> None:
    call = chat(n=2, logit_bias={"5": 1, "6": -100}, reasoning_effort="high", chat_template_kwargs={"x": 1}, top_p=0)
    assert (call.n, call.sampling.logit_bias) == (2, ((5, 1.0), (6, -100.0)))
    assert call.template_options == {"reasoning_effort": "high", "x": 1}
    assert 0 < call.sampling.top_p < 1e-6, "the likeliest token alone"
    text = completion(n=2, best_of=3, echo=True, suffix="!")
    assert (text.n, text.best_of, text.echo, text.suffix) == (2, 3, True, "!")


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


def test_nulls_and_defaults_of_what_is_not_supported_are_harmless() -> None:
    chat(
        n=1, logit_bias={}, tools=[], tool_choice="none", functions=[], response_format={"type": "text"},
        modalities=["text"], audio=None, prediction=None, service_tier="auto", parallel_tool_calls=True,
        user="me", metadata={"a": "b"}, store=True, seed=None, stop=None, temperature=None, stream_options=None,
        safety_identifier="x", prompt_cache_key="x", function_call="none", verbosity="medium",
    )  # fmt: skip
    chat(tools=[TOOL], tool_choice="none")
    completion(n=1, best_of=1, echo=False, suffix=None, user="me", logprobs=None)


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
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[1].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
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
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"continue_final_message": True}, "continue_final_message"),
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
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [[-1]]}, "prompt[0][0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"n": 65, "prompt": ["a", "b"]}, "n"),
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


def test_messages_are_worded_as_openais() -> None:
    with pytest.raises(InvalidRequestError, match="Unrecognized request argument supplied: bogus"):
        chat(bogus=1)
    with pytest.raises(InvalidRequestError, match="Missing required parameter: 'messages'"):
        parse_chat(b'{"model": "m"}')
    with pytest.raises(InvalidRequestError, match="Invalid value for 'temperature': expected `float` <= 2"):
        chat(temperature=3)
