"""The official synchronous client, over every endpoint that it has a method for: in a thread, as scripts use it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from tests.frontend.serving import CHAT, Served, able_card, serving, words

MESSAGES: list[Any] = CHAT["messages"]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
T = TypeVar("T")


@pytest.fixture
async def served(able_folder: Path) -> AsyncIterator[Served]:
    async with serving(able_card(able_folder, loras=("poet",))) as served:
        yield served


async def ask(served: Served, work: Callable[[openai.OpenAI], T]) -> T:
    def with_client() -> T:
        with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
            return work(client)

    return await asyncio.to_thread(with_client)


async def test_chats(served: Served) -> None:
    def chat(client: openai.OpenAI) -> list[str | None]:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        assert answer.usage is not None
        return [choice.message.content for choice in answer.choices]

    assert await ask(served, chat) == ["Once upon a time"] * 2


async def test_streamed_chats_with_usage(served: Served) -> None:
    def stream(client: openai.OpenAI) -> str:
        options: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options=options
        ))  # fmt: skip
        assert chunks[-1].usage is not None
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])

    assert await ask(served, stream) == "Once upon a time"


async def test_calls_of_tools_streamed_and_whole(served: Served) -> None:
    def call(client: openai.OpenAI) -> list[str]:
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[TOOL]) as stream:
            streamed = stream.get_final_completion()
        calls = [*(whole.choices[0].message.tool_calls or []), *(streamed.choices[0].message.tool_calls or [])]
        return [call.function.name for call in calls if call.type == "function"]

    served.generator.script = words(CALL)
    assert await ask(served, call) == ["weather", "weather"]


async def test_text_completions(served: Served) -> None:
    def complete(client: openai.OpenAI) -> list[str]:
        whole = client.completions.create(model="poet", prompt=["a", "b"], echo=True)
        assert whole.model == "poet"
        pieces = client.completions.create(model="tiny", prompt="a", stream=True)
        return [*[choice.text for choice in whole.choices], "".join(piece.choices[0].text for piece in pieces)]

    assert await ask(served, complete) == ["aOnce upon a time", "bOnce upon a time", "Once upon a time"]


async def test_responses(served: Served) -> None:
    def respond(client: openai.OpenAI) -> list[str]:
        whole = client.responses.create(model="tiny", input="hi", store=False)
        with client.responses.stream(model="tiny", input="hi", store=False) as stream:
            streamed = stream.get_final_response()
        return [whole.output_text, streamed.output_text]

    assert await ask(served, respond) == ["Once upon a time"] * 2


async def test_embeddings_and_models(served: Served) -> None:
    def embed(client: openai.OpenAI) -> list[float]:
        return client.embeddings.create(model="tiny", input="a").data[0].embedding

    def models(client: openai.OpenAI) -> list[str]:
        return [*[model.id for model in client.models.list()], client.models.retrieve("poet").id]

    assert len(await ask(served, embed)) == 2
    assert await ask(served, models) == ["tiny", "poet", "poet"]


async def test_mistakes_are_its_own_errors(served: Served) -> None:
    def mistakes(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="gpt", input="a")
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, temperature=0)
        assert refused.value.param == "n"

    await ask(served, mistakes)
