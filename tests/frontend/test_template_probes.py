"""Conversations with calls fit templates of every shape. The templates are small, of the shapes that models have."""

import json
import re
from typing import Any

import pytest
from msgspec import UNSET

from kvmesh.frontend.anthropic.parse import parse_messages
from kvmesh.frontend.arguments import ReadArguments, WrittenArguments, arguments_of
from kvmesh.frontend.formats import answer_format
from kvmesh.frontend.openai.parameters import parse_chat
from kvmesh.frontend.parsers.events import CallBegun, Tool
from kvmesh.frontend.request import ToolChoice, Tools
from kvmesh.frontend.responses.parse import parse_responses
from kvmesh.frontend.template_probes import TemplateTraits, fitted, one_call_a_turn
from kvmesh.frontend.templates import ChatTemplate


def each_message(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
TEXT_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '(' + c.function.name + ' ' + c.function.arguments + ')' }}{% endfor %}"
)
NULL_CALLS = "{% if m.role == 'assistant' and m['content'] is none %}" + CALLS + "{% endif %}"
NINE = (
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    "[{{ c.id }}]{% endfor %}{% if m.tool_call_id %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}[{{ m.tool_call_id }}]"
    "{% endif %}"
)
ONE = "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
FIRST = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
PRINTS = "{% if 'content' not in m %}{{ raise_exception('no content') }}{% endif %}<{{ m.content }}>"

SHAPES = {  # (the template for a message, its traits)
    "reads what is there": ("{{ m.role }}{{ m.content or '' }}" + CALLS, TemplateTraits()),
    "concatenates the content (Qwen3, QwQ)": ("{{ m.role + m.content }}" + CALLS, TemplateTraits("")),
    "tests for null (R1-Distill)": (NULL_CALLS, TemplateTraits(None)),
    "null, else concatenated": (
        "{% if m.content is not none %}{{ 'x' + m.content }}{% endif %}" + CALLS,
        TemplateTraits(None),
    ),
    "prints null as Python": (PRINTS + CALLS, TemplateTraits("")),
    "writes null as JSON (LFM2)": (
        "{% set x = m.content if m.content is string else m.content | tojson %}{{ x }}",
        TemplateTraits(""),
    ),
    "concatenates arguments (DeepSeek V3)": (TEXT_CALLS, TemplateTraits(takes_text=True)),
    "prints arguments": (
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}",
        TemplateTraits(takes_text=True),
    ),
    "nine characters (Mistral)": (CALLS + NINE, TemplateTraits(short_ids=True)),
    "one call (Llama 3)": (ONE + CALLS, TemplateTraits(one_call=True)),
    "the first call alone": (FIRST, TemplateTraits(one_call=True)),
    "all of it": (
        "{{ m.role + m.content }}" + ONE + TEXT_CALLS + NINE,
        TemplateTraits("", takes_text=True, short_ids=True, one_call=True),
    ),
    "knows no calls": ("{{ m.role + m.content }}", TemplateTraits("")),
    "knows no tools": ("{{ raise_exception('no') if m.role == 'tool' else '' }}", TemplateTraits()),
    "never ends": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TemplateTraits()),
}  # fmt: skip


@pytest.mark.parametrize(("body", "traits"), SHAPES.values(), ids=SHAPES)
def test_a_template_is_probed_once_for_what_it_accepts(body: str, traits: TemplateTraits) -> None:
    assert ChatTemplate(each_message(body), {}).traits == traits


def agent(*ids: str, **message: object) -> list[Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": f"f{n}", "arguments": f'{{"city":"{call_id}"}}'}}
        for n, call_id in enumerate(ids)
    ]
    results = [{"role": "tool", "content": f"it rains {call_id}", "tool_call_id": call_id} for call_id in ids]
    called = {"role": "assistant", "content": None, "tool_calls": calls} | message
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}, called, *results]}
    messages = parse_chat(json.dumps(body).encode()).messages
    assert messages is not None
    return list(messages)


