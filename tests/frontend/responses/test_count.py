"""POST /v1/responses/input_tokens counts what a response would be billed for."""

from typing import Any

import pytest

from tests.frontend.responses.serving import WEATHER, Served

BODIES: list[dict[str, Any]] = [
    {"input": "hi"},
    {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."},
    {"input": "Where does it rain?", "tools": [WEATHER], "tool_choice": "auto"},
    {"input": "hi", "reasoning": {"effort": "low"}, "stream": True, "max_output_tokens": 5},
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ",".join(body))
async def test_the_count_is_the_usage_of_the_same_request(served: Served, body: dict[str, Any]) -> None:
    status, headers, counted = await served.post({"model": "tiny"} | body, path="/v1/responses/input_tokens")
    assert (status, counted["object"], list(counted)) == (200, "response.input_tokens", ["object", "input_tokens"])
    assert headers["x-request-id"]
    assert served.generator.requests == [], "no worker was asked"
    asked = {name: value for name, value in body.items() if name != "stream"}
    assert counted["input_tokens"] == (await served.whole(**asked))["usage"]["input_tokens"]


async def test_the_official_client_counts(served: Served) -> None:
    async with served.client() as client:
        counted = await client.responses.input_tokens.count(model="tiny", input="hi")
    assert (counted.object, counted.input_tokens > 0) == ("response.input_tokens", True)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "tiny"}, 400, "input"),
        ({"model": "tiny", "input": "hi", "bogus": 1}, 400, "bogus"),
        ({"model": "none", "input": "hi"}, 404, "model"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_a_response_refuses_is_not_counted(
    served: Served, body: dict[str, Any], status: int, param: str
) -> None:
    got, _, answer = await served.post(body, path="/v1/responses/input_tokens")
    assert (got, answer["error"]["param"]) == (status, param)
