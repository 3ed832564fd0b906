"""However the bytes of a client are cut, and whatever they are."""

import asyncio
import ssl
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.mesh.http.server import App, HttpLimits, Server
from tests.mesh.http.raw import CLOSE, Handlers, MemoryTransport, Site, chunked, get, post, read_replies, serving
from tests.support.budget import examples

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, but slow to make
LIMITS = HttpLimits(max_body_bytes=20_000, max_bodies_bytes=50_000)
IN_MEMORY = settings(max_examples=examples(150))


async def feed(segments: Sequence[bytes], turns: int = 0) -> bytes:
    """Return the bytes sent for `segments`, with `turns` of the loop after each. Check that nothing is held."""
    server = Server(App(Handlers().routes(), LIMITS))
    failures: list[Any] = []
    server.loop.set_exception_handler(lambda loop, context: failures.append(context))
    connection, transport = server.connect(), MemoryTransport()
    connection.connection_made(transport)
    for segment in segments:
        connection.data_received(segment)
        for _ in range(turns):
            await asyncio.sleep(0)
    for _ in range(1000):
        if not (connection.is_busy or connection._waiting or connection._ahead) or transport.is_closed:
            break
        await asyncio.sleep(0)
    assert not connection.is_busy
    connection.connection_lost(None)
    await server.close()
    assert (server.body_bytes, server.connections, failures) == (0, set(), [])
    return without_dates(bytes(transport.written))


def without_dates(data: bytes) -> bytes:
    return b"\r\n".join(line for line in data.split(b"\r\n") if not line.startswith(b"date: "))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


BODIES = st.binary(max_size=60) | st.integers(0, 12_000).map(lambda size: b"b" * size)
REQUESTS = st.one_of(
    st.just(get("/echo?a=b", "X-Some: thing ")),
    st.just(get("/stream")),
    st.just(get("http://host/parts/a/b%20c")),
    st.just(get("/nowhere")),
    st.just(get("/status/204")),
    st.just(get("/echo", "Connection: Upgrade", "Upgrade: h2c")),
    BODIES.map(lambda body: post("/echo", body)),
    BODIES.map(lambda body: post("/echo", body, "Connection: Upgrade", "Upgrade: h2c")),
    st.lists(BODIES, max_size=3).map(lambda chunks: chunked("/echo", [c[:5000] for c in chunks], "X-Trailer: x")),
)
ENDS = st.sampled_from(
    [b"", get("/echo", CLOSE), get("/stream", CLOSE), b"garbage\r\n\r\n", get("/echo", version="1.0")]
)


@IN_MEMORY
@given(st.lists(REQUESTS, max_size=6), ENDS, st.lists(st.integers(0, 1 << 20), max_size=8), st.integers(0, 3))
def test_any_cutting_gives_the_same_replies(requests: list[bytes], end: bytes, places: list[int], turns: int) -> None:
    data = b"".join(requests) + end
    whole = asyncio.run(feed([data]))
    pieces = asyncio.run(feed(cut(data, places), turns))
    assert unchunked(pieces) == unchunked(whole)
    assert len(unchunked(whole)) == len(requests) + bool(end)


def unchunked(data: bytes) -> list[Any]:
    """Join the chunks of streams, because their sizes depend on the turns of the loop."""
    return [(reply.status, reply.headers, reply.body) for reply in read_replies(data)]


@settings(IN_MEMORY, max_examples=examples(20))
@given(st.lists(REQUESTS.filter(lambda data: len(data) < 400), min_size=1, max_size=3))
def test_byte_by_byte_is_the_same_too(requests: list[bytes]) -> None:
    data = b"".join(requests)
    pieces = asyncio.run(feed([data[at : at + 1] for at in range(len(data))]))
    assert unchunked(pieces) == unchunked(asyncio.run(feed([data])))


@IN_MEMORY
@given(
    st.lists(st.binary(max_size=200) | st.sampled_from([b"\r\n", b"GET / HTTP/1.1\r\n", b"Host: x\r\n"]), max_size=8)
)
def test_random_bytes_are_refused_and_leave_nothing(segments: list[bytes]) -> None:
    for reply in read_replies(asyncio.run(feed(segments, 1))):
        assert reply.status in (400, 404, 405)


@IN_MEMORY
@given(st.lists(REQUESTS, min_size=1, max_size=3), st.integers(0, 1 << 20), st.binary(max_size=4), st.integers(0, 3))
def test_spoilt_requests_get_whole_replies_and_leave_nothing(
    requests: list[bytes], place: int, put: bytes, taken: int
) -> None:
    data = b"".join(requests)
    at = place % len(data)
    for reply in read_replies(asyncio.run(feed([data[:at] + put + data[at + taken :]]))):
        assert reply.status in (200, 204, 400, 404, 405, 413, 431)


# --- what other clients mean is what the handler gets ------------------------------------------------------

_TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
_PATHS = st.text(st.characters(codec="utf-8", exclude_characters="/?#"), min_size=1, max_size=10).filter(
    lambda text: text not in (".", "..")
)
MEANT = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["GET", "POST"]),
        "part": _PATHS,
        "query": st.dictionaries(_TEXT.filter(bool), _TEXT, max_size=3),
        "headers": st.dictionaries(st.from_regex(r"x-[a-z0-9]{1,8}", fullmatch=True), _TEXT.map(str.strip), max_size=4),
        "body": st.binary(max_size=3000),
        "is_chunked": st.booleans(),
    }
)


async def in_chunks(body: bytes) -> Any:
    for at in range(0, len(body), 700):
        yield body[at : at + 700]


async def send_by_aiohttp(site: Site, meant: dict[str, Any], path: str) -> Any:
    data = in_chunks(meant["body"]) if meant["is_chunked"] else meant["body"]
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            meant["method"], f"http://127.0.0.1:{site.port}{path}", params=meant["query"], headers=meant["headers"],
            data=data,
        ) as reply,
    ):  # fmt: skip
        return await reply.json()


async def send_by_httpx(site: Site, meant: dict[str, Any], path: str) -> Any:
    content = in_chunks(meant["body"]) if meant["is_chunked"] else meant["body"]
    async with httpx.AsyncClient(trust_env=False, verify=PLAIN) as client:
        reply = await client.request(
            meant["method"], f"http://127.0.0.1:{site.port}{path}", params=meant["query"], headers=meant["headers"],
            content=content,
        )  # fmt: skip
        return reply.json()


@pytest.mark.parametrize("send", [send_by_aiohttp, send_by_httpx])
def test_a_request_arrives_as_its_client_means_it(send: Any) -> None:
    with asyncio.Runner() as runner:
        context = serving()
        site = runner.run(context.__aenter__())

        @settings(max_examples=examples(25))
        @given(MEANT)
        def check(meant: dict[str, Any]) -> None:
            path = f"/parts/{quote(meant['part'], safe='')}/x" if meant["method"] == "GET" else "/echo"
            got = runner.run(send(site, meant, path))
            assert (got["method"], got["query"], got["body"]) == (
                meant["method"], meant["query"], meant["body"].decode("latin-1"),
            )  # fmt: skip
            if meant["method"] == "GET":
                assert got["params"] == {"name": meant["part"], "rest": "x"}
            assert meant["headers"].items() <= dict(got["headers"]).items()

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
