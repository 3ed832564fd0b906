"""Test what any HTTP client may do: call from a web page, compress a body, half-close, mistype a path."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.generator import Trace
from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.report import PLACEMENT_HEADERS, placement_headers
from kvmesh.frontend.security import open_to
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, OverloadedError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Placed, Target
from tests.frontend.serving import CHAT, Served, able_card, serving
from tests.support.patience import PATIENCE_S

PAGE = "https://app.example"
MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}


# --- web pages ----------------------------------------------------------------------------------------


@pytest.fixture
async def paged(able_folder: Path, tmp_path: Path) -> AsyncIterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    async with serving(able_card(able_folder), guard=ApiKeyGuard(str(keys)), cors=open_to(PAGE)) as served:
        yield served


async def test_a_page_gets_answers_streams_and_errors(paged: Served) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    url = f"{paged.url}/v1/chat/completions"
    async with paged.session.options(url, headers=asked) as reply:
        assert reply.status == 204
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-headers"] == "authorization"
    key = {"authorization": "Bearer sk-one", "origin": PAGE}
    found = [await paged.post("/v1/chat/completions", CHAT | {"stream": stream}, **key) for stream in (False, True)]
    found.append(await paged.post("/v1/chat/completions", CHAT, origin=PAGE))
    found.append(await paged.post("/v1/nowhere", CHAT, **key))
    paged.generator.script = [OverloadedError("full", retry_after_s=3)]
    found.append(await paged.post("/v1/chat/completions", CHAT, **key))
    paged.admission.drain()
    found.append(await paged.post("/v1/chat/completions", CHAT, **key))
    assert [status for status, _, _ in found] == [200, 200, 401, 404, 429, 503]
    for _, headers, _ in found:
        assert headers["access-control-allow-origin"] == PAGE
        assert {"x-request-id", "retry-after", "x-kvmesh-worker"} <= set(
            headers["access-control-expose-headers"].split(", ")
        )


def test_all_placement_headers_may_be_read() -> None:
    target = Target(worker_id=WorkerId("w"), name="w", address="a:1")
    trace = Trace()
    trace.placed = Placed(decode=target, prefill=target, reason="r")
    assert set(placement_headers(trace)) == set(PLACEMENT_HEADERS)


def test_the_setting_is_off_and_is_checked() -> None:
    def settings(*flags: str) -> FrontendConfig:
        return load(FrontendConfig, flags, {}, prefix="X_", prog="x")

    assert open_to(settings().cors_origins) is None
    assert open_to(settings("--cors-origins", "*").cors_origins) is not None
    with pytest.raises(ConfigError, match="scheme, host and port"):
        open_to(settings("--cors-origins", "app.example").cors_origins)


# --- paths and methods --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_slash_at_the_end_changes_nothing(able: Served, path: str) -> None:
    status, _, _ = await able.post(path + "/", MESSAGES)
    assert status == 200


async def test_models_are_found_with_a_slash_at_the_end(able: Served) -> None:
    assert await able.get("/v1/models/") == await able.get("/v1/models")
    assert await able.get("/v1/models/tiny/") == await able.get("/v1/models/tiny")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/nowhere", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/x", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens/", 405, "invalid_request_error"),
    ],
)
async def test_under_messages_failures_have_anthropics_shape(
    able: Served, method: str, path: str, status: int, kind: str
) -> None:
    async with able.session.request(method, able.url + path) as reply:
        body = await reply.json()
        assert (reply.status, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
        assert ("allow" in reply.headers) == (status == 405)
    async with able.session.request(method, able.url + path, headers={"x-request-id": "mine"}) as reply:
        assert (await reply.json())["request_id"] == "mine"


async def test_elsewhere_they_have_openais_shape_and_an_id(able: Served) -> None:
    for path, status in (("/v1/messagesx", 404), ("/v1/chat/completions", 405)):
        async with able.session.get(able.url + path) as reply:
            assert (reply.status, set((await reply.json())["error"])) == (status, {"message", "type", "param", "code"})
            assert reply.headers["x-request-id"].startswith("http-")


async def test_the_sdk_reads_a_404_and_its_request_id(able: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=able.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as refused:
            await client.messages.batches.list()
    assert refused.value.request_id
    body: Any = refused.value.body
    assert (body["error"]["type"], body["request_id"]) == ("not_found_error", refused.value.request_id)


async def test_a_key_that_is_missing_is_told_in_anthropics_shape(paged: Served) -> None:
    status, headers, body = await paged.post("/v1/messages", MESSAGES)
    assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert body["request_id"] == headers["request-id"]


# --- bodies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "packed"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
async def test_a_packed_body_is_read(able: Served, encoding: str, packed: Any) -> None:
    data = packed(json.dumps(CHAT).encode())
    status, _, body = await able.post("/v1/chat/completions", data, content_encoding=encoding)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Once upon a time")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
async def test_a_byte_order_mark_is_no_part_of_the_body(able: Served, path: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES["messages"]} | ({"max_tokens": 10} if path == "/v1/messages" else {})
    status, _, _ = await able.post(path, json.dumps(body).encode("utf-8-sig"))
    assert status == 200
    status, _, told = await able.post(path, json.dumps(body).encode("utf-16"))
    assert (status, "UTF-16" in told["error"]["message"]) == (400, True)


async def test_a_bomb_is_refused(able: Served) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    status, _, told = await able.post("/v1/messages", bomb, content_encoding="gzip")
    assert (status, told["error"]["type"]) == (413, "request_too_large")
    status, headers, told = await able.post("/v1/messages", b"{}", content_encoding="br")
    assert (status, told["type"], headers["accept-encoding"]) == (415, "error", "gzip, deflate")


# --- half-close ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_half_closes_gets_its_answer(able: Served, stream: bool) -> None:
    body = json.dumps(CHAT | {"stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", able.port)
    writer.write(head + body)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        data = await reader.read()
    assert data.startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]" if stream else b"Once upon a time") in data
    writer.close()
