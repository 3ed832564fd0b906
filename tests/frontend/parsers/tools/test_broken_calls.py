"""Prose is what is no call, or stops being one: nothing that the model wrote is lost."""

import pytest

from kvmesh.frontend.parsers.chain import merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Tool
from kvmesh.frontend.parsers.tools import tool_format
from tests.frontend.parsers.streams import call, run

TOOLS = [Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}})]


def parsed(name: str, text: str) -> list[Event]:
    return run(tool_format(name).open(TOOLS), list(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "if a <b> and <tool_ca then"),
        ("hermes", " <tool_call> is how one calls </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>'),
        ("hermes", '<tool_call>{"name": "two words"}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "{"f" * 5000}"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "Ada", "parameters": "none"}'),
        ("llama3_json", '  {"city": "Paris"}\n'),
        ("llama3_json", 'The answer: {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] is a marker"),
        ("mistral", "[TOOL_CALLS]f[ARG]{}"),
        ("mistral", "[TOOL_CALLS][]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}"),
        ("pythonic", "[a link](https://example.org)"),
        ("pythonic", "[g()]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "So: [f(a=1)]"),
        ("qwen3_coder", "<function=two words>x</function>"),
        ("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}"),
        ("glm45", "<tool_call>f g</tool_call>"),
        ("glm45", " \n "),
    ],
)
def test_what_is_no_call_comes_out_exactly_as_written(name: str, text: str) -> None:
    assert parsed(name, text) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call> so',
            [CallBegun(0, "f"), CallArguments(0, '{"a": 1,'), Content(', "b": 2}}'), Content(" so")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\"}"}</tool_call>',
            [CallBegun(0, "f"), Content(', "arguments": "{\\"a\\"}"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "argu',
            [CallBegun(0, "f"), Content(', "argu')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": tru',
            [CallBegun(0, "f"), CallArguments(0, '{"a": tru')],
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, and so on',
            [*call(0, "f", "{}"), Content(", and so on")],
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{]<|tool_call_end|>x",
            [CallBegun(0, "f", "f:0"), CallArguments(0, "{"), Content("]x")],
        ),
        (
            "pythonic",
            "[f(a=1, s=b + c), f()]",
            [CallBegun(0, "f"), CallArguments(0, '{"a": 1, "s": '), Content("b + c), f()]")],
        ),
        (
            "pythonic",
            "[f('x')]",
            [CallBegun(0, "f"), Content("'x')]")],
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=s>\nabc\n</para",
            [CallBegun(0, "f"), CallArguments(0, '{"s": "abc'), Content("\n</para")],
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=a>\n12",
            [CallBegun(0, "f"), CallArguments(0, '{"a": '), Content("12")],
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>a</arg_key>12</tool_call>x",
            [CallBegun(0, "f"), Content("<arg_key>a</arg_key>12"), Content("x")],
        ),
    ],
)  # fmt: skip
def test_of_a_call_that_breaks_off_the_rest_is_prose(name: str, text: str, expected: list[Event]) -> None:
    assert parsed(name, text) == merge(expected)


def test_after_a_broken_call_the_next_one_counts_on() -> None:
    text = '<tool_call>{"name": "f", oh<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed("hermes", text) == [CallBegun(0, "f"), Content(", oh"), *call(1, "f", "{}")]


def test_a_call_within_what_is_no_call_is_one() -> None:
    text = 'Write <tool_call> like <tool_call>{"name": "f"}</tool_call>'
    assert parsed("hermes", text) == [Content("Write <tool_call> like "), *call(0, "f", "{}")]
