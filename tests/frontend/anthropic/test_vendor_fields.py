"""Our answers have the fields that Anthropic sends: no more, no fewer, and null where its own are null."""

from typing import Any

import anthropic.types
import pydantic
import pytest

from kvmesh.protocol.errors import PeerLostError
from kvmesh.protocol.messages import Delta, FinishReason
from tests.frontend.anthropic.serving import ASKED, WEATHER, Served, calling, ids, words
from tests.frontend.vendor_fields import NEEDED, differences, facts

ASKING_FOR_ALL: dict[str, Any] = ASKED | {
    "tools": [WEATHER],
    "stop_sequences": ["STOP"],
    "thinking": {"type": "adaptive"},
    "kvmesh": {"trace": True},
}
SCRIPTS: dict[str, list[Any]] = {
    "text": words("Once", " upon"),
    "nothing": words(),
    "thoughts, text and a call": words("<think>\nHmm.\n</think>\n\n", "I look.", calling("Ulm")),
    "a stop sequence": words("one STOP two"),
    "a cut": [Delta(ids("one")), Delta((), FinishReason.LENGTH)],
    "a call that is cut": [Delta(ids(calling("Köln")[:50])), Delta((), FinishReason.LENGTH)],
}


@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_whole_answer_has_the_vendors_fields(served: Served, script: str) -> None:
    served.generator.script = SCRIPTS[script]
    for asked in (ASKED | {"tools": [WEATHER]}, ASKING_FOR_ALL):
        status, _, body = await served.post(asked)
        assert status == 200, body
        assert differences("messages", "message", body) == []


@pytest.mark.parametrize("script", SCRIPTS)
async def test_every_event_has_the_vendors_fields(served: Served, script: str) -> None:
    served.generator.script = SCRIPTS[script]
    for asked in (ASKED | {"tools": [WEATHER]}, ASKING_FOR_ALL):
        for event in await served.events(asked):
            assert differences("messages", "event", event) == []


async def test_an_error_in_a_stream_has_the_vendors_fields(served: Served) -> None:
    served.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    event = (await served.events(ASKED))[-1]
    assert event["type"] == "error"
    assert differences("messages", "event", event) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "gpt"},
        {"max_tokens": 0},
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        {"thread": {"type": "create"}},
    ],
    ids=["unknown model", "bad value", "too long", "a thread"],
)
async def test_a_failure_has_the_vendors_fields(served: Served, fields: dict[str, Any]) -> None:
    status, _, body = await served.post(ASKED | fields)
    assert status in (400, 404)
    assert differences("messages", "failure", body) == []


async def test_a_count_has_the_vendors_fields(served: Served) -> None:
    asked = {"model": "tiny", "messages": ASKED["messages"]}
    _, _, body = await served.post(asked, "/v1/messages/count_tokens")
    assert differences("messages", "count", body) == []


TYPES: dict[str, type[pydantic.BaseModel]] = {
    "message": anthropic.types.Message,
    "block:text": anthropic.types.TextBlock,
    "block:thinking": anthropic.types.ThinkingBlock,
    "block:tool_use": anthropic.types.ToolUseBlock,
    "usage": anthropic.types.Usage,
    "cache_creation": anthropic.types.CacheCreation,
    "event:message_start": anthropic.types.RawMessageStartEvent,
    "event:content_block_start": anthropic.types.RawContentBlockStartEvent,
    "event:content_block_delta": anthropic.types.RawContentBlockDeltaEvent,
    "event:content_block_stop": anthropic.types.RawContentBlockStopEvent,
    "event:message_delta": anthropic.types.RawMessageDeltaEvent,
    "event:message_stop": anthropic.types.RawMessageStopEvent,
    "usage_so_far": anthropic.types.MessageDeltaUsage,
    "count": anthropic.types.MessageTokensCount,
    "model": anthropic.types.ModelInfo,
}


@pytest.mark.parametrize("kind", TYPES)
def test_the_facts_agree_with_the_types_of_the_client(kind: str) -> None:
    """A required field has to be sent, a field of a newer client has to get a fact, null has to be allowed."""
    table, model = facts("messages")[kind], TYPES[kind]
    fields = model.model_fields
    assert set(fields) <= set(table), "these fields of the client need facts"
    required = {name for name, field in fields.items() if field.is_required()}
    assert required <= {name for name, fact in table.items() if fact.sent in NEEDED}
    for name, fact in table.items():
        if name in fields and fact.sent in ("null", "either", "nullable"):
            pydantic.TypeAdapter(fields[name].annotation).validate_python(None)
