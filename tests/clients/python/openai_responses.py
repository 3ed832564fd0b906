"""Run the flows of openai-python with responses."""

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
ASK = {"role": "user", "content": QUESTION}
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": WEATHER_ABOUT,
    "parameters": WEATHER_SCHEMA,
    "strict": False,
}
CALLING = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_output_tokens": TOOL_TOKENS}


class Person(BaseModel):
    name: str
    age: int


@flows.flow
def chat():
    answer = client.responses.create(input=QUESTION, **GREEDY)
    equal((answer.output_text, answer.error), (chat_text(QUESTION), None), "the answer")


@flows.flow
def stream():
    with client.responses.stream(input=QUESTION, **GREEDY) as events:
        kept = list(events)
    pieces = [event.delta for event in kept if event.type == "response.output_text.delta"]
    check(len(pieces) > 1, "a stream of one piece")
    equal("".join(pieces), chat_text(QUESTION), "the stream")
    equal(kept[-1].response.output_text, "".join(pieces), "the response of the last event")
    equal([event.sequence_number for event in kept], list(range(len(kept))), "the numbers of the events")


@flows.flow
def second_turn():
    first = client.responses.create(input=[ASK], **GREEDY)
    follow_up = {"role": "user", "content": FOLLOW_UP}
    second = client.responses.create(input=[ASK, *first.output, follow_up], **GREEDY)
    equal(second.output_text, chat_text(QUESTION, first.output_text, FOLLOW_UP), "the second answer")
    check(second.usage.input_tokens_details.cached_tokens > 0, "no cached tokens in the second turn")
    dumped = [item.model_dump() for item in first.output]
    equal(
        client.responses.create(input=[ASK, *dumped, follow_up], **GREEDY).output_text, second.output_text, "with nulls"
    )


@flows.flow
def tools():
    question = {"role": "user", "content": WEATHER}
    first = client.responses.create(input=[question], **CALLING)
    calls = [item for item in first.output if item.type == "function_call"]
    equal([call.name for call in calls], ["get_weather"], f"the calls ({first.output_text!r})")
    equal(list(json.loads(calls[0].arguments)), ["city"], "the arguments")
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": SUNNY}
    second = client.responses.create(input=[question, *first.output, result], **CALLING)
    equal([item.type for item in second.output], ["message"], "what comes after the result")
    check(second.output_text, "no text after the result")
    return second.output_text


@flows.flow
def structured():
    answer = client.responses.parse(
        model=MODEL, input=ABOUT_ANNA, text_format=Person, temperature=0, max_output_tokens=OBJECT_TOKENS
    )
    check(isinstance(answer.output_parsed, Person), f"parsed: {answer.output_text!r}")


@flows.flow
def usage():
    used = client.responses.create(input=QUESTION, **GREEDY).usage
    check(used.input_tokens > 0 and used.output_tokens == TOKENS, str(used))
    equal(used.total_tokens, used.input_tokens + used.output_tokens, "the sum")
    equal(client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens, used.input_tokens, "counted")


@flows.flow
def error():
    missing = error_of(lambda: client.responses.create(model="nonsense", input=QUESTION))
    check_error(missing, openai.NotFoundError, "nonsense", "does not exist")
    bad = error_of(lambda: client.responses.create(model=MODEL, input=QUESTION, temperature=9))
    check_error(bad, openai.BadRequestError, "temperature")
    equal(bad.param, "temperature", "param")


@flows.flow
def cancel():
    events = slow.responses.create(model=MODEL, input=QUESTION, stream=True, max_output_tokens=1000)
    for event in events:
        if event.type == "response.output_text.delta":
            break
    check_running()
    events.close()
    return check_cancelled()


flows.run()
