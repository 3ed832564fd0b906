"""Deltas become parts: the tokens decide, not how they are cut."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.answer import GrowingAnswer
from kvmesh.frontend.detokenizer import token_decoder
from kvmesh.frontend.formats import answer_format
from kvmesh.frontend.parsers.chain import merge
from kvmesh.frontend.parsers.events import CallBegun, Event, Tool
from kvmesh.frontend.request import Tools
from kvmesh.protocol.messages import Delta, FinishReason, TokenLogprob
from tests.frontend import tiny
from tests.support.budget import examples

BACKEND = tiny.byte_level()
TOOLS = Tools((Tool("f", {}), Tool("g", {})), (), parallel=False)
DECODER = token_decoder(BACKEND, json.loads(BACKEND.to_str())["decoder"])


def ids(text: str) -> tuple[int, ...]:
    return tuple(BACKEND.encode(text, add_special_tokens=False).ids)


def logprobs(tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -0.5) for token in tokens)


def answer(*stops: str, min_tokens: int = 0, logprobs: bool = False) -> GrowingAnswer:
    return GrowingAnswer(DECODER.stream(), stops, min_tokens, logprobs)


def test_the_stop_token_counts_and_does_not_show() -> None:
    for one in (answer(), answer("zz")):
        tokens = ids("the fox")
        end = ids("x")[0]
        part = one.on_delta(Delta((*tokens, end), FinishReason.STOP, stop_token=end))
        assert (part.text, list(part.logprobs)) == ("the fox", [])
        assert one.completion_tokens == len(tokens) + 1
        assert one.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_the_answer_within_a_delta() -> None:
    one = answer("quick")
    part = one.on_delta(Delta(ids("the quick brown fox"), FinishReason.LENGTH))
    assert part.text == "the "
    assert one.finish_reason is FinishReason.STOP
    assert one.completion_tokens < len(ids("the quick brown fox"))


def test_text_held_for_a_stop_string_comes_at_the_end() -> None:
    one = answer("fox!")
    assert one.on_delta(Delta(ids("the fox"))).text == "the "
    assert one.on_delta(Delta((), FinishReason.LENGTH)).text == "fox"


def test_half_a_character_at_the_end_shows_as_replacement() -> None:
    one = answer()
    half = ids("🦊")[:1]
    assert BACKEND.decode(list(half)) == "\ufffd"
    assert one.on_delta(Delta(half)).text == ""
    assert one.on_delta(Delta((), FinishReason.LENGTH)).text == "\ufffd"


def test_before_min_tokens_no_text_is_a_stop_string() -> None:
    tokens = ids("no no no")
    one = answer("no", min_tokens=len(tokens))
    assert one.on_delta(Delta(tokens, FinishReason.LENGTH)).text == "no no no"


def test_logprobs_come_with_their_text_up_to_a_stop() -> None:
    one = answer("quick", logprobs=True)
    first, rest = ids("the"), ids(" quick")
    part = one.on_delta(Delta(first, logprobs=logprobs(first)))
    assert [placed.entry.token_id for placed in part.logprobs] == list(first)
    assert part.logprobs[0].offset_chars == 0
    part = one.on_delta(Delta(rest, logprobs=logprobs(rest)))
    shown = [BACKEND.decode([placed.entry.token_id]) for placed in part.logprobs]
    assert part.text == " "
    assert "".join(shown).startswith(" ")
    assert len(shown) <= 1


def test_all_logprobs_have_come_when_the_answer_ends() -> None:
    tokens = ids("a 🦊 fox")
    one = answer("fox!", logprobs=True)
    placed = list(one.on_delta(Delta(tokens, logprobs=logprobs(tokens))).logprobs)
    placed += one.on_delta(Delta((), FinishReason.LENGTH)).logprobs
    assert [each.entry.token_id for each in placed] == list(tokens)
    assert [each.offset_chars for each in placed] == sorted(each.offset_chars for each in placed)


@given(st.data())
@settings(max_examples=examples(150))
def test_any_cutting_into_deltas_gives_the_same(data: st.DataObject) -> None:
    tokens = tuple(data.draw(st.lists(st.integers(0, BACKEND.get_vocab_size() - 1), min_size=1, max_size=25)))
    text = BACKEND.decode(list(tokens))
    at = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stops = [stop] if (stop := text[at : at + data.draw(st.integers(1, 4))]) else []
    min_tokens = data.draw(st.integers(0, 3))
    cut = data.draw(st.integers(0, len(tokens)))

    def run(*deltas: Delta) -> tuple[str, list[object], int, object]:
        one = answer(*stops, min_tokens=min_tokens, logprobs=True)
        parts = [one.on_delta(delta) for delta in deltas if one.finish_reason is None]
        placed = [placed for part in parts for placed in part.logprobs]
        return "".join([part.text for part in parts]), placed, one.completion_tokens, one.finish_reason

    def delta(part: tuple[int, ...], reason: FinishReason | None = None) -> Delta:
        return Delta(part, reason, logprobs=logprobs(part))

    whole = run(delta(tokens, FinishReason.LENGTH))
    assert run(delta(tokens[:cut]), delta(tokens[cut:], FinishReason.LENGTH)) == whole
    assert run(*[delta((token,)) for token in tokens], delta((), FinishReason.LENGTH)) == whole


TWO_CALLS = (
    'Hm.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n'
    "</tool_call>"
)


@given(st.lists(st.integers(1, 200), max_size=4), st.booleans(), st.sampled_from([(), ("zzz",)]))
@settings(max_examples=examples(60))
def test_without_parallel_calls_a_second_call_ends_the_answer(
    cuts: list[int], wants_logprobs: bool, stops: tuple[str, ...]
) -> None:
    """However the tokens are cut into deltas: what is told, counted and scored is the same."""
    tokens = ids(TWO_CALLS)

    def run(deltas: list[tuple[int, ...]]) -> tuple[list[Event], int, list[int]]:
        parser = answer_format("hermes", "none", "").parser(TOOLS, "", is_guided=False)
        one = GrowingAnswer(DECODER.stream(), stops, logprobs=wants_logprobs, parser=parser, only_one_call=True)
        told = [Delta(some, logprobs=logprobs(some) if wants_logprobs else None) for some in deltas]
        parts = [one.on_delta(delta) for delta in told if one.finish_reason is None]
        assert one.finish_reason is FinishReason.STOP
        events = merge([event for part in parts for event in part.events])
        scored = [placed.entry.token_id for part in parts for placed in part.logprobs]
        assert scored == (list(tokens[: one.completion_tokens]) if wants_logprobs else [])
        return events, one.completion_tokens, scored

    edges = [0, *sorted({cut % len(tokens) for cut in cuts} - {0}), len(tokens)]
    in_parts = run([tokens[begin:end] for begin, end in pairwise(edges)])
    assert in_parts == run([(token,) for token in tokens])
    events, completion_tokens, _ = in_parts
    assert [event for event in events if isinstance(event, CallBegun)] == [CallBegun(0, "f")]
    assert completion_tokens < len(tokens)
