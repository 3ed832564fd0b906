"""Damaged answers of models: whatever they write, no special token is shown, and arguments are JSON objects."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser, Tool
from kvmesh.frontend.parsers.harmony import HARMONY, MARKERS
from kvmesh.frontend.parsers.tools import TOOL_PARSERS, forced_calls, tool_format
from tests.frontend.parsers.streams import run
from tests.support.budget import LARGE

FORMATS = (*TOOL_PARSERS, "harmony", "forced")
MUTATED = (40_000 if LARGE else 20_000) // len(FORMATS)  # of each format
EACH = 100  # of one example
TOOLS = [
    Tool("search", {"type": "object", "properties": {"query": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("now", {}),
]
OBJECT = '{"query": "Köln \\" [{", "days": 3, "o": {"a": [1, null, -2.5e3]}}'
JSON_CALL = f'{{"name": "search", "arguments": {OBJECT}}}'
TAGGED = "<function=search>\n<parameter=query>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
ANSWERS = {
    "hermes": f"Words one\n<tool_call>\n{JSON_CALL}\n</tool_call>\n<tool_call>\n{JSON_CALL}\n</tool_call>",
    "llama3_json": f'<|python_tag|>{JSON_CALL}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f"Words one[TOOL_CALLS]search[ARGS]{OBJECT}[TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{{}}",
    "deepseek_v3": (
        "Words one<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        f"{OBJECT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "pythonic": "<|python_start|>[search(query='Köln', days=3, o={'a': [1, None]}), now()]<|python_end|>",
    "qwen3_coder": f"Words one\n<tool_call>\n{TAGGED}\n</tool_call>",
    "seed_oss": f"Words one\n<seed:tool_call>\n{TAGGED}\n</seed:tool_call>",
    "kimi_k2": (
        "Words one<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        f"{OBJECT}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "glm45": (
        "Words one\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>"
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.search "
        f"<|constrain|>json<|message|>{OBJECT}<|call|><|start|>assistant<|channel|>final<|message|>Words one<|return|>"
    ),
    "forced": f'[{{"name": "search", "parameters": {OBJECT}}}, {{"name": "now", "parameters": {{}}}}]',
}
SIGNS = (*"{}[]()\",:;<>\\ \n'=é", "null", "```", "```json", "<think>", "</function>", "<parameter=", "<function=")


def opened(name: str) -> Parser:
    if name == "harmony":
        return HARMONY.open(False)
    return forced_calls() if name == "forced" else tool_format(name).open(TOOLS)


def markers_of(name: str) -> tuple[str, ...]:
    if name == "harmony":
        return MARKERS
    return () if name == "forced" else tool_format(name).markers


def mutated(text: str, markers: tuple[str, ...], chance: random.Random) -> str:
    """Return the text cut, with markers doubled, lost or exchanged, and with characters lost or added."""
    signs = (*SIGNS, *markers * 3)
    for _ in range(chance.randint(0, 4)):
        start = chance.randint(0, len(text))
        found = [marker for marker in markers if marker in text]
        if found and chance.random() < 0.5:
            marker = chance.choice(found)
            text = text.replace(marker, chance.choice(("", marker * 2, chance.choice(signs))), chance.choice((1, -1)))
        else:
            text = (
                text[:start] + chance.choice(("", chance.choice(signs))) + text[start + chance.choice((0, 1, 2, 9)) :]
            )
    return text[: chance.randint(0, len(text))] if chance.random() < 0.5 else text


def check(events: list[Event], special: tuple[str, ...]) -> None:
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert not any(marker in content for marker in special), content
    arguments = ["" for event in events if isinstance(event, CallBegun)]
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.fragment
    for text in arguments:
        assert isinstance(json.loads(text), dict), text


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=MUTATED // EACH)
def test_mutated_answers_have_sound_calls_and_no_special_token_in_prose(name: str, seed: int) -> None:
    chance = random.Random(seed)
    markers = markers_of(name)
    special = tool_format(name).special if name in TOOL_PARSERS else markers
    for _ in range(EACH):
        text = mutated(ANSWERS[name], markers, chance)
        events = run(opened(name), [text])
        check(events, special)
        place = chance.randint(0, len(text))
        assert run(opened(name), [text[:place], text[place:]]) == events, text


def test_the_shown_beginning_of_a_token_does_not_become_another_one() -> None:
    text = ANSWERS["kimi_k2"].replace("{}<|tool_call_end|>", "{}<|<|tool_call_end|>tool_call_end|>")
    text = text.replace("<|tool_calls_section_end|>", "tool_calls_section_end|>")
    check(run(opened("kimi_k2"), [text]), tool_format("kimi_k2").special)


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_cut_anywhere_has_sound_calls_and_loses_no_word(name: str) -> None:
    text = ANSWERS[name]
    special = tool_format(name).special if name in TOOL_PARSERS else markers_of(name)
    for size in range(len(text)):
        events = run(opened(name), list(text[:size]))
        check(events, special)
        told = "".join(event.fragment if isinstance(event, CallArguments) else str(event) for event in events)
        assert all(word in told for word in ("Words one", "Köln") if name != "forced" and word in text[:size]), events


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=now>", "\n</function>\n</tool_call>"),
        ("seed_oss", "<seed:tool_call>\n<function=now>", "\n</function>\n</seed:tool_call>"),
        ("pythonic", "<|python_start|>[now()]", "<|python_end|>"),
    ],
)
def test_an_answer_cut_in_the_end_of_a_call_shows_no_markup(name: str, text: str, end: str) -> None:
    for size in range(len(end) + 1):
        events = run(opened(name), [text + end[:size]])
        assert events == [CallBegun(0, "now", None), CallArguments(0, "{}")], end[:size]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>search<arg_key>days</arg_key><arg_value><arg_value><arg_v"),
        ("harmony", '<|channel|>commentary to=functions.search <|message|>{"days": nul 3}<|call|>'),
        ("harmony", '<|channel|>commentary to=functions.search <|message|>{"query": "\\ b"}<|call|>'),
        ("harmony", '<|channel|>commentary to=functions.search <|message|>{"days": 3} b<|call|>'),
    ],
)
def test_what_is_left_of_a_broken_call_does_not_depend_on_the_cuts(name: str, text: str) -> None:
    whole = run(opened(name), [text])
    assert run(opened(name), list(text)) == whole
    for place in range(len(text)):
        assert run(opened(name), [text[:place], text[place:]]) == whole, place
