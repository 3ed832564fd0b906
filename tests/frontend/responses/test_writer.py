"""However an answer is cut into pieces, its stream tells what the whole answer says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from frontend.models import Model, ModelRegistry
from frontend.pipeline import Job, prepare
from frontend.responses.dialect import ResponsesDialect
from frontend.whole import Whole
from protocol.errors import EngineError
from protocol.ids import RequestId
from protocol.messages import Delta, FinishReason, TokenLogprob
from tests.frontend import tiny
from tests.frontend.responses.serving import ASKED, WEATHER, calling, checked, ids, put_together, read_events

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
    """(the whole answer, the events of the stream)."""
    dialect = ResponsesDialect()
    writer, whole = dialect.writer(job), Whole(0)
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


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=30, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=6), SIZES, st.integers(0, 40))
def test_a_stream_that_breaks_off_tells_what_was_said(
    model: Model, pieces: list[str], sizes: list[int], taken: int
) -> None:
    job = job_for(model)
    writer = ResponsesDialect().writer(job)
    deltas = cut("".join(pieces), sizes, FinishReason.STOP)[:-1][:taken]
    chunks = [writer.part(0, job.branches[0].answer.on_delta(delta)) for delta in deltas]
    stream = b"".join([writer.opening(), *chunks, writer.error(EngineError("broken"))])
    *events, error, failed = read_events(stream.decode())
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    said = "".join([event["delta"] for event in events if "delta" in event])
    output = checked(failed["response"])["output"]
    assert "".join([text_of(item) for item in output]) == said
    assert not any(event["type"] == "response.completed" for event in events)
