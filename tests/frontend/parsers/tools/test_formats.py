"""Calls as the models write them, and what comes of them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.parsers.chain import merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Tool
from kvmesh.frontend.parsers.tools import TOOL_PARSERS, guess_tool_format, tool_format
from kvmesh.protocol.errors import ConfigError
from tests.frontend.parsers.streams import call, cut, run
from tests.support.budget import examples

TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "detailed": {"type": "boolean"},
                "where": {"$ref": "#/$defs/Place"},
            },
            "$defs": {"Place": {"type": "object"}},
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
]
TRICKY = '{"city": "a \\"}]</tool_call>\\" \\\\", "where": {"x": [{}, {"y": "{"}]}, "name": "漢🙂 \\u00e9"}'
PLAIN = '{"city": "Paris", "days": 3}'

SAMPLES: dict[str, tuple[str, str, list[Event]]] = {
    "hermes: one call after prose": (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PLAIN}}}\n</tool_call>',
        [Content("Let me see.\n"), *call(0, "get_weather", PLAIN)],
    ),
    "hermes: parallel calls, tricky strings, no arguments": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {TRICKY}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        [*call(0, "get_weather", TRICKY), *call(1, "now", "{}"), *call(2, "now", "{}")],
    ),
    "hermes: arguments before the name": (
        "hermes",
        f'<tool_call>{{"arguments": {TRICKY}, "name": "get_weather"}}</tool_call>',
        call(0, "get_weather", TRICKY),
    ),
    "hermes: prose between and after calls": (
        "hermes",
        '<tool_call>{"name": "now"}</tool_call> and <tool_call>{"name": "now"}</tool_call>\nDone.',
        [*call(0, "now", "{}"), Content(" and "), *call(1, "now", "{}"), Content("\nDone.")],
    ),
    "hermes: a closing tag left out": (
        "hermes",
        '<tool_call>\n{"name": "now"}\n<tool_call>\n{"name": "now"}\n</tool_call>',
        [*call(0, "now", "{}"), *call(1, "now", "{}")],
    ),
    "hermes: line breaks within strings are mended": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {\n"city": "a\nb\tc"}}</tool_call>',
        call(0, "get_weather", '{\n"city": "a\\nb\\tc"}'),
    ),
    "hermes: arguments as a string": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\u00e9\\"}"}</tool_call>'
        '<tool_call>{"arguments": "{}", "name": "now"}</tool_call>',
        [*call(0, "get_weather", '{"city": "é"}'), *call(1, "now", "{}")],
    ),
    "llama: bare": (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {PLAIN}}}',
        call(0, "get_weather", PLAIN),
    ),
    "llama: tagged, two": (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {TRICKY}}}; '
        '{"name": "now", "parameters": {}}',
        [*call(0, "get_weather", TRICKY), *call(1, "now", "{}")],
    ),
    "llama 4: between markers": (
        "llama4_json",
        '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>',
        call(0, "now", "{}"),
    ),
    "mistral: an array": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {TRICKY}}}, {{"name": "now", "arguments": {{}}}}]',
        [*call(0, "get_weather", TRICKY), *call(1, "now", "{}")],
    ),
    "mistral: an array with ids before the names": (
        "mistral",
        '[TOOL_CALLS][{"id": "abc123def", "name": "now", "arguments": {}}]',
        call(0, "now", "{}", "abc123def"),
    ),
    "mistral: headers": (
        "mistral",
        f"I look.[TOOL_CALLS]get_weather[ARGS]{TRICKY}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}",
        [Content("I look."), *call(0, "get_weather", TRICKY), *call(1, "now", "{}", "abc123def")],
    ),
    "mistral: headers without [ARGS]": (
        "mistral",
        f"[TOOL_CALLS]get_weather{PLAIN}[TOOL_CALLS]now{{}}",
        [*call(0, "get_weather", PLAIN), *call(1, "now", "{}")],
    ),
    "deepseek v3": (
        "deepseek_v3",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{TRICKY}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Hm."), *call(0, "get_weather", TRICKY), *call(1, "now", "{}")],
    ),
    "deepseek v3.1": (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{TRICKY}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*call(0, "get_weather", TRICKY), *call(1, "now", "{}")],
    ),
    "kimi": (
        "kimi_k2",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{TRICKY}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            Content("Ok."),
            *call(0, "get_weather", TRICKY, "functions.get_weather:0"),
            *call(1, "now", "{}", "functions.now:1"),
        ],
    ),
    "kimi: no arguments": (
        "kimi_k2",
        "<|tool_call_begin|>now:0<|tool_call_argument_begin|><|tool_call_end|>",
        call(0, "now", "{}", "now:0"),
    ),
    "pythonic": (
        "pythonic",
        """[get_weather(city="it's [x](y), \\"q\\" é", days=3, where={'a': [True, None, 1.5], "b": ()}), now()]""",
        [
            *call(
                0,
                "get_weather",
                """{"city": "it's [x](y), \\"q\\" é", "days": 3, "where": {"a": [true, null, 1.5], "b": []}}""",
            ),
            *call(1, "now", "{}"),
        ],
    ),
    "pythonic: llama 4's markers": (
        "pythonic",
        "<|python_start|>[now()]<|python_end|>",
        call(0, "now", "{}"),
    ),
    "qwen3 coder": (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nif a < b:\n\n  \"x\"\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n<parameter=detailed>\nTrue\n"
        "</parameter>\n<parameter=where>\n{\"x\": [1, 2]}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [
            Content("I look.\n"),
            *call(
                0,
                "get_weather",
                '{"city": "if a < b:\\n\\n  \\"x\\"", "days": 3, "unit": null, "detailed": true, '
                '"where": {"x": [1, 2]}}',
            ),
            *call(1, "now", "{}"),
        ],
    ),
    "qwen3 coder: without the outer tag, values on one line and empty": (
        "qwen3_coder",
        "<function=get_weather><parameter=city>\n</parameter><parameter=unit></parameter><parameter=days>x</parameter>"
        "</function>",
        call(0, "get_weather", '{"city": "", "unit": "", "days": "x"}'),
    ),
    "glm 4.5": (
        "glm45",
        "\nI look.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京 \"x\"\n</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [
            Content("\nI look."),
            *call(0, "get_weather", '{"city": "北京 \\"x\\"\\n", "days": 3}'),
            *call(1, "now", "{}"),
        ],
    ),
    "glm 4.7": (
        "glm47",
        "<tool_call>get_weather<arg_key>where</arg_key><arg_value>{'a': \"b\"}</arg_value><arg_key>unit</arg_key>"
        "<arg_value>C</arg_value></tool_call><tool_call>now</tool_call>",
        [*call(0, "get_weather", '{"where": {"a": "b"}, "unit": "C"}'), *call(1, "now", "{}")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), SAMPLES.values(), ids=SAMPLES.keys())
def test_a_sample_gives_its_events_however_it_is_cut(name: str, text: str, expected: list[Event]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert run(tool_format(name).open(TOOLS), pieces) == expected, size


@pytest.mark.parametrize(("name", "text", "expected"), SAMPLES.values(), ids=SAMPLES.keys())
def test_arguments_are_an_object_of_json(name: str, text: str, expected: list[Event]) -> None:
    for event in run(tool_format(name).open(TOOLS), [text]):
        if isinstance(event, CallArguments):
            assert isinstance(json.loads(event.fragment), dict)


@pytest.mark.parametrize(("name", "text", "expected"), SAMPLES.values(), ids=SAMPLES.keys())
def test_events_of_a_cut_answer_begin_the_whole_ones(name: str, text: str, expected: list[Event]) -> None:
    for size in range(len(text)):
        events = merge(tool_format(name).open(TOOLS).push(text[:size]))
        assert begins(events, expected), (text[:size], events)


@given(st.data())
@settings(max_examples=examples(200))
def test_a_damaged_sample_gives_the_same_however_it_is_cut(data: st.DataObject) -> None:
    name, text, _ = data.draw(st.sampled_from(list(SAMPLES.values())))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.sampled_from([0, 0, 1, 2, 10])))
        added = data.draw(st.sampled_from([*tool_format(name).markers, *"{}[]()\",:;<>\\ \n'=é", ""]))
        text = text[:start] + added + text[end:]
    whole = run(tool_format(name).open(TOOLS), [text])
    assert run(tool_format(name).open(TOOLS), list(text)) == whole
    assert run(tool_format(name).open(TOOLS), data.draw(cut(text))) == whole


def begins(events: list[Event], whole: list[Event]) -> bool:
    if not events:
        return True
    *before, last = events
    expected = whole[len(before)]
    if isinstance(last, CallArguments) and isinstance(expected, CallArguments):
        return before == whole[: len(before)] and expected.fragment.startswith(last.fragment)
    if isinstance(last, Content) and isinstance(expected, Content):
        return before == whole[: len(before)] and expected.text.startswith(last.text)
    return events == whole[: len(events)]


def test_a_call_begins_with_its_name_and_streams_its_arguments() -> None:
    parser = tool_format("hermes").open(TOOLS)
    assert list(parser.push('<tool_call>{"name": "now')) == []
    assert list(parser.push('", "arguments": ')) == [CallBegun(0, "now")]
    assert list(parser.push('{"city": "Pa')) == [CallArguments(0, '{"city": "Pa')]
    assert list(parser.push('ris"')) == [CallArguments(0, 'ris"')]


def test_a_string_between_tags_goes_out_as_it_comes() -> None:
    parser = tool_format("qwen3_coder").open(TOOLS)
    parser.push("<tool_call><function=get_weather><parameter=city>")
    assert merge(parser.push("\nlong")) == [CallArguments(0, '{"city": "long')]
    assert merge(parser.push(" text\n")) == [CallArguments(0, " text")]
    assert merge(parser.push("</parameter>")) == [CallArguments(0, '"')]


def test_other_types_go_out_when_they_are_complete() -> None:
    parser = tool_format("glm45").open(TOOLS)
    assert merge(parser.push("<tool_call>get_weather<arg_key>days</arg_key><arg_value>1"))[1:] == []
    assert merge(parser.push("2</arg_value></tool_call>")) == [CallArguments(0, '{"days": 12}')]


def test_names_and_aliases_are_found_else_listed() -> None:
    assert tool_format("qwen25") is tool_format("hermes") is TOOL_PARSERS["hermes"]
    assert tool_format("Qwen3-Coder") is TOOL_PARSERS["qwen3_coder"]
    assert tool_format("glm47") is TOOL_PARSERS["glm45"]
    with pytest.raises(ConfigError, match=r"'nope'.*deepseek_v3.*hermes.*qwen3_coder"):
        tool_format("nope")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("... <tool_call>\\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>", "hermes"),
        ("{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + name }}", "qwen3_coder"),
        ("{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}", "mistral"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}", "deepseek_v3"),
        ("<|tool_calls_section_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("{{ message['content'] }}<|im_end|>", ""),
    ],
)  # fmt: skip
def test_the_format_is_guessed_from_the_chat_template(source: str, name: str) -> None:
    assert guess_tool_format(source) == name