@pytest.mark.parametrize("body", [body for body, _ in SHAPES.values() if "tool_calls" in body])
@pytest.mark.parametrize("ids", [["toolu_01A"], ["call_0123456789", "call_abcdef"], ["abcdefgh1", "x"]])
def test_no_call_of_an_earlier_turn_is_lost_or_refused(body: str, ids: list[str]) -> None:
    template = ChatTemplate(each_message(body), {})
    text = template.render(fitted(agent(*ids), template.traits))
    assert all(f'"{call_id}"' in text for call_id in ids)
    assert "None" not in text


def test_a_template_that_writes_text_gets_the_text_that_the_model_wrote() -> None:
    template = ChatTemplate(each_message(TEXT_CALLS), {})
    assert template.render(fitted(agent("p"), template.traits)) == '(f0 {"city":"p"})'
    given = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": "ü"}}}]}]
    assert template.render(fitted(given, template.traits)) == '(f {"a": "ü"})'


def test_short_ids_are_one_to_one_and_the_same_in_the_next_turn() -> None:
    template = ChatTemplate(each_message(CALLS + NINE), {})
    [first] = [m["tool_calls"] for m in fitted(agent("toolu_1", "abcdefgh1"), template.traits) if m.get("tool_calls")]
    later = agent("toolu_1", "abcdefgh1") + agent("toolu_2", "call_3")[1:]
    messages = fitted(later, template.traits)
    called = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert called == answered
    assert called[:2] == [call["id"] for call in first]
    assert called[1] == "abcdefgh1"
    assert len(set(called)) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in called)


def test_turns_of_several_calls_become_turns_of_one_call_each() -> None:
    split = one_call_a_turn(agent("a", "b", content="Let me see.", reasoning_content="Hm."))
    assert [message["role"] for message in split] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [message.get("content") for message in split[1:]] == ["Let me see.", "it rains a", None, "it rains b"]
    assert [message.get("reasoning_content") for message in split] == [None, "Hm.", None, None, None]


def test_results_without_a_call_of_theirs_are_kept_in_order() -> None:
    messages = agent("a", "b")
    messages[2]["tool_call_id"], messages[3]["tool_call_id"] = "b", "none"
    extra = {"role": "tool", "content": "one more", "tool_call_id": "c"}
    split = one_call_a_turn([*messages, extra, {"role": "user", "content": "So?"}])
    results = [message["content"] for message in split if message["role"] == "tool"]
    assert results == ["it rains b", "it rains a", "one more"]
    assert split[-1]["content"] == "So?"


def test_a_template_without_wishes_gets_the_messages_themselves() -> None:
    messages = agent("a", "b")
    assert fitted(messages, TemplateTraits()) is messages
    assert TemplateTraits().null_content is UNSET


def test_turns_of_calls_alone_render_on_every_api() -> None:
    template = ChatTemplate(each_message("{{ m.role + m.content }}" + CALLS), {})
    tool = {"type": "object", "properties": {}}
    messages = {
        "model": "m",
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": tool}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}]},
        ],
    }
    responses = {
        "model": "m",
        "tools": [{"type": "function", "name": "f", "parameters": tool}],
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
    }
    for parsed in (parse_messages(json.dumps(messages).encode()), parse_responses(json.dumps(responses).encode())):
        assert parsed.messages is not None
        assert template.render(fitted(parsed.messages, template.traits)) == 'userHiassistant(f {"a": 1})tool2'


def test_calls_of_a_mistral_model_have_ids_of_nine_letters_and_digits() -> None:
    tools = Tools((Tool("f", {}),), (), ToolChoice.AUTO, "", True, False)
    parser = answer_format("mistral", "", "").parser(tools, "", is_guided=False)
    assert parser is not None
    events = [*parser.push('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]')]
    ids = [event.id for event in (*events, *parser.flush()) if isinstance(event, CallBegun)]
    assert len(set(ids)) == 2
    assert all(call_id is not None and re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)


def test_arguments_keep_their_text() -> None:
    read = arguments_of('{"a":1}')
    assert read == {"a": 1}
    assert isinstance(read, ReadArguments)
    assert read.text == '{"a":1}'
    assert isinstance(arguments_of("{"), WrittenArguments)
