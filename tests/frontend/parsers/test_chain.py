"""Two parsers in a row, and events joined."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.parsers.chain import ChainedParser, merge
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.parsers.reasoning import REASONING_PARSERS
from tests.frontend.parsers.streams import call, cut, run, texts


class Shouts:
    """A parser of calls in the least of formats: a word in capitals that ends with "!" is a call."""

    def __init__(self) -> None:
        self._word = ""
        self._calls = 0

    is_plain = False

    def push(self, text: str) -> Sequence[Event]:
        events: list[Event] = []
        for char in text:
            if char == "!" and self._word:
                events += [CallBegun(self._calls, self._word), CallArguments(self._calls, "{}")]
                self._calls += 1
                self._word = ""
            elif "A" <= char <= "Z":
                self._word += char
            else:
                events.append(Content(self._word + char))
                self._word = ""
        return events

    def flush(self) -> Sequence[Event]:
        return [Content(self._word)] if self._word else []


def chain() -> ChainedParser:
    return ChainedParser(REASONING_PARSERS["think"].open(False), Shouts())


def test_calls_are_read_in_the_answer_not_in_thoughts() -> None:
    assert run(chain(), ["<think>RUN!</think>ok RUN! done"]) == [
        Reasoning("RUN!"),
        Content("ok "),
        *call(0, "RUN", "{}"),
        Content(" done"),
    ]


def test_what_either_holds_back_comes_at_the_end_in_order() -> None:
    assert run(chain(), ["<thi"]) == [Content("<thi")]
    assert run(chain(), ["<think>a</think>b C"]) == [Reasoning("a"), Content("b C")]
    assert run(chain(), ["<think>a</th"]) == [Reasoning("a</th")]


def test_prose_alone_goes_straight_to_the_parser_of_calls() -> None:
    both = chain()
    both.push("a")
    assert both.push("b GO!") == [Content("b"), Content(" "), CallBegun(0, "GO"), CallArguments(0, "{}")]


@given(texts("<think>", "</think>", "RUN!", "a").flatmap(lambda text: st.tuples(st.just(text), cut(text))))
def test_any_cutting_gives_the_same(case: tuple[str, list[str]]) -> None:
    text, pieces = case
    assert run(chain(), pieces) == run(chain(), [text]) == run(chain(), list(text))


def test_neighbours_of_one_kind_are_joined() -> None:
    assert merge([Content("a"), Content("b"), Reasoning("c"), Reasoning("d"), Content("e")]) == [
        Content("ab"),
        Reasoning("cd"),
        Content("e"),
    ]


def test_arguments_are_joined_within_one_call() -> None:
    events = [
        CallBegun(0, "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
        CallBegun(1, "g"),
        CallArguments(1, "{}"),
    ]
    assert merge(events) == [*call(0, "f", "{}"), *call(1, "g", "{}")]
    assert merge([CallArguments(0, "a"), CallArguments(1, "b")]) == [CallArguments(0, "a"), CallArguments(1, "b")]


def test_calls_without_arguments_stay_two() -> None:
    assert merge([CallBegun(0, "f"), CallBegun(1, "f")]) == [CallBegun(0, "f"), CallBegun(1, "f")]


def test_empty_texts_vanish_and_do_not_keep_neighbours_apart() -> None:
    assert merge([Content("a"), Reasoning(""), Content("b"), Content("")]) == [Content("ab")]
