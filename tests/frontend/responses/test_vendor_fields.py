"""Our responses have the fields that OpenAI sends: no more, no fewer, and null where its own are null."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai.types.responses as client
import openai.types.responses.response_usage as usage
import openai.types.shared as shared
import pydantic
import pytest
from openai.types.responses.input_token_count_response import InputTokenCountResponse

from kvmesh.frontend.responses.memory_store import MemoryStore
from kvmesh.frontend.responses.retention import StoreLimits
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.protocol.errors import PeerLostError
from kvmesh.protocol.messages import Delta, FinishReason
from tests.frontend.responses.serving import ASKED, WEATHER, Served, calling, ids, serving, words
from tests.frontend.vendor_fields import NEEDED, differences, facts

SCHEMA = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
ASKING_FOR_ALL: dict[str, Any] = {
    "instructions": "Be brief.", "tools": [WEATHER], "max_output_tokens": 90, "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 1, "user": "me",
    "reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_key": "k", "kvmesh": {"trace": True},
}  # fmt: skip
SCRIPTS: dict[str, list[Any]] = {
    "text": words("Once", " upon"),
    "nothing": words(),
    "thoughts, text and a call": words("<think>\nHmm.\n</think>\n\n", "I look.", calling("Ulm")),
    "a cut": [Delta(ids("one")), Delta((), FinishReason.LENGTH)],
    "a call that is cut": [Delta(ids(calling("Köln")[:50])), Delta((), FinishReason.LENGTH)],
}


@pytest.fixture
async def storing(thinking_model: Path) -> AsyncIterator[Served]:
    async with serving(thinking_model, KeptResponses(MemoryStore(StoreLimits()), 4, is_keyed=False)) as served:
        yield served


@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_whole_response_has_the_vendors_fields(storing: Served, script: str) -> None:
    storing.generator.script = SCRIPTS[script]
    for fields in ({"tools": [WEATHER]}, ASKING_FOR_ALL, {"text": {"format": SCHEMA}}):
        assert differences("responses", "response", await storing.whole(**fields)) == []


@pytest.mark.parametrize("script", SCRIPTS)
async def test_every_event_has_the_vendors_fields(storing: Served, script: str) -> None:
    storing.generator.script = SCRIPTS[script]
    for fields in ({"tools": [WEATHER]}, ASKING_FOR_ALL, {"tools": [WEATHER], "background": True}):
        for event in await storing.events(**fields):
            assert differences("responses", "event", event) == []


async def test_a_broken_stream_has_the_vendors_fields(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    for event in await storing.events():
        assert differences("responses", "event", event) == []


async def test_stored_responses_have_the_vendors_fields(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), asyncio.Event()]
    begun = await storing.whole(background=True, tools=[WEATHER])
    assert differences("responses", "response", begun) == []
    _, _, ended = await storing.ask("POST", f"/v1/responses/{begun['id']}/cancel")
    assert differences("responses", "response", ended) == []
    storing.generator.script = SCRIPTS["thoughts, text and a call"]
    first = await storing.whole(tools=[WEATHER])
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    second = await storing.whole(input=[{"role": "user", "content": "hi"}, *first["output"], output])
    _, _, items = await storing.ask("GET", f"/v1/responses/{second['id']}/input_items")
    assert len(items["data"]) == 5
    assert differences("responses", "items", items) == []
    _, _, deleted = await storing.ask("DELETE", f"/v1/responses/{second['id']}")
    assert differences("responses", "deleted", deleted) == []
    _, _, counted = await storing.post(ASKED, path="/v1/responses/input_tokens")
    assert differences("responses", "count", counted) == []


@pytest.mark.parametrize("fields", [{"model": "gpt"}, {"top_p": 7}, {"previous_response_id": "resp_none"}], ids=str)
async def test_a_failure_has_the_vendors_fields(storing: Served, fields: dict[str, Any]) -> None:
    status, _, body = await storing.post(ASKED | fields)
    assert status in (400, 404)
    assert differences("responses", "failure", body) == []


TYPES: dict[str, type[pydantic.BaseModel]] = {
    "response": client.Response,
    "response_error": client.ResponseError,
    "reasoning": shared.Reasoning,
    "text": client.ResponseTextConfig,
    "tool:function": client.FunctionTool,
    "usage": client.ResponseUsage,
    "input_details": usage.InputTokensDetails,
    "output_details": usage.OutputTokensDetails,
    "item:message": client.ResponseOutputMessage,
    "item:reasoning": client.ResponseReasoningItem,
    "item:function_call": client.ResponseFunctionToolCallItem,
    "item:function_call_output": client.ResponseFunctionToolCallOutputItem,
    "part:output_text": client.ResponseOutputText,
    "event:response.created": client.ResponseCreatedEvent,
    "event:response.queued": client.ResponseQueuedEvent,
    "event:response.failed": client.ResponseFailedEvent,
    "event:error": client.ResponseErrorEvent,
    "event:response.output_item.done": client.ResponseOutputItemDoneEvent,
    "event:response.content_part.done": client.ResponseContentPartDoneEvent,
    "event:response.output_text.delta": client.ResponseTextDeltaEvent,
    "event:response.output_text.done": client.ResponseTextDoneEvent,
    "event:response.reasoning_text.delta": client.ResponseReasoningTextDeltaEvent,
    "event:response.reasoning_text.done": client.ResponseReasoningTextDoneEvent,
    "event:response.function_call_arguments.delta": client.ResponseFunctionCallArgumentsDeltaEvent,
    "event:response.function_call_arguments.done": client.ResponseFunctionCallArgumentsDoneEvent,
    "count": InputTokenCountResponse,
}


@pytest.mark.parametrize("kind", TYPES)
def test_the_facts_agree_with_the_types_of_the_client(kind: str) -> None:
    """A required field has to be sent, and a field of a newer client has to get a fact."""
    table, fields = facts("responses")[kind], TYPES[kind].model_fields
    assert set(fields) <= set(table), "these fields of the client need facts"
    required = {name for name, field in fields.items() if field.is_required()}
    assert required <= {name for name, fact in table.items() if fact.sent in NEEDED}
