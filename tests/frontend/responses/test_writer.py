"""However an answer is cut into pieces, its stream tells what the whole answer says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.frontend.answer import Part, PlacedLogprob
from kvmesh.frontend.job import Job, prepare
from kvmesh.frontend.models import Model, ModelRegistry
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.responses.dialect import ResponsesDialect
from kvmesh.frontend.whole_answer import WholeAnswer
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Delta, FinishReason, TokenLogprob
from tests.frontend import tiny
from tests.frontend.responses.serving import ASKED, WEATHER, calling, checked, ids, put_together, read_events
from tests.support.budget import examples

PIECES = st.sampled_from(
    ["Once", " upon\n\n", "<think>\n", "\n</think>\n\n", "🦊", calling("Köln"), calling("Ulm"), "<tool_"]
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)
KINDS = ("reasoning", "message", "function_call")


@pytest.fixture(scope="module")
def model(thinking_model: Path) -> Model:
    async def load() -> Model:
        models = ModelRegistry()
        card = tiny.card("w", path=thinking_model, context_tokens=8192)
        models.add(replace(card, tool_parser="hermes", reasoning_parser="qwen3"))
        return await models.get("tiny")

    return asyncio.run(load())


def job_for(model: Model, **fields: Any) -> Job:
    call = ResponsesDialect().parse(json.dumps(ASKED | {"tools": [WEATHER]} | fields).encode())
    return asyncio.run(prepare(call, model, RequestId("resp-1"), 0.0))


def cut(text: str, sizes: list[int], reason: FinishReason) -> list[Delta]:
    """The text's tokens, so many to a delta; the sizes are gone through again and again."""
    tokens, deltas = ids(text), []  # type: tuple[int, ...], list[Delta]
    while tokens:
        size = sizes[len(deltas) % len(sizes)]
        entries = tuple(TokenLogprob(token, -0.5) for token in tokens[:size])
        deltas.append(Delta(tokens[:size], logprobs=entries))
        tokens = tokens[size:]
    return [*deltas, Delta((), reason)]


def answered(job: Job, deltas: list[Delta]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the whole answer, the events of the stream)."""
    dialect = ResponsesDialect()
    writer, whole = dialect.writer(job), WholeAnswer(0)
    chunks = []
    for delta in deltas:
        part = job.branches[0].answer.on_delta(delta)
        whole.add(part)
        chunks.append(writer.part(0, part))
    reason = job.branches[0].answer.finish_reason
    assert reason is not None
    whole.finish_reason = reason
    chunks += [writer.finish(0, reason), writer.end(job.counts())]
    stream = writer.opening() + b"".join(chunks)  # opened late, as the outlet does
    return json.loads(dialect.whole(job, [whole], job.counts())), read_events(stream.decode())


def text_of(item: dict[str, Any]) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def joined(items: list[dict[str, Any]], kind: str) -> str:
    return "".join([text_of(item) for item in items if item["type"] == kind])


@settings(max_examples=examples(60))
@given(st.lists(PIECES, max_size=8), SIZES, st.sampled_from(FinishReason), st.booleans())
def test_a_stream_and_a_whole_answer_say_the_same(
    model: Model, pieces: list[str], sizes: list[int], reason: FinishReason, wants_logprobs: bool
) -> None:
    include = ["message.output_text.logprobs"] if wants_logprobs else []
    body, events = answered(job_for(model, include=include), cut("".join(pieces), sizes, reason))
    final = events[-1]["response"]
    items = put_together(events)
    assert items == final["output"]
    assert checked(body)["status"] == final["status"]
    for name in ("usage", "incomplete_details", "text", "tools", "id"):
        assert body[name] == final[name]
    for kind in KINDS:
        assert joined(items, kind) == joined(body["output"], kind)
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1)
    for item in items:
        if item["type"] == "message" and not wants_logprobs:
            assert item["content"][0]["logprobs"] == []


@settings(max_examples=examples(30))
@given(st.lists(PIECES, min_size=1, max_size=6), SIZES, st.integers(0, 40))
def test_a_stream_that_breaks_off_tells_what_was_said(
    model: Model, pieces: list[str], sizes: list[int], taken: int
) -> None:
    job = job_for(model)
    writer = ResponsesDialect().writer(job)
    deltas = cut("".join(pieces), sizes, FinishReason.STOP)[:-1][:taken]
    chunks = [writer.part(0, job.branches[0].answer.on_delta(delta)) for delta in deltas]
    stream = b"".join([writer.opening(), *chunks, writer.error(EngineError("broken"), "resp-1")])
    *events, error, failed = read_events(stream.decode())
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    said = "".join([event["delta"] for event in events if "delta" in event])
    output = checked(failed["response"])["output"]
    assert "".join([text_of(item) for item in output]) == said
    assert not any(event["type"] == "response.completed" for event in events)


# --- logprobs: a parser may hold text back, and what it holds may turn out to be no text ---------------


def part(token: str, *events: Event) -> Part:
    """A token and what a parser makes of the text so far."""
    return Part(events, [PlacedLogprob(TokenLogprob(token_id, -0.5), 0) for token_id in ids(token)])


def told(model: Model, *parts: Part) -> list[tuple[str, str]]:
    """Return (delta, tokens that came with it) of all prose."""
    job = job_for(model, include=["message.output_text.logprobs"])
    writer = ResponsesDialect().writer(job)
    chunks = [writer.opening(), *[writer.part(0, each) for each in parts]]
    chunks += [writer.finish(0, FinishReason.STOP), writer.end(job.counts())]
    events = read_events(b"".join(chunks).decode())
    put_together(events)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    return [(event["delta"], "".join([entry["token"] for entry in event["logprobs"]])) for event in deltas]


def test_logprobs_of_text_held_back_come_with_it(model: Model) -> None:
    assert told(model, part("<"), part("b", Content("<b"))) == [("<b", "<b")]
    assert told(model, part("a", Content("a")), part("<"), part("b", Content("<b"))) == [("a", "a"), ("<b", "<b")]


def test_logprobs_of_what_never_shows_come_last(model: Model) -> None:
    assert told(model, part("a", Content("a")), part(" ")) == [("a", "a"), ("", " ")]


@pytest.mark.parametrize(
    "other",
    [
        (part("<t>"), part("x", Reasoning("x")), part("</t>")),
        (part("<t>"), part("x", Reasoning("x"))),
        (part("<c>"), part("{", CallBegun(0, "weather")), part("}", CallArguments(0, "{}")), part("</c>")),
        (part("<c>"), part("{", CallBegun(0, "weather"), CallArguments(0, "{")), part("}", CallArguments(0, "}"))),
    ],
)
def test_logprobs_of_thoughts_calls_and_markers_are_left_out(model: Model, other: tuple[Part, ...]) -> None:
    assert told(model, *other, part("b", Content("b"))) == [("b", "b")]
    before = part("a", Content("a"))
    assert told(model, before, *other, part("b", Content("b"))) == [("a", "a"), ("b", "b")]


def test_call_ids_written_by_the_model_are_kept(model: Model) -> None:
    writer = ResponsesDialect().writer(job_for(model))
    chunk = writer.part(0, Part((CallBegun(0, "weather", "functions.weather:0"), CallArguments(0, "{}"))))
    assert b'"call_id":"functions.weather:0"' in chunk
