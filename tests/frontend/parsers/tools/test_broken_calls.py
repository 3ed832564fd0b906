"""Prose is what is no call, or stops being one: nothing that the model wrote is lost."""

import pytest

from kvmesh.frontend.parsers.chain import ChainedParser, merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning, Tool
from kvmesh.frontend.parsers.reasoning import reasoning_format
from kvmesh.frontend.parsers.tools import tool_format
from tests.frontend.parsers.streams import call, run

TOOLS = [Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}})]

BOTH = '{"s": "x", "a": 1}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


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
        ("pythonic", "[a link](https://example.org)"),
        ("pythonic", "[g()]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "So: [f(a=1)]"),
        ("qwen3_coder", "<function=two words>x</function>"),
        ("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("glm45", "<tool_call>f g</tool_call>"),
        ("glm45", " \n "),
    ],
)
def test_what_is_no_call_comes_out_exactly_as_written(name: str, text: str) -> None:
    assert parsed(name, text) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")', 'brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] is a marker", " is a marker"),
        ("mistral", "[TOOL_CALLS]f[ARG]{}", "f[ARG]{}"),
        ("mistral", "[TOOL_CALLS][]", "[]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>", "nothing"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", ""),
        ("kimi_k2", "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}", "functions.:0{}"),
    ],
)
def test_what_is_no_call_comes_out_without_special_tokens(name: str, text: str, words: str) -> None:
    assert parsed(name, text) == merge([Content(words)])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=s>\nParis\n<parameter=a>\n3\n</function>\n</tool_call>",
            '{"s": "Paris", "a": 3}',
        ),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>Paris</tool_call>", '{"s": "Paris"}'),
        ("qwen3_coder", "<tool_call><function=f><parameter=s=Paris</parameter></function>", '{"s": "Paris"}'),
        ("qwen3_coder", "<tool_call><function=f><parameter=s=>Paris</parameter></function>", '{"s": "Paris"}'),
        ("seed_oss", "<seed:tool_call><function=f><parameter=a>3</parameter></function></seed:tool_call>", '{"a": 3}'),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>12</tool_call>", '{"a": 12}'),
        ("glm45", "<tool_call>f<arg_key>a</arg_key></arg_key><arg_value>12</arg_value></tool_call>", '{"a": 12}'),
        (
            "glm45",
            "<tool_call>f<arg_key>s</arg_key><arg_value>x<arg_key>a</arg_key>1</tool_call>",
            '{"s": "x", "a": 1}',
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>', "{}"),
        ("pythonic", "[f(3, 'x')]", '{"a": 3, "s": "x"}'),
        ("pythonic", "[f(3, s='x')]", '{"a": 3, "s": "x"}'),
        ("deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>f\n{{}}<｜tool▁call▁end｜>", "{}"),
        ("deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜>", "{}"),
        ("deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>f<｜tool▁call▁end｜>", "{}"),
        ("deepseek_v3", f'{DEEPSEEK}f<｜tool▁sep｜>```json\n{{"a": 1}}\n```<｜tool▁call▁end｜>', '{"a": 1}'),
        ("deepseek_v3", f"{DEEPSEEK}f<｜tool▁sep｜><｜tool▁call▁end｜>", "{}"),
    ],
)
def test_the_arguments_of_a_damaged_call_are_recovered(name: str, text: str, expected: str) -> None:
    assert parsed(name, text) == call(0, "f", expected)


def test_text_before_the_first_call_of_a_section_is_prose() -> None:
    one = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    expected = [Content("Now: "), *call(0, "f", "{}", "functions.f:0")]
    assert parsed("kimi_k2", f"<|tool_calls_section_begin|>Now: {one}<|tool_calls_section_end|>") == expected
    assert parsed("kimi_k2", f"<|tool_call_section_begin|>{one}<|tool_call_section_end|>") == expected[1:]


@pytest.mark.parametrize(
    ("thoughts", "calls", "text"),
    [
        ("deepseek_r1", "deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n{{}}\n```<｜tool▁call▁end｜>"),
        ("think", "deepseek_v3", f"{DEEPSEEK}f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"),
        ("kimi_k2", "kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("seed_oss", "seed_oss", "<seed:tool_call><function=f></function></seed:tool_call>"),
    ],
)
def test_a_call_ends_thoughts_that_are_open(thoughts: str, calls: str, text: str) -> None:
    parser = ChainedParser(reasoning_format(thoughts).open(True), tool_format(calls).open(TOOLS))
    hm, begun, arguments = run(parser, list(f"hm{text}"))
    assert (hm, arguments) == (Reasoning("hm"), CallArguments(0, "{}"))
    assert isinstance(begun, CallBegun)
    assert begun.name == "f"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call> so',
            [*call(0, "f", '{"a": 1}'), Content(',, "b": 2}}'), Content(" so")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\"}"}</tool_call>',
            [*call(0, "f", "{}"), Content(', "arguments": "{\\"a\\"}"}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "argu',
            [*call(0, "f", "{}"), Content(', "argu')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": tru',
            [*call(0, "f", "{}"), Content('"a": tru')],
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, and so on',
            [*call(0, "f", "{}"), Content(", and so on")],
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{]<|tool_call_end|>x",
            [*call(0, "f", "{}", "f:0"), Content("]x")],
        ),
        (
            "pythonic",
            "[f(a=1, s=b + c), f()]",
            [*call(0, "f", '{"a": 1}'), Content(', "s": '), Content("b + c), f()]")],
        ),
        (
            "pythonic",
            "[f(1, 'x', 2)]",
            [*call(0, "f", '{"a": 1, "s": "x"}'), Content(", 2)]")],
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=s>\nabc\n</para",
            [*call(0, "f", '{"s": "abc"}'), Content("\n</para")],
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=a>\n12",
            [*call(0, "f", "{}"), Content('"a": 12')],
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value>oh<arg_key>a</tool_call>x",
            [*call(0, "f", '{"s": "x"}'), Content("oh"), Content("a"), Content("x")],
        ),
    ],
)  # fmt: skip
def test_of_a_call_that_breaks_off_the_rest_is_prose(name: str, text: str, expected: list[Event]) -> None:
    assert parsed(name, text) == merge(expected)


def test_after_a_broken_call_the_next_one_counts_on() -> None:
    text = '<tool_call>{"name": "f", oh<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed("hermes", text) == [*call(0, "f", "{}"), Content(", oh"), *call(1, "f", "{}")]


def test_a_call_within_what_is_no_call_is_one() -> None:
    text = 'Write <tool_call> like <tool_call>{"name": "f"}</tool_call>'
    assert parsed("hermes", text) == [Content("Write <tool_call> like "), *call(0, "f", "{}")]
