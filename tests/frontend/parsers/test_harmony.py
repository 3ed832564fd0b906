"""Messages of gpt-oss: thoughts, prose and calls, the headers models get wrong, any cutting."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.parsers.harmony import HARMONY, MARKERS, MAX_HEADER_CHARS, is_harmony
from kvmesh.frontend.parsers.reasoning import open_after, prompt_opens_thoughts
from tests.frontend.parsers.streams import call, cut, run, texts

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
WEATHER = '{"city": "Berlin"}'


def read(text: str) -> list[Event]:
    return run(HARMONY.open(False), [text])


# --- what messages are -----------------------------------------------------------------------------------------


def test_analysis_is_thoughts_and_final_the_answer() -> None:
    assert read(f"{ANALYSIS}2 + 2?{NEXT}{FINAL}4.\n<|return|>") == [Reasoning("2 + 2?"), Content("4.\n")]


def test_stop_tokens_need_not_be_in_the_text() -> None:
    assert read(f"{ANALYSIS}hm{NEXT}{FINAL}4.") == [Reasoning("hm"), Content("4.")]
    assert read(f"<|channel|>commentary to=functions.f<|message|>{WEATHER}") == call(0, "f", WEATHER)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|channel|>commentary to=functions.weather<|constrain|>json",
        "<|channel|>commentary to=functions.weather json",
        "<|channel|>commentary to=functions.weather",
        " to=functions.weather<|channel|>commentary json",
        " to=functions.weather<|channel|>commentary <|constrain|>json",
        " to=functions.weather<|channel|>analysis",
        " to=functions.weather <|constrain|>json",
        "<|channel|>analysis to=functions.weather code",
        "<|channel|>commentary to=weather <|constrain|>json",
        "<|channel|>commentary? to=functions.weather",
        "<|start|>assistant<|channel|>commentary to=functions.weather",
    ],
)
def test_a_message_to_a_function_is_a_call(header: str) -> None:
    assert read(f"{header}<|message|>{WEATHER}<|call|>") == call(0, "weather", WEATHER)


def test_a_call_begins_before_its_unchanged_arguments() -> None:
    parser = HARMONY.open(False)
    assert parser.push("<|channel|>commentary to=functions.f <|constrain|>json<|mess") == []
    assert parser.push("age|>") == [CallBegun(0, "f")]
    assert list(parser.push('\n{"a": "')) == [CallArguments(0, '{"a": "')]
    assert parser.push("1 <") == [CallArguments(0, "1 ")]


def test_a_preamble_is_prose_and_calls_are_numbered() -> None:
    text = (
        f"{ANALYSIS}plan{NEXT}<|channel|>commentary<|message|>I look it up.{NEXT}"
        f"<|channel|>commentary to=functions.a <|constrain|>json<|message|>{WEATHER}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.b <|constrain|>json<|message|>[]<|call|>"
    )
    assert read(text) == [Reasoning("plan"), Content("I look it up."), *call(0, "a", WEATHER), *call(1, "b", "{}")]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert read("<|channel|>commentary to=functions.now<|message|><|call|>") == call(0, "now", "{}")
    assert read("<|channel|>commentary to=functions.now<|message|>") == call(0, "now", "{}")
    assert read("<|channel|>commentary to=functions.now<|message|>\n<|call|>") == call(0, "now", "{}")


def test_what_goes_to_a_built_in_tool_is_thoughts() -> None:
    assert read("<|channel|>analysis to=python code<|message|>print(1)<|call|>") == [Reasoning("print(1)")]
    assert read("<|channel|>commentary to=browser.search<|message|>{}<|call|>") == [Reasoning("{}")]


@pytest.mark.parametrize("recipient", ["assistant", "user", "all"])
def test_a_message_to_the_people_present_is_no_call(recipient: str) -> None:
    assert read(f"<|channel|>commentary to={recipient}<|message|>hi<|end|>") == [Content("hi")]


def test_the_final_channel_is_prose_whoever_it_goes_to() -> None:
    assert read("<|channel|>final to=functions.f<|message|>hi") == [Content("hi")]


# --- what models get wrong ---------------------------------------------------------------------------------------


def test_text_without_any_header_is_shown_at_once() -> None:
    parser = HARMONY.open(False)
    assert parser.push("{") == [Content("{")]
    assert list(parser.push('"a": 1}')) == [Content('"a": 1}')]
    assert parser.flush() == []


def test_prose_that_begins_like_a_recipient_is_prose() -> None:
    assert read("to be or not") == [Content("to be or not")]
    assert read("to") == [Content("to")]


def test_a_broken_header_is_shown_and_reading_continues() -> None:
    assert read(f"<|channel|>?? what{NEXT}{ANALYSIS}hm{NEXT}{FINAL}4.") == [
        Content("?? what"),
        Reasoning("hm"),
        Content("4."),
    ]
    assert read(f"{ANALYSIS}hm{NEXT}<|channel|>fin") == [Reasoning("hm"), Content("assistantfin")]


@pytest.mark.parametrize(
    ("header", "words"), [("<|channel|>secret", "secret"), ("<|channel|>", ""), ("<|start|>me", "me")]
)
def test_a_header_that_makes_no_sense_is_shown_without_its_markers(header: str, words: str) -> None:
    assert read(f"{header}<|message|>hi<|end|>") == [Content(f"{words}hi")]


def test_a_second_channel_begins_the_header_again_and_keeps_the_recipient() -> None:
    doubled = "<|channel|>analysis<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
    text = f"{doubled} to=functions.f<|channel|>commentary <|constrain|>json<|message|>{WEATHER}<|call|>"
    assert read(text) == [Reasoning("hm"), *call(0, "f", WEATHER)]
    assert read(f"<|channel|>commentary to=functions.f<|channel|><|message|>{WEATHER}") == call(0, "f", WEATHER)
    assert read("<|channel|>final<|channel|>final<|message|>hi") == [Content("hi")]


def test_a_header_has_a_greatest_length() -> None:
    name = "f" * MAX_HEADER_CHARS
    text = f"<|channel|>commentary to=functions.{name}<|message|>{{}}"
    assert read(text) == [Content(f"commentary to=functions.{name}{{}}")]


def test_a_message_ends_also_where_the_next_begins() -> None:
    assert read(f"{ANALYSIS}hm{FINAL}4.") == [Reasoning("hm"), Content("4.")]
    assert read(f"{ANALYSIS}hm<|start|>assistant{FINAL}4.") == [Reasoning("hm"), Content("4.")]


def test_whitespace_between_messages_is_dropped_and_text_there_is_prose() -> None:
    assert read(f"{ANALYSIS}hm<|end|>\n<|start|>assistant{FINAL}4.<|return|>\n") == [Reasoning("hm"), Content("4.")]
    assert read(f"{ANALYSIS}hm<|end|>\nso <|message|>4.") == [Reasoning("hm"), Content("so 4.")]


def test_a_message_without_a_channel_is_prose() -> None:
    assert read("<|message|>hi") == [Content("hi")]
    assert read(f"{ANALYSIS}hm{NEXT}<|message|>hi") == [Reasoning("hm"), Content("hi")]


def test_nothing_comes_of_nothing() -> None:
    assert read("") == read("<|return|>") == read("\n<|end|><|end|>\n") == []


# --- the prompt and the template -----------------------------------------------------------------------------


def test_after_the_usual_prompt_an_answer_begins_inside_a_header() -> None:
    assert not prompt_opens_thoughts("<|end|><|start|>assistant", HARMONY)
    assert run(open_after(HARMONY, "<|end|><|start|>assistant"), [f"{FINAL}4."]) == [Content("4.")]


def test_a_prompt_may_open_the_thoughts() -> None:
    parser = open_after(HARMONY, f"<|start|>assistant{ANALYSIS}")
    assert run(parser, [f"hm{NEXT}{FINAL}4."]) == [Reasoning("hm"), Content("4.")]


def test_a_template_of_gpt_oss_is_known() -> None:
    assert is_harmony('"<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>"')
    assert not is_harmony("<|im_start|>assistant\n<think>\n\n</think>")


def test_markers_are_all_special_tokens() -> None:
    assert set(HARMONY.markers) == {
        f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
    }


# --- any text, any cutting -------------------------------------------------------------------------------------

ANY_TEXT = texts(*MARKERS, ANALYSIS, FINAL, NEXT, "commentary", " to=functions.f", " to=python", "assistant", WEATHER)


@given(case=ANY_TEXT.flatmap(lambda text: st.tuples(st.just(text), cut(text))), opened=st.booleans())
def test_any_cutting_gives_the_same(case: tuple[str, list[str]], opened: bool) -> None:
    text, pieces = case
    whole = run(HARMONY.open(opened), [text])
    assert run(HARMONY.open(opened), pieces) == whole
    assert run(HARMONY.open(opened), list(text)) == whole


@given(
    st.lists(st.tuples(st.sampled_from("acf"), st.text(min_size=1).filter(lambda text: "<|" not in text)), max_size=6)
)
def test_what_messages_say_comes_out_unchanged(said: list[tuple[str, str]]) -> None:
    """Random conversations: a is analysis, c a preamble, f a final answer."""
    headers = {"a": ANALYSIS, "c": "<|channel|>commentary<|message|>", "f": FINAL}
    text = NEXT.join(headers[kind] + words for kind, words in said)
    events = run(HARMONY.open(False), [text])
    for kind, shown in (("a", Reasoning), ("cf", Content)):
        written = "".join(words for k, words in said if k in kind)
        assert "".join(event.text for event in events if isinstance(event, shown)) == written


@given(ANY_TEXT, st.booleans())
def test_nothing_is_made_up_and_the_order_stays(text: str, opened: bool) -> None:
    chars = iter(text)
    told = "".join(_told(event) for event in run(HARMONY.open(opened), [text]))
    assert all(char in chars for char in told)


@given(texts(*MARKERS[4:], "hi", "{}", "to=", "assistant"))
def test_a_text_without_headers_comes_out_whole_but_for_whitespace(text: str) -> None:
    told = "".join(_told(event) for event in run(HARMONY.open(False), [text]))
    assert "".join(told.split()) == "".join("".join(re.split(r"<\|(?:end|return|call)\|>", text)).split())


def _told(event: Event) -> str:
    """Return what an event says, without the empty object that a call without arguments gets."""
    match event:
        case Content(text) | Reasoning(text):
            return text
        case CallArguments(_, fragment):
            return fragment.removesuffix("{}")
        case CallBegun(_, name):
            return name


# --- cost ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", ["a", " ", "<", "<|", "<|start|>", "<|channel|>x", "<|end|>"])
def test_cost_per_character_does_not_grow_with_the_answer(piece: str) -> None:
    def cpu_s(pieces: int) -> float:
        parser = HARMONY.open(False)
        begin = time.process_time()
        for _ in range(pieces):
            parser.push(piece)
        parser.flush()
        return time.process_time() - begin

    short = min(cpu_s(2_000) for _ in range(3))
    assert min(cpu_s(16_000) for _ in range(3)) < 8 * short * 3
