"""Run the flows of Pydantic AI, with its models for OpenAI's two APIs or with the one for Anthropic's.

The argument is `chat`, `responses` or `anthropic`.
"""

import asyncio
import sys

from flows import (
    ABOUT_ANNA,
    FOLLOW_UP,
    KEY,
    MODEL,
    OBJECT_TOKENS,
    QUESTION,
    SLOW_URL,
    SUNNY,
    TOKENS,
    TOOL_TOKENS,
    URL,
    WEATHER,
    Flows,
    chat_text,
    check,
    check_cancelled,
    check_error,
    check_running,
    equal,
)
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

flows = Flows("pydantic-ai-slim")


def model(url: str = URL, name: str = MODEL):
    if sys.argv[1] == "anthropic":
        profile = {"supports_json_schema_output": True}  # it knows this of Claude's models by their names
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key=KEY), profile=profile)
    kind = OpenAIChatModel if sys.argv[1] == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))


def agent(tokens: int = TOKENS, url: str = URL, name: str = MODEL, temperature: float = 0, **fields):
    settings = {"temperature": temperature, "max_tokens": tokens}
    return Agent(model(url, name), model_settings=settings, retries=0, **fields)


class Person(BaseModel):
    name: str
    age: int


CALLED: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    CALLED.append(city)
    return SUNNY


@flows.flow
async def chat():
    equal((await agent().run(QUESTION)).output, chat_text(QUESTION), "the answer")


@flows.flow
async def stream():
    async with agent().run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    check(len(pieces) > 1, "a stream of one piece")
    equal("".join(pieces), chat_text(QUESTION), "the stream")


@flows.flow
async def second_turn():
    first = await agent().run(QUESTION)
    second = await agent().run(FOLLOW_UP, message_history=first.all_messages())
    equal(second.output, chat_text(QUESTION, first.output, FOLLOW_UP), "the second answer")
    check(second.usage.cache_read_tokens > 0, "no cached tokens in the second turn")


@flows.flow
async def tools():
    result = await agent(TOOL_TOKENS, tools=[get_weather]).run(WEATHER)
    equal(len(CALLED), 1, f"how often the tool was called ({result.output!r})")
    check(result.output, "no text at the end")
    return result.output


@flows.flow
async def structured():
    for output in (NativeOutput(Person), ToolOutput(Person)):
        result = await agent(OBJECT_TOKENS, output_type=output).run(ABOUT_ANNA)
        check(isinstance(result.output, Person), f"{output}: {result.output!r}")


@flows.flow
async def usage():
    used = (await agent().run(QUESTION)).usage
    equal((used.requests, used.input_tokens > 0, used.output_tokens), (1, True, TOKENS), f"usage: {used}")
    equal(used.total_tokens, used.input_tokens + used.output_tokens, "the sum")
    async with agent().run_stream(QUESTION) as result:
        await result.get_output()
    equal(result.usage.total_tokens, used.total_tokens, "the stream's usage")


@flows.flow
async def error():
    for wrong, status, part in (
        ({"name": "nonsense"}, 404, "does not exist"),
        ({"temperature": 9}, 400, "temperature"),
    ):
        try:
            await agent(**wrong).run(QUESTION)
        except Exception as raised:
            check_error(raised, ModelHTTPError, part)
            equal(raised.status_code, status, "the status")
        else:
            raise AssertionError(f"{wrong} raised nothing")


@flows.flow
async def cancel():
    async with agent(1000, SLOW_URL).run_stream(QUESTION) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            check_running()
            await result.cancel()
            break
    return await asyncio.to_thread(check_cancelled)


flows.run()
