"""The official client checks answers against the types that are made from OpenAI's document, and accepts them."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvmesh.protocol.messages import Delta, FinishReason
from tests.frontend.serving import CHAT, Served, ids, scored, words

ASK: Any = CHAT["messages"]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<think>\nHm.\n</think>\n\nSee: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def client(able: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{able.url}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def logged(text: str) -> list[Delta]:
    tokens = ids(text)
    return [Delta(tokens, FinishReason.STOP, scored(tokens))]


async def test_a_whole_chat_is_of_the_documents_type(able: Served, client: openai.AsyncOpenAI) -> None:
    able.generator.script = logged(CALL)
    answer = await client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, logprobs=True, extra_body={"kvmesh": {"trace": True}}
    )
    ChatCompletion.model_validate(answer.to_dict(), strict=True)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.role, choice.message.content) == ("tool_calls", "assistant", "See: ")
    assert choice.logprobs is not None


async def test_the_chunks_of_a_chat_are_of_the_documents_type(able: Served, client: openai.AsyncOpenAI) -> None:
    able.generator.script = logged(CALL)
    stream = await client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, logprobs=True, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
    *_, finish, usage = chunks
    assert (finish.choices[0].finish_reason, usage.choices, usage.usage is not None) == ("tool_calls", [], True)


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_a_whole_completion_is_of_the_documents_type(
    able: Served, client: openai.AsyncOpenAI, logprobs: int | None
) -> None:
    """The document has no null as finish_reason, which OpenAI sends in all chunks of a stream but the last."""
    able.generator.script = logged("once") if logprobs else words("once")
    answer = await client.completions.create(model="tiny", prompt="hi", logprobs=logprobs)
    Completion.model_validate(answer.to_dict(), strict=True)


async def test_models_and_embeddings_are_of_the_documents_types(able: Served, client: openai.AsyncOpenAI) -> None:
    for model in (await client.models.list()).data:
        Model.model_validate(model.to_dict(), strict=True)
    Model.model_validate((await client.models.retrieve("tiny")).to_dict(), strict=True)
    answer = await client.embeddings.create(model="tiny", input="hi", encoding_format="float")
    CreateEmbeddingResponse.model_validate(answer.to_dict(), strict=True)
