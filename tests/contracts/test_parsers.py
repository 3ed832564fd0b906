"""Parsers of answers keep the promises of the seam, whatever text comes and however it is cut."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.parsers.allowed import AllowedCalls
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser, Reasoning, Tool
from kvmesh.frontend.parsers.harmony import HARMONY
from kvmesh.frontend.parsers.reasoning import REASONING_PARSERS
from kvmesh.frontend.parsers.tools import TOOL_PARSERS, forced_arguments, forced_calls
from tests.frontend.parsers.streams import cut, run, texts
from tests.support.budget import examples

TOOLS = [
    Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {}}}),
    Tool("g", {}),
]


class Subject(NamedTuple):
    """A parser and what its answers are made of."""

    open: Callable[[], Parser]
    parts: tuple[str, ...]
    drops_markers: bool = False  # also where no call comes of them
    is_forced: bool = False  # what may be the beginning of a call that was cut off is no content
    rewrites: bool = False  # a call that may not be made


JSON_PARTS = (
    '{"name": "f", "arguments": {"a": 1, "s": "}\\"{\\u00e9"}}', '{"name":"g","parameters":{}}', '{"name"', ': "f"',
    ', "arguments": {', '"a": [1, {"b": null}], ', '"s": "', "\\", '"', "{", "}", "[", "]", ",", ":", ";",
    "-1.5e3", "null",
)  # fmt: skip
PARTS = {
    "pythonic": (
        "[f(a=1, s='it\\'s', o={'k': [True, None]}), g()]", "[", "]", "f(", "g()", ")", ",", "a=", "'", '"', "\\", "12",
        "{'k':", "}",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n", "<function=", "f", ">", "\n<parameter=a>\n12\n</parameter>\n", "<parameter=s>",
        "<parameter=o>", "\n</parameter>", "</parameter>", "</function>", "{'k': [1]}", '"',
    ),
    "kimi_k2": ("functions.f:0", "functions.", "f", *JSON_PARTS),
    "glm45": ("f", "\n", "<tool_call>f<arg_key>s</arg_key><arg_value>", "a", "o", "12", '{"k": 1}', '"'),
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{", "f", "function", "```json", "```", *JSON_PARTS,
    ),
}  # fmt: skip


def parser_of(name: str) -> Callable[[], Parser]:
    return lambda: TOOL_PARSERS[name].open(TOOLS)


HARMONY_PARTS = (*HARMONY.markers, "analysis", "commentary", "final", "assistant", " to=functions.f", "{}", "x")


def thoughts_of(name: str, opened: bool) -> Subject:
    known = REASONING_PARSERS[name]
    return Subject(lambda: known.open(opened), (*known.markers, "<tool_call>\n{", "hm"), drops_markers=True)


PARSERS: dict[str, Subject] = {
    **{
        name: Subject(
            parser_of(name),
            TOOL_PARSERS[name].markers + PARTS.get(name, ("f", *JSON_PARTS)),
            drops_markers=bool(TOOL_PARSERS[name].special),
        )
        for name in TOOL_PARSERS
    },
    "calls as json": Subject(forced_calls, JSON_PARTS, is_forced=True),
    "arguments as json": Subject(lambda: forced_arguments("f"), JSON_PARTS, is_forced=True),
    **{f"thoughts: {name}": thoughts_of(name, False) for name in REASONING_PARSERS},
    **{f"thoughts begun: {name}": thoughts_of(name, True) for name in REASONING_PARSERS},
    "harmony": Subject(lambda: HARMONY.open(False), HARMONY_PARTS, drops_markers=True),
    "allowed calls": Subject(
        lambda: AllowedCalls(TOOL_PARSERS["hermes"].open(TOOLS), frozenset("g")),
        (*TOOL_PARSERS["hermes"].markers, *JSON_PARTS),
        rewrites=True,
    ),
}

each_parser = pytest.mark.parametrize("subject", PARSERS.values(), ids=PARSERS.keys())


@each_parser
@given(st.data())
@settings(max_examples=examples(100))
def test_any_cutting_gives_the_same_events(subject: Subject, data: st.DataObject) -> None:
    text = data.draw(texts(*subject.parts))
    whole = run(subject.open(), [text])
    assert run(subject.open(), list(text)) == whole
    assert run(subject.open(), data.draw(cut(text))) == whole


@each_parser
@given(st.data())
@settings(max_examples=examples(50))
def test_a_plain_parser_stays_plain_and_may_be_skipped(subject: Subject, data: st.DataObject) -> None:
    parser, was_plain = subject.open(), False
    for piece in data.draw(cut(data.draw(texts(*subject.parts)))):
        events = parser.push(piece)
        if was_plain:
            assert tuple(events) == ((Content(piece),) if piece else ())
        assert parser.is_plain >= was_plain
        was_plain = parser.is_plain
    if was_plain:
        assert list(parser.flush()) == []


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_after_the_thoughts_an_answer_is_plain(name: str) -> None:
    known = REASONING_PARSERS[name]
    parser = known.open(False)
    parser.push(f"{known.start}hm")
    assert not parser.is_plain
    parser.push(f"{known.end}\n\n")
    assert not parser.is_plain, "line ends after the tag are not shown"
    parser.push("So")
    assert parser.is_plain


@each_parser
@given(st.data())
@settings(max_examples=examples(50))
def test_prose_and_thoughts_are_pieces_of_the_text(subject: Subject, data: st.DataObject) -> None:
    if subject.rewrites:
        pytest.skip("a call that may not be made is written in words of our own")
    text = data.draw(texts(*subject.parts))
    parser = subject.open()
    events = [*parser.push(text), *parser.flush()]  # not joined: markers may stand between
    at = 0
    for event in events:
        if isinstance(event, Content | Reasoning):
            at = text.find(event.text, at)
            assert at >= 0, f"{event.text!r} is not in {text!r}"
            at += len(event.text)
    if not subject.drops_markers and all(isinstance(event, Content) for event in events):
        assert "".join(map(prose, events)) in ((text, "") if subject.is_forced else (text,))


@each_parser
@given(st.data())
@settings(max_examples=examples(50))
def test_calls_are_counted_and_arguments_belong_to_the_last_one(subject: Subject, data: st.DataObject) -> None:
    calls = 0
    for event in run(subject.open(), [data.draw(texts(*subject.parts))]):
        match event:
            case CallBegun(index, name):
                assert (index, name != "") == (calls, True)
                calls += 1
            case CallArguments(index):
                assert index == calls - 1


@each_parser
def test_after_the_end_there_is_nothing_left(subject: Subject) -> None:
    parser = subject.open()
    parser.push("".join(subject.parts))
    parser.flush()
    assert list(parser.flush()) == []


@each_parser
@given(text=st.text("abcé漢🙂 .\n", min_size=1).filter(str.strip))
def test_plain_text_is_not_held_back(subject: Subject, text: str) -> None:
    parser = subject.open()
    assert run(parser, []) == []
    told = "".join(map(prose, [*parser.push("x"), *parser.push(text + "y")]))
    assert told == f"x{text}y"


def prose(event: Event) -> str:
    assert isinstance(event, Content | Reasoning)
    return event.text
