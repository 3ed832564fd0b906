"""Run the flows of openai-python with chat completions."""

import json

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
    WEATHER_ABOUT,
    WEATHER_SCHEMA,
    Flows,
    asked,
    chat_text,
    check,
    check_cancelled,
    check_error,
    check_running,
    equal,
    error_of,
)
from pydantic import BaseModel

flows = Flows("openai")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
slow = openai.OpenAI(base_url=f"{SLOW_URL}/v1", api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": QUESTION}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
FUNCTION = {"name": "get_weather", "description": WEATHER_ABOUT, "parameters": WEATHER_SCHEMA}
CALLING = {
    "model": MODEL,
    "tools": [{"type": "function", "function": FUNCTION}],
    "temperature": 0,
    "max_tokens": TOOL_TOKENS,
}


class Person(BaseModel):
    name: str
    age: int


def whole():
    return client.chat.completions.create(messages=ASK, **GREEDY)


@flows.flow
def chat():
    equal(whole().choices[0].message.content, chat_text(QUESTION), "the answer")


@flows.flow
def stream():
    with client.chat.completions.create(messages=ASK, stream=True, **GREEDY) as chunks:
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    check(len([piece for piece in pieces if piece]) > 1, "a stream of one piece")
    equal("".join(pieces), whole().choices[0].message.content, "the stream")
    with client.chat.completions.stream(messages=ASK, **{**GREEDY, "max_tokens": 400}) as events:
        last = events.get_final_completion()
    check(last.choices[0].message.content.startswith("".join(pieces)), "the helper's final text is another")


@flows.flow
def second_turn():
    first = whole().choices[0].message
    second = client.chat.completions.create(messages=[*ASK, first, {"role": "user", "content": FOLLOW_UP}], **GREEDY)
    equal(second.choices[0].message.content, chat_text(QUESTION, first.content, FOLLOW_UP), "the second answer")
    check(second.usage.prompt_tokens_details.cached_tokens > 0, "no cached tokens in the second turn")
    echoed = [*ASK, first.model_dump(), {"role": "user", "content": FOLLOW_UP}]
    dumped = client.chat.completions.create(messages=echoed, **GREEDY)
    equal(dumped.choices[0].message.content, second.choices[0].message.content, "the answer to an object with nulls")


@flows.flow
def tools():
    question = {"role": "user", "content": WEATHER}
    first = client.chat.completions.create(messages=[question], **CALLING).choices[0]
    equal(first.finish_reason, "tool_calls", f"why the answer ended ({first.message.content!r})")
    [call] = first.message.tool_calls
    equal(call.function.name, "get_weather", "the tool")
    equal(list(json.loads(call.function.arguments)), ["city"], "the arguments")
    result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
    second = client.chat.completions.create(messages=[question, first.message, result], **CALLING).choices[0]
    check(second.message.content and not second.message.tool_calls, f"after the result: {second.message}")
    return second.message.content


@flows.flow
def structured():
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": ABOUT_ANNA}],
        response_format=Person,
        temperature=0,
        max_tokens=OBJECT_TOKENS,
    )
    check(isinstance(answer.choices[0].message.parsed, Person), f"parsed: {answer}")


@flows.flow
def usage():
    used = whole().usage
    check(used.prompt_tokens > 0 and used.completion_tokens == TOKENS, str(used))
    equal(used.total_tokens, used.prompt_tokens + used.completion_tokens, "the sum")
    chunks = list(
        client.chat.completions.create(messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    equal((chunks[-1].choices, chunks[-1].usage.total_tokens), ([], used.total_tokens), "the last chunk")


@flows.flow
def error():
    missing = error_of(lambda: client.chat.completions.create(model="nonsense", messages=ASK))
    check_error(missing, openai.NotFoundError, "nonsense", "does not exist")
    bad = error_of(lambda: client.chat.completions.create(model=MODEL, messages=ASK, temperature=9))
    check_error(bad, openai.BadRequestError, "temperature")
    equal(bad.param, "temperature", "param")
    check_error(error_of(lambda: client.with_options(api_key="wrong").models.list()), openai.AuthenticationError)


@flows.flow
def cancel():
    chunks = slow.chat.completions.create(model=MODEL, messages=ASK, stream=True, max_tokens=1000)
    for _ in range(3):
        next(chunks)
    check_running()
    chunks.close()
    return check_cancelled()


@flows.flow
def completions():
    body = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": TOKENS}
    text = client.completions.create(**body).choices[0].text
    equal(text, asked("/v1/completions", body)["choices"][0]["text"], "the text")
    chunks = client.completions.create(stream=True, **body)
    equal("".join(chunk.choices[0].text for chunk in chunks), text, "the stream")


@flows.flow
def embeddings():
    found = client.embeddings.create(model=MODEL, input=["a garden", "a garden", "the sea"]).data
    first, same, other = ([round(x, 3) for x in one.embedding] for one in found)
    check(
        len(first) > 1 and first == same and first != other,
        "equal texts have other vectors, or other texts have equal ones",
    )


@flows.flow
def models():
    equal([model.id for model in client.models.list()], [MODEL], "the models")
    equal(client.models.retrieve(MODEL).id, MODEL, "the model")
    check_error(error_of(lambda: client.models.retrieve("nonsense")), openai.NotFoundError, "nonsense")


flows.run()
