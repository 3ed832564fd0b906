"""Run the flows of LiteLLM, with its provider for OpenAI-compatible servers or with the one for Anthropic.

The argument is the provider's name: `openai` or `anthropic`.
"""

import asyncio
import gc
import json
import sys

import litellm
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
    WEATHER_ABOUT,
    WEATHER_SCHEMA,
    Flows,
    chat_text,
    check,
    check_cancelled,
    check_error,
    check_running,
    equal,
    error_of,
)
from pydantic import BaseModel

PROVIDER = sys.argv[1]
PATH = "/v1" if PROVIDER == "openai" else ""
litellm.suppress_debug_info = True
flows = Flows("litellm")
TO = {"api_base": URL + PATH, "api_key": KEY, "num_retries": 0}
NAMED = {"model": f"{PROVIDER}/{MODEL}", **TO}
ASK = {"role": "user", "content": QUESTION}
GREEDY = {**NAMED, "temperature": 0, "max_tokens": TOKENS}
FUNCTION = {"name": "get_weather", "description": WEATHER_ABOUT, "parameters": WEATHER_SCHEMA}
CALLING = {**NAMED, "tools": [{"type": "function", "function": FUNCTION}], "temperature": 0, "max_tokens": TOOL_TOKENS}


class Person(BaseModel):
    name: str
    age: int


@flows.flow
def chat():
    choice = litellm.completion(messages=[ASK], **GREEDY).choices[0]
    equal((choice.message.content, choice.finish_reason), (chat_text(QUESTION), "length"), "the answer")


@flows.flow
def stream():
    chunks = list(litellm.completion(messages=[ASK], stream=True, **GREEDY))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    check(len(pieces) > 1, "a stream of one piece")
    equal("".join(pieces), chat_text(QUESTION), "the stream")
    built = litellm.stream_chunk_builder(chunks, messages=[ASK])
    equal(built.choices[0].message.content, "".join(pieces), "the answer built of the chunks")


@flows.flow
def second_turn():
    first = litellm.completion(messages=[ASK], **GREEDY).choices[0].message
    follow_up = {"role": "user", "content": FOLLOW_UP}
    second = litellm.completion(messages=[ASK, first, follow_up], **GREEDY)
    expected = chat_text(QUESTION, first.content, FOLLOW_UP)
    equal(second.choices[0].message.content, expected, "the second answer")
    check(second.usage.prompt_tokens_details.cached_tokens > 0, "no cached tokens in the second turn")
    dumped = litellm.completion(messages=[ASK, first.model_dump(), follow_up], **GREEDY)
    equal(dumped.choices[0].message.content, expected, "the answer to an object with nulls")


@flows.flow
def tools():
    question = {"role": "user", "content": WEATHER}
    first = litellm.completion(messages=[question], tool_choice="auto", **CALLING).choices[0]
    equal(first.finish_reason, "tool_calls", f"why the answer ended ({first.message.content!r})")
    [call] = first.message.tool_calls
    equal((call.function.name, list(json.loads(call.function.arguments))), ("get_weather", ["city"]), "the call")
    result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
    second = litellm.completion(messages=[question, first.message, result], **CALLING).choices[0]
    check(second.message.content and not second.message.tool_calls, f"after the result: {second.message}")
    return second.message.content


@flows.flow
def structured():
    answer = litellm.completion(
        messages=[{"role": "user", "content": ABOUT_ANNA}],
        response_format=Person,
        temperature=0,
        max_tokens=OBJECT_TOKENS,
        **NAMED,
    )
    Person.model_validate_json(answer.choices[0].message.content)


@flows.flow
def usage():
    used = litellm.completion(messages=[ASK], **GREEDY).usage
    check(used.prompt_tokens > 0 and used.completion_tokens == TOKENS, str(used))
    equal(used.total_tokens, used.prompt_tokens + used.completion_tokens, "the sum")
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = litellm.completion(messages=[ASK], **asked, **GREEDY)
    equal(last.usage.total_tokens, used.total_tokens, "the stream's usage")


@flows.flow
def error():
    missing = error_of(lambda: litellm.completion(messages=[ASK], **{**NAMED, "model": f"{PROVIDER}/nonsense"}))
    check_error(missing, litellm.NotFoundError, "nonsense", "does not exist")
    bad = error_of(lambda: litellm.completion(messages=[ASK], temperature=9, max_tokens=5, **NAMED))
    check_error(bad, litellm.BadRequestError, "temperature")
    wrong = error_of(lambda: litellm.completion(messages=[ASK], **{**NAMED, "api_key": "wrong"}))
    check_error(wrong, litellm.AuthenticationError)
    long = error_of(lambda: litellm.completion(messages=[{**ASK, "content": "word " * 9000}], **GREEDY))
    check_error(long, litellm.ContextWindowExceededError)


@flows.flow
async def cancel():
    to_slow = {**NAMED, "api_base": SLOW_URL + PATH}
    chunks = await litellm.acompletion(messages=[ASK], stream=True, max_tokens=1000, **to_slow)
    for _ in range(3):
        await anext(chunks)
    check_running()
    await chunks.aclose()
    del chunks  # with Anthropic's provider LiteLLM leaves the connection to the garbage collector
    gc.collect()
    return await asyncio.to_thread(check_cancelled)  # aiohttp closes its connection in this loop


flows.run()
