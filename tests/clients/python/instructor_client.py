"""Run the flows of instructor on openai-python."""

import json

import instructor
import openai
from flows import (
    ABOUT_ANNA,
    FOLLOW_UP,
    KEY,
    MODEL,
    OBJECT_TOKENS,
    QUESTION,
    SLOW_URL,
    TOKENS,
    URL,
    Flows,
    chat_text,
    check,
    check_cancelled,
    check_error,
    check_running,
    equal,
    error_of,
)
from instructor import Mode
from instructor.v2.core.errors import InstructorRetryException
from pydantic import BaseModel

flows = Flows("instructor")
ASK = {"role": "user", "content": QUESTION}
ASK_FOR_ANNA = {"role": "user", "content": ABOUT_ANNA}
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
FILLING = {"model": MODEL, "temperature": 0, "max_tokens": OBJECT_TOKENS, "max_retries": 1}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def client(mode: Mode = Mode.TOOLS, url: str = URL):
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=mode)


def whole():
    return client().chat.completions.create(response_model=None, messages=[ASK], **GREEDY)


@flows.flow
def chat():
    equal(whole().choices[0].message.content, chat_text(QUESTION), "the answer")


@flows.flow
def stream():
    """Stream an object whose fields come one by one."""
    pieces = list(client().chat.completions.create_partial(response_model=Person, messages=[ASK_FOR_ANNA], **FILLING))
    check(len(pieces) > 1, "a stream of one piece")
    check(pieces[0].age is None, f"the first state is whole already: {pieces[0]}")
    equal((type(pieces[-1].name), type(pieces[-1].age)), (str, int), f"the last state: {pieces[-1]}")


@flows.flow
def second_turn():
    first = whole().choices[0].message
    messages = [ASK, first.model_dump(), {"role": "user", "content": FOLLOW_UP}]
    second = client().chat.completions.create(response_model=None, messages=messages, **GREEDY)
    equal(second.choices[0].message.content, chat_text(QUESTION, first.content, FOLLOW_UP), "the second answer")


@flows.flow
def tools():
    """Fill an object by a forced tool call, then go on with the call in the history: instructor's own round trip."""
    person, answer = client().chat.completions.create_with_completion(
        response_model=Person, messages=[ASK_FOR_ANNA], **FILLING
    )
    [call] = answer.choices[0].message.tool_calls
    sent = json.loads(call.function.arguments)  # a schema that allows other fields may get some
    equal((call.function.name, sent["name"], sent["age"]), ("Person", person.name, person.age), "the call")
    result = {"role": "tool", "tool_call_id": call.id, "content": "not old enough"}
    again = client().chat.completions.create(
        response_model=Person, messages=[ASK_FOR_ANNA, answer.choices[0].message.model_dump(), result], **FILLING
    )
    check(isinstance(again, Person), f"after the result: {again!r}")


@flows.flow
def structured():
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON):
        person = client(mode).chat.completions.create(response_model=Person, messages=[ASK_FOR_ANNA], **FILLING)
        check(isinstance(person, Person), f"{mode}: {person!r}")


@flows.flow
def usage():
    _, answer = client().chat.completions.create_with_completion(
        response_model=Person, messages=[ASK_FOR_ANNA], **FILLING
    )
    used = answer.usage
    check(used.prompt_tokens > 0 and used.completion_tokens > 0, str(used))
    equal(used.total_tokens, used.prompt_tokens + used.completion_tokens, "the sum")


@flows.flow
def error():
    missing = {**FILLING, "model": "nonsense"}
    raised = error_of(
        lambda: client().chat.completions.create(response_model=Person, messages=[ASK_FOR_ANNA], **missing)
    )
    check_error(raised, InstructorRetryException, "nonsense", "does not exist")
    bad = {**FILLING, "temperature": 9}
    raised = error_of(lambda: client().chat.completions.create(response_model=Person, messages=[ASK_FOR_ANNA], **bad))
    check_error(raised, InstructorRetryException, "temperature")


@flows.flow
def cancel():
    chunks = client(url=SLOW_URL).chat.completions.create(
        response_model=None, messages=[ASK], model=MODEL, stream=True, max_tokens=1000
    )
    for _ in range(3):
        next(chunks)
    check_running()
    chunks.close()
    return check_cancelled()


flows.run()
