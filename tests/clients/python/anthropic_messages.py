"""Run the flows of Anthropic's SDK."""

import anthropic
from anthropic import beta_tool
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

flows = Flows("anthropic")
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
slow = anthropic.Anthropic(base_url=SLOW_URL, api_key=KEY, max_retries=0)
ASK = {"role": "user", "content": QUESTION}
COLDEST = {"extra_body": {"temperature": 0}}  # the SDK itself has no temperature any more
GREEDY = {"model": MODEL, "max_tokens": TOKENS, **COLDEST}
TOOL = {"name": "get_weather", "description": WEATHER_ABOUT, "input_schema": WEATHER_SCHEMA}
CALLING = {"model": MODEL, "tools": [TOOL], "max_tokens": TOOL_TOKENS, **COLDEST}


class Person(BaseModel):
    name: str
    age: int


def whole():
    return client.messages.create(messages=[ASK], **GREEDY)


@flows.flow
def chat():
    answer = whole()
    equal([block.type for block in answer.content], ["text"], "the blocks")
    equal((answer.content[0].text, answer.stop_reason), (chat_text(QUESTION), "max_tokens"), "the answer")


@flows.flow
def stream():
    with client.messages.stream(messages=[ASK], **GREEDY) as events:
        pieces = list(events.text_stream)
        final = events.get_final_message()
    check(len(pieces) > 1, "a stream of one piece")
    expected = whole()
    equal("".join(pieces), expected.content[0].text, "the stream")
    ours, theirs = final.model_dump(exclude={"id"}), expected.model_dump(exclude={"id"})
    ours["usage"], theirs["usage"] = final.usage.output_tokens, expected.usage.output_tokens
    equal(ours.pop("content")[0]["text"], theirs.pop("content")[0]["text"], "the final message's text")
    equal(ours["usage"], theirs["usage"], "the final message's usage")
    equal(final.stop_reason, expected.stop_reason, "why it stopped")


@flows.flow
def second_turn():
    first = whole()
    follow_up = {"role": "user", "content": FOLLOW_UP}
    history = [ASK, {"role": "assistant", "content": first.content}, follow_up]
    second = client.messages.create(messages=history, **GREEDY)
    equal(second.content[0].text, chat_text(QUESTION, first.content[0].text, FOLLOW_UP), "the second answer")
    check(second.usage.cache_read_input_tokens > 0, "no cached tokens in the second turn")
    dumped = [ASK, {"role": "assistant", "content": [block.model_dump() for block in first.content]}, follow_up]
    equal(client.messages.create(messages=dumped, **GREEDY).content[0].text, second.content[0].text, "with nulls")


@flows.flow
def tools():
    question = {"role": "user", "content": WEATHER}
    first = client.messages.create(messages=[question], **CALLING)
    equal(first.stop_reason, "tool_use", f"why the answer stopped ({first.content})")
    [call] = [block for block in first.content if block.type == "tool_use"]
    equal((call.name, list(call.input)), ("get_weather", ["city"]), "the call")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": SUNNY}
    history = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=history, **CALLING)
    equal([block.type for block in second.content], ["text"], "what comes after the result")
    check(second.content[0].text, "no text after the result")
    return second.content[0].text


@flows.flow
def structured():
    answer = client.messages.parse(
        model=MODEL,
        messages=[{"role": "user", "content": ABOUT_ANNA}],
        output_format=Person,
        max_tokens=OBJECT_TOKENS,
        **COLDEST,
    )
    check(isinstance(answer.parsed_output, Person), f"parsed: {answer.content}")


@flows.flow
def usage():
    used = whole().usage
    prompt = used.input_tokens + used.cache_read_input_tokens + (used.cache_creation_input_tokens or 0)
    equal((prompt > 0, used.output_tokens), (True, TOKENS), f"usage: {used}")
    equal(client.messages.count_tokens(model=MODEL, messages=[ASK]).input_tokens, prompt, "the tokens counted before")


@flows.flow
def error():
    missing = error_of(lambda: client.messages.create(model="nonsense", messages=[ASK], max_tokens=5))
    check_error(missing, anthropic.NotFoundError, "nonsense", "does not exist")
    equal((missing.type, missing.body["type"]), ("not_found_error", "error"), "the type of the error")
    bad = error_of(
        lambda: client.messages.create(model=MODEL, messages=[ASK], max_tokens=5, extra_body={"temperature": 9})
    )
    check_error(bad, anthropic.BadRequestError, "temperature")
    check(bad.request_id, "an error without request id")
    check_error(error_of(lambda: client.with_options(api_key="wrong").models.list()), anthropic.AuthenticationError)


@flows.flow
def cancel():
    with slow.messages.stream(model=MODEL, messages=[ASK], max_tokens=1000) as events:
        for _, _ in zip(range(3), events.text_stream, strict=False):
            pass
        check_running()
    return check_cancelled()


@flows.flow
def models():
    [model] = client.models.list()
    equal((model.id, model.type), (MODEL, "model"), "the model")
    equal(client.models.retrieve(MODEL).model_dump(), model.model_dump(), "the same model by its name")
    check_error(error_of(lambda: client.models.retrieve("nonsense")), anthropic.NotFoundError, "nonsense")


@beta_tool
def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: The city's name.
    """
    CALLED.append(city)
    return SUNNY


CALLED: list[str] = []


@flows.flow
def tool_runner():
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[get_weather],
        **COLDEST,
        max_tokens=TOOL_TOKENS,
    )
    final = runner.until_done()
    equal(len(CALLED), 1, "how often the tool was called")
    check(final.content[-1].text, "no text at the end")


flows.run()
