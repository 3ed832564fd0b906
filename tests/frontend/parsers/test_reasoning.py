"""Thoughts and answer told apart: each family's tags, whitespace, prompts that have begun the thoughts."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.parsers.events import Content, Event, Reasoning
from kvmesh.frontend.parsers.reasoning import (
    REASONING_PARSERS,
    ReasoningFormat,
    guess_reasoning_format,
    open_after,
    prompt_opens_thoughts,
    reasoning_format,
)
from kvmesh.protocol.errors import ConfigError
from tests.frontend.parsers.streams import cut, run, texts

FORMATS = list(REASONING_PARSERS.values())
THINK = REASONING_PARSERS["think"]
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
forced_formats = pytest.mark.parametrize("format", [f for f in FORMATS if f.forced], ids=lambda format: format.name)
other_formats = pytest.mark.parametrize("format", [f for f in FORMATS if not f.forced], ids=lambda format: format.name)


def read(name: str, text: str, opened: bool = False) -> list[Event]:
    return run(REASONING_PARSERS[name].open(opened), [text])


# --- tags --------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("opened", [False, True])
def test_between_the_tags_are_thoughts_and_after_them_the_answer(format: ReasoningFormat, opened: bool) -> None:
    text = f"{format.start}\nfirst a\n\nthen b\n{format.end}\n\nIt is c.\n"
    assert run(format.open(opened), [text]) == [Reasoning("first a\n\nthen b"), Content("It is c.\n")]


@every_format
def test_thoughts_opened_by_the_prompt_need_no_start_tag(format: ReasoningFormat) -> None:
    assert run(format.open(True), [f"hm{format.end}yes"]) == [Reasoning("hm"), Content("yes")]


@forced_formats
def test_a_forced_format_starts_inside_the_thoughts(format: ReasoningFormat) -> None:
    assert run(format.open(False), ["hm</think>yes"]) == [Reasoning("hm"), Content("yes")]


@other_formats
def test_without_a_start_tag_everything_is_the_answer(format: ReasoningFormat) -> None:
    text = f"\n yes {format.end}\n{format.start} no"
    assert run(format.open(False), [text]) == [Content(text)]


@every_format
@pytest.mark.parametrize("opened", [False, True])
def test_if_the_end_tag_never_comes_all_is_thoughts(format: ReasoningFormat, opened: bool) -> None:
    text = f"{format.start}hm\n\n{format.end[:-1]}"
    assert run(format.open(opened), [text]) == [Reasoning(f"hm\n\n{format.end[:-1]}")]


@every_format
def test_empty_thoughts_leave_no_event(format: ReasoningFormat) -> None:
    assert run(format.open(False), [f"{format.start}\n\n{format.end}\n\nHi"]) == [Content("Hi")]


def test_tags_in_the_answer_are_text() -> None:
    answer = "write <think>x</think>\n"
    assert read("think", f"<think>hm</think>{answer}") == [Reasoning("hm"), Content(answer)]


def test_a_start_tag_within_the_thoughts_is_text() -> None:
    assert read("think", "<think>a <think> b</think>c") == [Reasoning("a <think> b"), Content("c")]


def test_granite_may_write_heres() -> None:
    text = "Here's my thought process: so Here's my response: Yes"
    assert read("granite", text) == [Reasoning(" so "), Content(" Yes")]
    assert read("granite", "Here is my response to it") == [Content("Here is my response to it")]


# --- whitespace --------------------------------------------------------------------------------------------


def test_whitespace_is_dropped_only_before_a_start_tag() -> None:
    assert read("glm45", " \n<think>hm</think>yes") == [Reasoning("hm"), Content("yes")]
    assert read("glm45", " \n<thin") == [Content(" \n<thin")]
    assert read("glm45", " \n") == [Content(" \n")]


def test_only_newlines_next_to_the_tags_are_dropped() -> None:
    assert read("think", "<think>\n a\n \n\n</think>\n\n    code\n\n") == [Reasoning(" a\n "), Content("    code\n\n")]


def test_newlines_are_held_back_before_a_possible_end_tag() -> None:
    parser = THINK.open(True)
    assert parser.push("a\n") == [Reasoning("a")]
    assert parser.push("\n") == []
    assert parser.push("b") == [Reasoning("\n\nb")]


def test_newlines_after_the_end_tag_may_come_later_than_it() -> None:
    parser = THINK.open(True)
    assert [*parser.push("a</think>"), *parser.push("\n"), *parser.push("\n")] == [Reasoning("a")]
    assert parser.push("b") == (Content("b"),)


# --- calls that end the thoughts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("qwen3", '<tool_call>\n{"name"'),
        ("qwen3", "<tool_call>\n<function=f>"),
        ("glm45", "<tool_call>f\n<arg_key>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("nemotron", "<tool_call>\n<function=f>"),
        ("nemotron", '<TOOLCALL>[{"name"'),
    ],
)
def test_a_call_ends_thoughts_that_were_not_ended(name: str, begin: str) -> None:
    assert read(name, f"so I call\n{begin}", opened=True) == [Reasoning("so I call"), Content(begin)]


def test_qwen_may_think_about_the_tag_of_calls() -> None:
    text = "I could use <tool_call> here\n<tool_call>\n"
    assert read("qwen3", f"{text}</think>no", opened=True) == [Reasoning(text.rstrip("\n")), Content("no")]


# --- the prompt ----------------------------------------------------------------------------------------------


def test_a_prompt_ending_with_the_start_tag_opens_thoughts() -> None:
    assert prompt_opens_thoughts("<|im_start|>assistant\n<think>\n", THINK)
    assert prompt_opens_thoughts("<｜Assistant｜><think>", REASONING_PARSERS["deepseek_r1"])


def test_a_prompt_that_closes_them_again_does_not() -> None:
    assert not prompt_opens_thoughts("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not prompt_opens_thoughts("<｜Assistant｜></think>", THINK)


def test_a_tag_that_a_user_wrote_opens_nothing() -> None:
    assert not prompt_opens_thoughts("what is <think><|im_end|>\n<|im_start|>assistant\n", THINK)
    assert not prompt_opens_thoughts("", THINK)


@every_format
def test_after_an_open_prompt_the_answer_starts_with_thoughts(format: ReasoningFormat) -> None:
    parser = open_after(format, f"assistant\n{format.start}\n")
    assert run(parser, [f"hm{format.end}yes"]) == [Reasoning("hm"), Content("yes")]


@every_format
def test_a_prompt_without_thinking_wins_over_a_forced_format(format: ReasoningFormat) -> None:
    closed = f"assistant\n{format.start}\n\n{format.end}\n\n"
    assert run(open_after(format, closed), ["yes"]) == [Content("yes")]
    assert run(open_after(format, closed), [f"{format.start}hm{format.end}yes"]) == [Reasoning("hm"), Content("yes")]


@forced_formats
def test_a_prompt_that_says_nothing_leaves_a_forced_format_forced(format: ReasoningFormat) -> None:
    assert run(open_after(format, "<|im_start|>assistant\n"), ["hm</think>yes"]) == [Reasoning("hm"), Content("yes")]


# --- names -----------------------------------------------------------------------------------------------------


def test_formats_are_found_by_other_servers_names_too() -> None:
    assert reasoning_format("deepseek_r1") is reasoning_format("DeepSeek-R1") is REASONING_PARSERS["deepseek_r1"]
    assert reasoning_format("qwen3-thinking").name == "qwen3"
    assert all(reasoning_format(name).name == name for name in REASONING_PARSERS)


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'gpt5'.*deepseek_r1.*granite.*qwen3"):
        reasoning_format("gpt5")


@every_format
def test_markers_name_the_tags(format: ReasoningFormat) -> None:
    assert {format.start, format.end} <= set(format.markers)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }} <tool_call>", "qwen3"),
        ("{{'<｜Assistant｜><think>\\n'}} content.split('</think>')[-1]", "deepseek_r1"),
        ("{%- if not thinking -%}{{'<｜Assistant｜></think>'}}{%- else -%}{{'<think>'}}", "think"),
        ("[gMASK]<sop> '\\n<think></think>' <tool_call>", "glm45"),
        ("<think></think>{{render_content(message)}}<|tool_calls_section_begin|>", "kimi_k2"),
        ("[SYSTEM_PROMPT] '[THINK]' + block['thinking'] + '[/THINK]'", "mistral"),
        ("write your thoughts after 'Here is my thought process:'", "granite"),
        ("<SPECIAL_10>System '</think>' in content <TOOLCALL>[", "nemotron"),
        ("<|BOT|>assistant\\n<think>\\n ... '</think>' in content", "step3"),
        ("'<|assistant|>\\n<think>' '</think>'", "think"),
        ("{{ bos_token }}[INST] {{ message.content }} [/INST] [TOOL_CALLS]", ""),
        ("", ""),
    ],
)
def test_a_chat_template_tells_its_format(template: str, name: str) -> None:
    assert guess_reasoning_format(template) == name


# --- any text, any cutting ---------------------------------------------------------------------------------------

ANY_TEXT = texts(
    *{marker for known in FORMATS for marker in (known.start, known.end)},
    "Here's my thought process:",
    "Here's my response:",
    "<tool_call>\n{",
    "<tool_call><function=",
    "<|tool_calls_section_begin|>",
    "<TOOLCALL>[",
)


@every_format
@given(case=ANY_TEXT.flatmap(lambda text: st.tuples(st.just(text), cut(text))), opened=st.booleans())
def test_any_cutting_gives_the_same(format: ReasoningFormat, case: tuple[str, list[str]], opened: bool) -> None:
    text, pieces = case
    whole = run(format.open(opened), [text])
    assert run(format.open(opened), pieces) == whole
    assert run(format.open(opened), list(text)) == whole


@every_format
@given(text=ANY_TEXT, opened=st.booleans())
def test_only_one_pair_of_tags_with_its_whitespace_disappears(format: ReasoningFormat, text: str, opened: bool) -> None:
    events = run(format.open(opened), [text])
    thought, answer = _thought_and_answer(events)
    starts, ends = _tags(format)
    dropped = rf"(?:\s*(?:{starts}))?\n*{re.escape(thought)}\n*(?:(?:{ends})\n*)?{re.escape(answer)}"
    assert text == answer or re.fullmatch(dropped, text)


def _tags(format: ReasoningFormat) -> tuple[str, str]:
    """Patterns of the tags that may open and close the thoughts."""
    if format.name == "granite":
        return "Here(?: is|'s) my thought process:", "Here(?: is|'s) my response:"
    return re.escape(format.start), re.escape(format.end)


def _thought_and_answer(events: list[Event]) -> tuple[str, str]:
    match events:
        case []:
            return "", ""
        case [Reasoning(thought)]:
            return thought, ""
        case [Content(answer)]:
            return "", answer
        case [Reasoning(thought), Content(answer)]:
            return thought, answer
    raise AssertionError(f"thoughts come first and once: {events}")


# --- cost ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", ["\n", "<", "</", "<tool_call>\n", " "])
def test_cost_per_character_does_not_grow_with_the_answer(piece: str) -> None:
    def cpu_s(pieces: int) -> float:
        parser = REASONING_PARSERS["qwen3"].open(True)
        begin = time.process_time()
        for _ in range(pieces):
            parser.push(piece)
        parser.flush()
        return time.process_time() - begin

    short = min(cpu_s(2_000) for _ in range(3))
    assert min(cpu_s(16_000) for _ in range(3)) < 8 * short * 3
