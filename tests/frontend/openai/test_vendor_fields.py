"""Our chats and completions have the fields that OpenAI sends: no more, no fewer, and null where its own are null."""

from typing import Any

import openai.types as client
import openai.types.chat as chat
import openai.types.chat.chat_completion as whole
import openai.types.chat.chat_completion_chunk as chunk
import openai.types.completion_choice as text
import openai.types.completion_usage as usage
import pydantic
import pytest

from kvmesh.protocol.errors import PeerLostError
from kvmesh.protocol.messages import Delta, FinishReason
from tests.frontend.serving import CHAT, TEXT, Served, ids, scored, words
from tests.frontend.vendor_fields import NEEDED, differences, facts

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
USAGE = {"stream_options": {"include_usage": True}}
SCRIPTS: dict[str, list[Any]] = {
    "text": words("Once", " upon"),
    "nothing": words(),
    "thoughts, text and calls": words("<think>\nHmm.\n</think>\n\n", "I look.", CALL, CALL),
    "calls alone": words(CALL),
    "a cut": [Delta(ids("one")), Delta((), FinishReason.LENGTH)],
    "logprobs": [Delta(ids("one"), logprobs=scored(ids("one"))), *words()],
}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "completions": ("/v1/completions", TEXT)}
ASKED: dict[str, list[dict[str, Any]]] = {
    "chat": [{"tools": TOOLS}, {"logprobs": True, "top_logprobs": 0, "kvmesh": {"trace": True}, "n": 2}],
    "completions": [{}, {"logprobs": 0, "kvmesh": {"trace": True}, "echo": False, "n": 2}],
}


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_whole_answer_has_the_vendors_fields(able: Served, api: str, script: str) -> None:
    path, body = PATHS[api]
    able.generator.script = SCRIPTS[script]
    for fields in ASKED[api]:
        status, _, answer = await able.post(path, body | fields)
        assert status == 200, answer
        assert differences(api, "completion", answer) == []


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("script", SCRIPTS)
async def test_every_chunk_has_the_vendors_fields(able: Served, api: str, script: str) -> None:
    path, body = PATHS[api]
    able.generator.script = SCRIPTS[script]
    for fields in [fields | more for fields in ASKED[api] for more in ({}, USAGE)]:
        *chunks, done = await able.events(path, body | fields)
        assert done == "[DONE]"
        for event in chunks:
            assert differences(api, "chunk", event) == []
        has_usage = ["usage" in event for event in chunks]
        assert set(has_usage) == {"stream_options" in fields}, "null in each chunk but the last, or left out"


@pytest.mark.parametrize("api", PATHS)
async def test_failures_have_the_vendors_fields(able: Served, api: str) -> None:
    path, body = PATHS[api]
    for fields in ({"model": "gpt"}, {"top_p": 7}):
        _, _, answer = await able.post(path, body | fields)
        assert differences(api, "failure", answer) == []
    able.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    assert differences(api, "failure", (await able.events(path, body))[-1]) == []


TYPES: dict[str, dict[str, type[pydantic.BaseModel]]] = {
    "chat": {
        "completion": chat.ChatCompletion,
        "choice": whole.Choice,
        "message": chat.ChatCompletionMessage,
        "call": chat.ChatCompletionMessageFunctionToolCall,
        "logprobs": whole.ChoiceLogprobs,
        "logprob": chat.ChatCompletionTokenLogprob,
        "usage": usage.CompletionUsage,
        "prompt_details": usage.PromptTokensDetails,
        "chunk": chat.ChatCompletionChunk,
        "chunk_choice": chunk.Choice,
        "delta": chunk.ChoiceDelta,
        "delta_call": chunk.ChoiceDeltaToolCall,
        "delta_function": chunk.ChoiceDeltaToolCallFunction,
    },
    "completions": {
        "completion": client.Completion,
        "choice": client.CompletionChoice,
        "logprobs": text.Logprobs,
        "usage": usage.CompletionUsage,
    },
}


@pytest.mark.parametrize(("api", "kind"), [(api, kind) for api, kinds in TYPES.items() for kind in kinds])
def test_the_facts_agree_with_the_types_of_the_client(api: str, kind: str) -> None:
    """A required field has to be sent, and a field of a newer client has to get a fact."""
    table, fields = facts(api)[kind], TYPES[api][kind].model_fields
    assert set(fields) <= set(table), "these fields of the client need facts"
    required = {name for name, field in fields.items() if field.is_required()}
    assert required <= {name for name, fact in table.items() if fact.sent in NEEDED}
