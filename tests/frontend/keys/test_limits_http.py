"""KeyLimits of keys over HTTP: the same in every API, told in the words of each."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.keys.keyfile import hashed
from kvmesh.frontend.keys.meters import Meters
from kvmesh.frontend.table import ENDPOINTS
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Delta, Placed, Target
from tests.frontend.serving import CHAT, TEXT, Served, able_card, ids, serving, words

MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
ASKING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "hi"},
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/detokenize": {"model": "tiny", "tokens": [1]},
    "/kvmesh/route": CHAT,
}
LIMIT_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")


def key_line(name: str, **fields: str) -> str:
    more = "".join(f',"{field}":{value}' for field, value in fields.items())
    return f'{{"name":"{name}","sha256":"{hashed("sk-" + name)}"{more}}}\n'


class Limited:
    """A frontend with a file of keys, and a clock that can be set."""

    def __init__(self, served: Served, file: Path) -> None:
        self.served = served
        self.file = file
        self.now = 1000.0
        self.meters = Meters(lambda: self.now)

    def use(self, *lines: str) -> None:
        """Have these keys, and no others."""
        self.file.write_text("".join(lines))
        self.now += 3.0
        if self.served.app.guard is None:
            self.served.app.guard = ApiKeyGuard(str(self.file), lambda: self.now, meters=self.meters)

    async def post(self, path: str, key: str, **fields: Any) -> tuple[int, Any, Any]:
        return await self.served.post(path, ASKING[path] | fields, x_api_key=f"sk-{key}")


@pytest.fixture
async def limited(tmp_path: Path, able_folder: Path) -> AsyncIterator[Limited]:
    async with serving(able_card(able_folder)) as served:
        served.generator.placed = Placed(Target(WorkerId("w"), "w", "x:1"))
        yield Limited(served, tmp_path / "keys")


def test_every_path_that_asks_for_a_model_is_tried_here() -> None:
    taking_bodies = {endpoint.path for endpoint in ENDPOINTS if endpoint.operation.request}
    assert taking_bodies - {"/kvmesh/workers/{worker}/control"} == set(ASKING)


@pytest.mark.parametrize("path", ASKING)
async def test_every_api_counts_requests_and_refuses_those_beyond(limited: Limited, path: str) -> None:
    limited.use(key_line("a", requests_per_minute="2"))
    for left in ("1", "0"):
        status, headers, body = await limited.post(path, "a")
        assert status == 200, body
        assert [headers[name] for name in LIMIT_HEADERS[:2]] == ["2", left]
    status, headers, body = await limited.post(path, "a")
    assert status == 429
    assert headers["retry-after"] == "61"
    assert [headers[name] for name in LIMIT_HEADERS] == ["2", "0", "60.500s"]
    if path.startswith("/v1/messages"):
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
    else:
        assert (body["error"]["code"], body["error"]["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "this API key may have 2 requests in any minute" in body["error"]["message"]
    limited.now += 61
    assert (await limited.post(path, "a"))[0] == 200


@pytest.mark.parametrize("path", ASKING)
async def test_every_api_refuses_a_model_of_others(limited: Limited, path: str) -> None:
    limited.use(key_line("a", models='["other-*"]'))
    status, headers, body = await limited.post(path, "a")
    assert (status, body["error"]["type"]) == (
        403,
        "permission_error" if path.startswith("/v1/messages") else "invalid_request_error",
    )
    assert "retry-after" not in headers
    unknown = await limited.post(path, "a", model="none")
    assert unknown[0] == 403, "a key cannot find out which models there are"
    allowed = await limited.post(path, "a", model="other-1")
    assert allowed[0] == 404
    assert "tiny" not in str(allowed[2]["error"]["message"])


async def test_models_show_what_the_key_may_use(limited: Limited) -> None:
    limited.use(key_line("a", models='["t*"]'), key_line("b", models='["u"]'))
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        for key, names in (("a", ["tiny"]), ("b", [])):
            sent = {"authorization": f"Bearer sk-{key}", **headers}
            async with limited.served.session.get(limited.served.url + "/v1/models", headers=sent) as reply:
                assert [model["id"] for model in (await reply.json())["data"]] == names
            async with limited.served.session.get(limited.served.url + "/v1/models/tiny", headers=sent) as reply:
                assert reply.status == (200 if names else 403)


async def test_tokens_are_reserved_and_settled_by_what_was_used(limited: Limited) -> None:
    limited.use(key_line("a", tokens_per_minute="1000"))
    _, headers, body = await limited.post("/v1/completions", "a", max_tokens=50)
    usage = body["usage"]
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - usage["total_tokens"])
    _, headers, _ = await limited.post("/v1/completions", "a", max_tokens=100, stream=True)
    reserved = usage["prompt_tokens"] + 100
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - usage["total_tokens"] - reserved)
    _, headers, _ = await limited.post("/v1/completions", "a")
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 * usage["total_tokens"])


async def test_a_request_over_the_tokens_left_takes_nothing(limited: Limited) -> None:
    limited.use(key_line("a", tokens_per_minute="50", requests_per_minute="10"))
    status, headers, _ = await limited.post("/v1/embeddings", "a", input=[[1] * 45])
    assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "5")
    status, headers, body = await limited.post("/v1/embeddings", "a", input=[[1] * 6])
    assert (status, headers["retry-after"]) == (429, "61")
    assert "50 tokens in any minute" in body["error"]["message"]
    status, headers, _ = await limited.post("/v1/embeddings", "a", input=[[1] * 5])
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "8")


async def test_a_prompt_beyond_the_whole_limit_is_not_to_be_sent_again(limited: Limited) -> None:
    limited.use(key_line("a", tokens_per_minute="50"))
    status, headers, body = await limited.post("/v1/embeddings", "a", input=[[1] * 51])
    assert (status, "retry-after" in headers) == (429, False)
    assert "the prompt has 51 tokens" in body["error"]["message"]


async def test_streams_beyond_the_limit_are_refused_until_one_ends(limited: Limited) -> None:
    limited.use(key_line("a", streams="1"))
    generator = limited.served.generator
    gate = asyncio.Event()
    generator.scripts = [[Delta(ids("Once")), gate, *words(" upon")]]
    url = limited.served.url + "/v1/chat/completions"
    async with limited.served.session.post(url, json=CHAT | {"stream": True}, headers={"x-api-key": "sk-a"}) as first:
        assert first.status == 200
        status, headers, body = await limited.post("/v1/chat/completions", "a")
        assert (status, headers["retry-after"]) == (429, "1")
        assert "1 requests in progress" in body["error"]["message"]
        gate.set()
        await first.read()
    assert (await limited.post("/v1/chat/completions", "a"))[0] == 200


async def test_priority_is_cut_to_the_keys_ceiling(limited: Limited) -> None:
    limited.use(key_line("a", max_priority="3"))
    for asked, got in (("50", 3), ("3", 3), ("-7", -7)):
        await limited.served.post("/v1/chat/completions", CHAT, x_api_key="sk-a", x_kvmesh_priority=asked)
        assert limited.served.generator.hints[-1].priority == got


async def test_a_file_that_is_read_again_keeps_what_was_used(limited: Limited) -> None:
    limited.use(key_line("a", requests_per_minute="3"))
    for _ in range(2):
        await limited.post("/v1/completions", "a")
    limited.use(key_line("a", requests_per_minute="4"), key_line("b"))
    _, headers, _ = await limited.post("/v1/completions", "a")
    assert headers["x-ratelimit-remaining-requests"] == "1"
    limited.use(key_line("b"))
    limited.use(key_line("a", requests_per_minute="4"))
    _, headers, _ = await limited.post("/v1/completions", "a")
    assert headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_key_without_limits_gets_no_headers_of_them(limited: Limited) -> None:
    limited.use(key_line("a"))
    _, headers, _ = await limited.post("/v1/completions", "a")
    assert not [name for name in headers if name.lower().startswith("x-ratelimit")]


async def test_usage_is_counted_by_the_names_of_keys(limited: Limited, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limited.use(key_line("counted", requests_per_minute="1"))
    _, _, body = await limited.post("/v1/chat/completions", "counted")
    await limited.post("/v1/chat/completions", "counted")

    def count(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"kvmesh_frontend_key_{name}", {"key": "counted", **labels})

    assert count("requests_total", outcome="ok") == 1
    assert count("requests_total", outcome="rate_limited") == 1
    assert count("refused_total", limit="requests") == 1
    assert count("tokens_total", kind="prompt") == body["usage"]["prompt_tokens"]
    assert count("tokens_total", kind="completion") == body["usage"]["completion_tokens"]
    assert count("streams") == 0
    limited.meters.close()
    [line] = [record for record in caplog.records if record.getMessage() == "usage"]
    assert (line.key, line.requests, line.refused) == ("counted", 2, 1)  # type: ignore[attr-defined]
    limited.use(key_line("another"))
    await limited.post("/v1/completions", "another")
    assert count("requests_total", outcome="ok") is None, "metrics are of keys that are configured"
