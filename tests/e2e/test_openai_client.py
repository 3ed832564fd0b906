"""The official client works against the mesh."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from kvmesh.protocol.messages import FrontendCard, decode
from tests.support.mesh import Mesh


@pytest.fixture
def client(shm_mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shm_mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


ASK = [{"role": "user", "content": "Tell me about a garden."}]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_tokens=30)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_tokens=30)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=ASK,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=ASK, temperature=1.2, seed=seed, max_tokens=30)
        return answer.choices[0].message.content

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(5)}) > 1


def held_to(part: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_a_schema_with_a_fault_is_refused_with_the_place(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=ASK, response_format=held_to({"type": "string", "pattern": "x(y"})
        )
    assert refused.value.param == "response_format.json_schema.schema"
    says = "In context=('properties', 'a'), 'pattern' cannot be followed: unclosed group, at character 2 of 'x(y'"
    assert says in refused.value.message


def test_unique_items_and_not_are_held_to(client: openai.OpenAI) -> None:
    colours = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "uniqueItems": True, "minItems": 3}
    number = {"type": ["integer", "null"], "not": {"type": "null"}, "minimum": 0, "maximum": 9}
    for part in (colours, number):
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, response_format=held_to(part), max_tokens=400
        )
        found = json.loads(answer.choices[0].message.content or "")["a"]
        assert found in range(10) if part is number else sorted(found) == ["blue", "green", "red"]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location.",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}


def test_the_shipped_model_calls_a_tool_and_answers_with_its_result(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    messages: list[Any] = [{"role": "user", "content": "What is the weather like in Paris today?"}]
    [choice] = client.chat.completions.create(messages=messages, **asked).choices
    [call] = choice.message.tool_calls or []
    assert (choice.finish_reason, call.type) == ("tool_calls", "function")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"location": "Paris"})
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny in Paris."}]
    [last] = client.chat.completions.create(messages=messages, **asked).choices
    assert (last.finish_reason, last.message.tool_calls) == ("stop", None)
    assert "Paris" in (last.message.content or "")


def test_the_shipped_model_answers_in_words_where_no_tool_helps(client: openai.OpenAI) -> None:
    for question in ("Tell me a story about a fox.", "hi, how are you?", "Count from 1 to 5."):
        asked: Any = {"messages": [{"role": "user", "content": question}], "tools": [WEATHER]}
        [choice] = client.chat.completions.create(model="tiny", temperature=0, **asked).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content


def test_guided_json_is_compact_and_ends(client: openai.OpenAI) -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    held: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    asked: Any = [{"role": "user", "content": "Give me a person as JSON with name and age."}]
    answer = client.chat.completions.create(
        model="tiny", messages=asked, response_format=held, temperature=0, max_tokens=100
    )
    [choice] = answer.choices
    content = choice.message.content or ""
    assert choice.finish_reason == "stop"
    assert content == json.dumps(json.loads(content), separators=(",", ":"), ensure_ascii=False)


def test_a_text_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=10, temperature=0)
    assert answer.choices[0].text


def test_mistakes_are_explained(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nonsense", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=ASK, temperature=9)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_never_fits_is_refused_before_tokenizing(client: openai.OpenAI, shm_mesh: Mesh) -> None:
    frontend = psutil.Process(decode(*shm_mesh.entries("frontends/").values(), FrontendCard).pid)
    before_mib = frontend.memory_info().rss >> 20
    with pytest.raises(openai.BadRequestError, match="8000000 characters"):
        client.completions.create(model="tiny", prompt="word " * 1_600_000)
    assert (frontend.memory_info().rss >> 20) - before_mib < 150
