"""The official client works against the mesh."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from protocol.messages import FrontendCard, decode
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
