"""Run the flows of the OpenAI Agents SDK, with chat completions or, its default, with responses.

The argument is `chat` or `responses`.
"""

import asyncio
import sys

import openai
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from flows import (
    ABOUT_ANNA,
    FOLLOW_UP,
    KEY,
    MODEL,
    OBJECT_TOKENS,
    QUESTION,
    SLOW_URL,
    SUNNY,
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

flows = Flows("openai-agents")
TOKENS = 200  # the SDK takes a response that its limit cut off for an error


def config(url: str = URL) -> RunConfig:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return RunConfig(model_provider=OpenAIProvider(openai_client=client, use_responses=sys.argv[1] == "responses"))


def agent(tokens: int = TOKENS, **fields):
    settings = ModelSettings(temperature=fields.pop("temperature", 0), max_tokens=tokens, include_usage=True)
    return Agent(**{"name": "Assistant", "model": MODEL, "model_settings": settings, **fields})


class Person(BaseModel):
    name: str
    age: int


CALLED: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    CALLED.append(city)
    return SUNNY


async def deltas(run):
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            yield event.data.delta


@flows.flow
async def chat():
    result = await Runner.run(agent(), QUESTION, run_config=config())
    equal(result.final_output, chat_text(QUESTION, max_tokens=TOKENS), "the answer")


@flows.flow
async def stream():
    run = Runner.run_streamed(agent(), QUESTION, run_config=config())
    pieces = [piece async for piece in deltas(run)]
    check(len(pieces) > 1, "a stream of one piece")
    equal("".join(pieces), chat_text(QUESTION, max_tokens=TOKENS), "the stream")
    equal(run.final_output, "".join(pieces), "the final output")


@flows.flow
async def second_turn():
    first = await Runner.run(agent(), QUESTION, run_config=config())
    history = [*first.to_input_list(), {"role": "user", "content": FOLLOW_UP}]
    second = await Runner.run(agent(), history, run_config=config())
    equal(
        second.final_output, chat_text(QUESTION, first.final_output, FOLLOW_UP, max_tokens=TOKENS), "the second answer"
    )
    check(second.context_wrapper.usage.input_tokens_details.cached_tokens > 0, "no cached tokens in the second turn")


@flows.flow
async def tools():
    result = await Runner.run(agent(TOOL_TOKENS, tools=[get_weather]), WEATHER, run_config=config(), max_turns=3)
    equal(len(CALLED), 1, f"how often the tool was called ({result.final_output!r})")
    kinds = [item.type for item in result.new_items]
    equal(kinds, ["tool_call_item", "tool_call_output_item", "message_output_item"], "the items")
    check(result.final_output, "no text at the end")
    return result.final_output


@flows.flow
async def structured():
    result = await Runner.run(agent(OBJECT_TOKENS, output_type=Person), ABOUT_ANNA, run_config=config())
    check(isinstance(result.final_output, Person), f"the output: {result.final_output!r}")


@flows.flow
async def usage():
    used = (await Runner.run(agent(), QUESTION, run_config=config())).context_wrapper.usage
    equal((used.requests, used.input_tokens > 0, used.output_tokens > 0), (1, True, True), f"usage: {used}")
    equal(used.total_tokens, used.input_tokens + used.output_tokens, "the sum")
    run = Runner.run_streamed(agent(), QUESTION, run_config=config())
    check([piece async for piece in deltas(run)], "an empty stream")
    equal(run.context_wrapper.usage.total_tokens, used.total_tokens, "the stream's usage")


@flows.flow
async def error():
    for wrong, kind, part in (
        ({"model": "nonsense"}, openai.NotFoundError, "does not exist"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ):
        try:
            await Runner.run(agent(**wrong), QUESTION, run_config=config())
        except Exception as raised:
            check_error(raised, kind, part)
        else:
            raise AssertionError(f"{wrong} raised nothing")


@flows.flow
async def cancel():
    run = Runner.run_streamed(agent(1000), QUESTION, run_config=config(SLOW_URL))
    async for _ in deltas(run):
        check_running()
        run.cancel()
        break
    return await asyncio.to_thread(check_cancelled)


flows.run()
