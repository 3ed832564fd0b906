"""The official client works against the mesh."""

from collections.abc import Iterator

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
