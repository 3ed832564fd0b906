"""However an answer is cut into pieces, its stream tells what the whole answer says."""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.frontend.anthropic.messages import MessagesDialect
from kvmesh.frontend.job import prepare
from kvmesh.frontend.models import Model, ModelRegistry
from kvmesh.frontend.whole_answer import WholeAnswer
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Delta, FinishReason
from tests.frontend import tiny
from tests.frontend.anthropic.serving import ASKED, END, WEATHER, calling, ids, put_together, read_events
from tests.support.budget import examples

PIECES = st.sampled_from(
    ["Once", " upon\n\n", "<think>\n", "\n</think>\n\n", "🦊", calling("Köln"), calling("Ulm"), "<tool_"]
)


@cache
def loaded(path: Path) -> Model:
    async def load() -> Model:
        models = ModelRegistry()
        card = tiny.card("w", path=path, context_tokens=8192)
        models.add(replace(card, tool_parser="hermes", reasoning_parser="qwen3"))
        return await models.get("tiny")

    return asyncio.run(load())


def answered(model: Model, deltas: list[Delta]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the whole answer, what the stream tells)."""
    dialect = MessagesDialect()
    call = dialect.parse(json.dumps(ASKED | {"tools": [WEATHER]}).encode())
    job = asyncio.run(prepare(call, model, RequestId("msg-1"), 0.0))
    writer, whole = dialect.writer(job), WholeAnswer(0)
    chunks = [writer.opening()]
    for delta in deltas:
        part = job.branches[0].answer.on_delta(delta)
        whole.add(part)
        chunks.append(writer.part(0, part))
    chunks += [writer.finish(0, FinishReason.STOP), writer.end(job.counts())]
    body = dialect.whole(job, [whole], job.counts())
    return json.loads(body), put_together(read_events(b"".join(chunks).decode()))


def joined(content: list[dict[str, Any]], kind: str) -> str:
    return "".join([block[kind] for block in content if block["type"] == kind])


@settings(max_examples=examples(60))
@given(st.lists(PIECES, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_stream_tells_the_whole_answer(thinking_model: Path, pieces: list[str], sizes: list[int]) -> None:
    tokens, deltas = ids("".join(pieces)), []
    while tokens:
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(Delta(tokens[:size]))
        tokens = tokens[size:]
    end = Delta((END,), FinishReason.STOP, stop_token=END)
    whole, told = answered(loaded(thinking_model), [*deltas, end])
    for name in ("model", "stop_reason", "stop_sequence", "usage"):
        assert whole[name] == told[name]
    for kind in ("text", "thinking"):
        assert joined(whole["content"], kind) == joined(told["content"], kind)
    calls, told_calls = (
        [b["input"] for b in c if b["type"] == "tool_use"] for c in (whole["content"], told["content"])
    )
    assert calls == told_calls
    assert all(block.get("text") != "" for block in told["content"]), "no block is opened for nothing"


@pytest.mark.parametrize("count", [1, 50])
def test_a_chunk_of_text_is_one_event(thinking_model: Path, count: int) -> None:
    deltas = [*[Delta(ids(" fox"))] * count, Delta((END,), FinishReason.STOP, stop_token=END)]
    _, told = answered(loaded(thinking_model), deltas)
    assert told["content"] == [{"type": "text", "text": " fox" * count}]
