"""Clients of Anthropic's get the models in their own shape, page by page; all others get OpenAI's."""

import asyncio
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from msgspec.structs import replace

from tests.frontend import tiny
from tests.frontend.anthropic.serving import Served
from tests.frontend.vendor_fields import differences

VERSION = {"anthropic-version": "2023-06-01"}


async def get(served: Served, path: str, headers: dict[str, str]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(served.url + path, headers=headers) as reply:
        assert reply.headers["request-id"]
        return reply.status, await reply.json()


@pytest.mark.parametrize("headers", [VERSION, {"x-api-key": "none"}], ids=str)
async def test_a_header_of_anthropics_asks_for_anthropics_shape(served: Served, headers: dict[str, str]) -> None:
    status, page = await get(served, "/v1/models", headers)
    assert status == 200
    assert differences("messages", "models", page) == []
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("tiny", "tiny", False)
    [model] = page["data"]
    assert (model["id"], model["type"], model["max_input_tokens"]) == ("tiny", "model", 8192)
    assert await get(served, "/v1/models/tiny", headers) == (200, model)


async def test_without_such_a_header_the_shape_is_openais(served: Served) -> None:
    _, body = await get(served, "/v1/models", {"authorization": "Bearer none"})
    assert (body["object"], body["data"][0]["object"]) == ("list", "model")
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_an_unknown_model_is_a_failure_in_anthropics_shape(served: Served) -> None:
    status, body = await get(served, "/v1/models/gpt", VERSION)
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    assert differences("messages", "failure", body) == []


def serve_more(served: Served, count: int) -> list[str]:
    """Serve adapters as well; return the names of all models, in the order of the list."""
    names = [f"adapter-{number:02}" for number in range(count)]
    card = tiny.card("w2", path=served.models.find("tiny").facts.model_path, context_tokens=8192)
    served.models.add(replace(card, loras=tuple(names)))
    return ["tiny", *names]


async def test_the_client_reads_all_pages_in_both_directions(served: Served) -> None:
    names = serve_more(served, 45)
    async with served.client() as client:
        assert [model.id async for model in client.models.list()] == names
        assert [model.id async for model in client.models.list(limit=7)] == names
        page = await client.models.list(limit=10, after_id=names[9])
        assert [model.id for model in page.data] == names[10:20]
        page = await client.models.list(limit=10, before_id=names[25])
        assert ([model.id for model in page.data], page.has_more) == (names[15:25], True)
        earlier = await page.get_next_page()
        assert ([model.id for model in earlier.data], earlier.has_more) == (names[5:15], True)
        assert (await client.models.retrieve("adapter-07")).display_name == "adapter-07"
        assert [model.id async for model in client.beta.models.list(limit=30)] == names


async def test_the_sync_client_reads_all_pages(served: Served) -> None:
    names = serve_more(served, 25)

    def read(client: anthropic.Anthropic) -> list[str]:
        return [model.id for model in client.models.list(limit=10)]

    with served.sync_client() as client:
        assert await asyncio.to_thread(read, client) == names


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("limit=", "limit"),
        ("after_id=gpt", "after_id"),
        ("before_id=gpt", "before_id"),
        ("before_id=tiny&after_id=tiny", "before_id"),
    ],
)
async def test_a_page_that_cannot_be_had_is_refused_by_name(served: Served, query: str, param: str) -> None:
    status, body = await get(served, f"/v1/models?{query}", VERSION)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert param in body["error"]["message"]
    assert differences("messages", "failure", body) == []


async def test_without_a_ready_model_the_page_is_empty(served: Served) -> None:
    for worker in list(served.models.find("tiny").cards):
        served.models.remove(worker)
    _, page = await get(served, "/v1/models", VERSION)
    assert page == {"data": [], "has_more": False, "first_id": None, "last_id": None}
