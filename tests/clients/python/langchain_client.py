"""Run the flows of LangChain, with langchain-openai or with langchain-anthropic.

The argument is `openai`, `openai-responses` or `anthropic`.
"""

import asyncio
import sys

import anthropic
import openai
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
    error_of,
)
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

DIALECT = sys.argv[1]
SDK = anthropic if DIALECT == "anthropic" else openai
flows = Flows("langchain-anthropic" if DIALECT == "anthropic" else "langchain-openai")


def chat_model(url: str = URL, name: str = MODEL, tokens: int = TOKENS, temperature: float = 0):
    settings = {"model": name, "api_key": KEY, "max_tokens": tokens, "max_retries": 0, "temperature": temperature}
    if DIALECT == "anthropic":
        return ChatAnthropic(base_url=url, **settings)
    return ChatOpenAI(base_url=f"{url}/v1", use_responses_api=DIALECT == "openai-responses", **settings)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return SUNNY


@flows.flow
def chat():
    equal(chat_model().invoke(QUESTION).text, chat_text(QUESTION), "the answer")


@flows.flow
def stream():
    chunks = list(chat_model().stream(QUESTION))
    check(len([chunk for chunk in chunks if chunk.text]) > 1, "a stream of one piece")
    equal("".join(chunk.text for chunk in chunks), chat_text(QUESTION), "the stream")


@flows.flow
def second_turn():
    ask = HumanMessage(QUESTION)
    first = chat_model().invoke([ask])
    second = chat_model().invoke([ask, first, HumanMessage(FOLLOW_UP)])
    equal(second.text, chat_text(QUESTION, first.text, FOLLOW_UP), "the second answer")
    check(second.usage_metadata["input_token_details"]["cache_read"] > 0, "no cached tokens in the second turn")
    whole = None
    for chunk in chat_model().stream([ask]):
        whole = chunk if whole is None else whole + chunk
    equal(chat_model().invoke([ask, whole, HumanMessage(FOLLOW_UP)]).text, second.text, "after a streamed answer")


@flows.flow
def tools():
    calling = chat_model(tokens=TOOL_TOKENS).bind_tools([get_weather])
    question = HumanMessage(WEATHER)
    first = calling.invoke([question])
    equal([(call["name"], list(call["args"])) for call in first.tool_calls], [("get_weather", ["city"])], first.text)
    [call] = first.tool_calls
    result = get_weather.invoke(call)
    check(isinstance(result, ToolMessage), "the tool's result")
    second = calling.invoke([question, first, result])
    check(second.text and not second.tool_calls, f"after the result: {second}")
    return second.text


@flows.flow
def structured():
    methods = ["json_schema", "function_calling"]
    for method in methods:
        model = chat_model(tokens=OBJECT_TOKENS).with_structured_output(Person, method=method)
        answer = model.invoke(ABOUT_ANNA)
        check(isinstance(answer, Person), f"{method}: {answer!r}")


@flows.flow
def usage():
    used = chat_model().invoke(QUESTION).usage_metadata
    check(used["input_tokens"] > 0 and used["output_tokens"] == TOKENS, str(used))
    equal(used["total_tokens"], used["input_tokens"] + used["output_tokens"], "the sum")
    streaming = chat_model()
    if DIALECT == "openai":
        streaming.stream_usage = True  # off by default for a base_url of one's own
    found = [chunk.usage_metadata for chunk in streaming.stream(QUESTION) if chunk.usage_metadata]
    equal(sum(one["total_tokens"] for one in found), used["total_tokens"], "the stream's usage")


@flows.flow
def error():
    check_error(error_of(lambda: chat_model(name="nonsense").invoke(QUESTION)), SDK.NotFoundError, "does not exist")
    check_error(error_of(lambda: chat_model(temperature=9).invoke(QUESTION)), SDK.BadRequestError, "temperature")
    check_error(error_of(lambda: list(chat_model(name="nonsense").stream(QUESTION))), SDK.NotFoundError, "nonsense")


@flows.flow
async def cancel():
    pieces = chat_model(SLOW_URL, tokens=1000).astream(QUESTION)
    for _ in range(3):
        await anext(pieces)
    check_running()
    await pieces.aclose()
    return await asyncio.to_thread(check_cancelled)


flows.run()
