"""Test HTTP/1.1 as clients see it: how messages are read and answered."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from kvmesh.mesh.http import connection
from kvmesh.mesh.http.connection import MOST_KNOWN_HOSTS, SLICE_BYTES
from kvmesh.mesh.http.request import Reply, ReplyStream, Request
from kvmesh.mesh.http.server import App, Route, listening, log_line
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError
from tests.mesh.http.raw import CLOSE, HOST, Site, chunked, get, post, read_replies, serving
from tests.support.patience import PATIENCE_S


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


def seen(body: bytes) -> dict[str, Any]:
    return json.loads(body)


# --- one connection, many requests --------------------------------------------------------------------


async def test_a_connection_is_kept(site: Site) -> None:
    replies = await site.ask(post("/echo", b"1"), post("/echo", b"2"), get("/echo", CLOSE))
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert [seen(reply.body)["body"] for reply in replies] == ["1", "2", ""]
    assert ["connection" in reply.headers for reply in replies] == [False, False, True]


async def test_pipelined_requests_are_answered_in_their_order(site: Site) -> None:
    site.handlers.gate.set()
    data = post("/wait", b"1234") + get("/stream") + post("/echo", b"x") + get("/echo", CLOSE)
    replies = await site.ask(data)
    assert replies[0].body == b"4"
    assert replies[1].body == b"event 0\nevent 1\nevent 2\nend\n"
    assert [seen(reply.body)["body"] for reply in replies[2:]] == ["x", ""]


async def test_many_pipelined_requests_are_all_answered(site: Site) -> None:
    data = get("/echo") * 3000 + get("/echo", CLOSE)
    assert len(data) > 20 * SLICE_BYTES
    reader, writer = await site.open()
    async with asyncio.timeout(PATIENCE_S):
        writer.write(data)
        assert len(read_replies(await reader.read())) == 3001
    writer.close()


async def test_close_is_honoured_and_what_follows_is_not_a_request(site: Site) -> None:
    replies = await site.ask(get("/echo", CLOSE) + get("/echo"))
    assert [reply.status for reply in replies] == [200]
    assert replies[0].headers["connection"] == "close"


async def test_empty_lines_before_a_request_are_skipped(site: Site) -> None:
    assert [reply.status for reply in await site.ask(b"\r\n" + get("/echo", CLOSE))] == [200]


@pytest.mark.parametrize("header", ["", "Connection: keep-alive\r\n"])
async def test_http_1_0_gets_no_chunks_and_one_reply(site: Site, header: str) -> None:
    [reply] = await site.ask(f"GET /echo HTTP/1.0\r\n{header}\r\n".encode())
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    [reply] = await site.ask(f"GET /stream HTTP/1.0\r\n{header}\r\n".encode())
    assert "transfer-encoding" not in reply.headers
    assert reply.body == b"event 0\nevent 1\nevent 2\nend\n"


async def test_pipelined_versions_do_not_mix(site: Site) -> None:
    """The parser has read the next request when this one is answered."""
    first, second = await site.ask(get("/stream") + b"GET /stream HTTP/1.0\r\n\r\n")
    assert first.headers["transfer-encoding"] == "chunked"
    assert "transfer-encoding" not in second.headers
    assert first.body == second.body


async def test_head_has_the_head_of_get(site: Site) -> None:
    whole, head = await site.ask(
        get("/large") + b"HEAD /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", methods=("GET", "HEAD")
    )
    assert head.headers["content-length"] == whole.headers["content-length"] == str(1 << 20)
    assert head.body == b""
    data = await site.talk(b"HEAD /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert data.endswith(b"\r\n\r\n")
    assert b"event 0" not in data


async def test_the_refusal_of_a_head_has_no_body_either() -> None:
    def guard(request: Request) -> None:
        raise OverloadedError("not you")

    async with serving(guard=guard) as site:
        data = await site.talk(b"HEAD /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        assert data.startswith(b"HTTP/1.1 429 ")
        assert data.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body_have_none(site: Site, status: int) -> None:
    reply, after = await site.ask(get(f"/status/{status}") + get("/echo", CLOSE))
    assert (reply.status, reply.body, after.status) == (status, b"", 200)
    assert not {"content-length", "content-type", "transfer-encoding"} & set(reply.headers)


async def test_a_stream_is_chunked_and_its_connection_kept(site: Site) -> None:
    data = await site.talk(get("/stream"), get("/echo", CLOSE))
    stream, _ = read_replies(data)
    assert stream.headers["transfer-encoding"] == "chunked"
    assert data.count(b"0\r\n\r\n") == 1
    assert b"event 0\n\r\n8\r\nevent 1\n\r\n" in data, "one chunk for each turn"


# --- bodies -------------------------------------------------------------------------------------------


async def test_expect_100_is_answered_when_the_body_is_wanted(site: Site) -> None:
    request = post("/echo", b"body", "Expect: 100-Continue", CLOSE)
    reader, writer = await site.open(request[:-4])
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        [reply] = read_replies(await reader.read())
    assert seen(reply.body)["body"] == "body"
    writer.close()


async def test_expect_100_is_ignored_after_the_body_or_from_old_clients(site: Site) -> None:
    data = await site.talk(post("/echo", b"body", "Expect: 100-continue", CLOSE))
    assert b" 100 " not in data
    old = b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    assert b" 100 " not in await site.talk(old, b"body")


async def test_expect_100_waits_for_the_reply_before_it(site: Site) -> None:
    waits, expects = post("/wait", b""), post("/echo", b"body", "Expect: 100-continue", CLOSE)
    reader, writer = await site.open(waits + expects[:-4])
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.began.wait()
        site.handlers.gate.set()
        assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"0HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        assert b" 200 OK" in await reader.read()
    writer.close()


async def test_chunks_become_one_body_and_trailers_no_headers(site: Site) -> None:
    data = chunked("/echo", [b"a" * 10, b"b" * 10_000, b"c"], "Authorization: Bearer x", "X-KVMesh-Tenant: t")
    reply, _ = await site.ask(data + get("/echo", CLOSE))
    assert seen(reply.body)["body"] == "a" * 10 + "b" * 10_000 + "c"
    assert seen(reply.body)["headers"] == [["host", "x"], ["transfer-encoding", "chunked"]]


async def test_an_upgrade_is_ignored_with_its_body_read(site: Site) -> None:
    """Java's HttpClient asks for h2c in every first request."""
    wish = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    for body in (b"", b"body", b"x" * 3 * SLICE_BYTES):
        replies = await site.ask(post("/echo", body, *wish) + post("/echo", b"2") + get("/echo", *wish, CLOSE))
        assert [seen(reply.body)["body"] for reply in replies] == [body.decode(), "2", ""]
        replies = await site.ask(
            chunked("/echo", [body]).replace(HOST, HOST + "\r\n".join([*wish, CLOSE, ""]).encode())
        )
        assert [seen(reply.body)["body"] for reply in replies] == [body.decode()]


# --- targets and headers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/echo", "/echo", {}),
        ("/echo?a=1&b=%20x&a=2&c=", "/echo", {"a": "2", "b": " x", "c": ""}),
        ("/%65cho?%", "/echo", {"%": ""}),
        ("http://elsewhere:80/echo?a=1", "/echo", {"a": "1"}),
        ("HTTPS://elsewhere/echo", "/echo", {}),
        ("/parts/a%20b/c/d%2Fe%00", "/parts/a b/c/d/e\0", {}),
        ("/parts/%F0%9F%A6%8A/%ff", "/parts/🦊/\ufffd", {}),
    ],
)
async def test_targets(site: Site, target: str, path: str, query: dict[str, str]) -> None:
    [reply] = await site.ask(get(target, CLOSE))
    assert (seen(reply.body)["path"], seen(reply.body)["query"]) == (path, query)


@pytest.mark.parametrize(
    "target", ["http://elsewhere", "http://elsewhere?x", "/", "/echo//", "//", "//echo", "/echo%3Fa", "*"]
)
async def test_targets_that_are_nowhere(site: Site, target: str) -> None:
    [reply] = await site.ask(get(target, CLOSE))
    assert (reply.status, seen(reply.body)["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("host", ["", "a", "a:80", "[::1]:8000", "127.0.0.1:", "a_b.example", "x" * 300])
async def test_hosts_that_are_right(site: Site, host: str) -> None:
    [reply] = await site.ask(get("/echo", CLOSE).replace(b"Host: x", f"Host: {host}".encode()))
    assert reply.status == 200


async def test_known_hosts_are_bounded(site: Site) -> None:
    requests = b"".join(get("/echo").replace(b"Host: x", b"Host: x%d" % n) for n in range(MOST_KNOWN_HOSTS + 10))
    replies = await site.ask(requests + get("/echo", CLOSE))
    assert {reply.status for reply in replies} == {200}
    assert len(connection._known_hosts) <= MOST_KNOWN_HOSTS


@pytest.mark.parametrize("target", ["/echo/", "/echo/?a=1", "/parts/a/b/"])
async def test_a_slash_at_the_end_of_a_path_changes_nothing(site: Site, target: str) -> None:
    with_slash, without = await site.ask(get(target) + get(target.replace("/?", "?").removesuffix("/"), CLOSE))
    assert (with_slash.status, without.status) == (200, 200)
    first, second = seen(with_slash.body), seen(without.body)
    assert (first["params"], first["query"]) == (second["params"], second["query"])


async def test_a_query_with_too_many_fields_is_refused(site: Site) -> None:
    [reply] = await site.ask(get("/echo?" + "a=1&" * 101, CLOSE))
    assert (reply.status, "100 fields" in seen(reply.body)["error"]["message"]) == (400, True)


async def test_parts_of_a_path_are_parameters(site: Site) -> None:
    [reply] = await site.ask(get("/parts/a/b/c", CLOSE))
    assert seen(reply.body)["params"] == {"name": "a", "rest": "b/c"}


async def test_headers_have_lower_names_and_trimmed_values_in_their_order(site: Site) -> None:
    [reply] = await site.ask(get("/echo", "X-A:  1 \t", "x-a: 2", "X-B:", "X-C: \xe9", CLOSE))
    want = [["host", "x"], ["x-a", "1"], ["x-a", "2"], ["x-b", ""], ["x-c", "\xe9"], ["connection", "close"]]
    assert seen(reply.body)["headers"] == want


async def test_the_first_of_two_headers_counts() -> None:
    request = Request(None, "GET", "/", "", [("a", "1"), ("a", "2")], 0.0)  # type: ignore[arg-type]
    assert (request.header("a"), request.header("b")) == ("1", None)


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE", "TRACE", "M-SEARCH"])
async def test_a_method_that_is_not_taken_is_told_which_are(site: Site, method: str) -> None:
    path, allowed = ("/wait", "OPTIONS, POST") if method == "HEAD" else ("/stream", "GET, HEAD, OPTIONS")
    data = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode()
    if method == "POST":
        data = post(path, b"", CLOSE)
    [reply] = await site.ask(data, methods=(method,))
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("/wait", "OPTIONS, POST"),
        ("/wait/", "OPTIONS, POST"),
        ("/echo", "GET, HEAD, OPTIONS, POST"),
        ("/parts/a/b", "GET, HEAD, OPTIONS"),
        ("*", "GET, HEAD, OPTIONS, POST"),
    ],
)
async def test_options_tells_the_methods_of_a_path(site: Site, target: str, allowed: str) -> None:
    data = f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    reply, after = await site.ask(data + get("/echo", CLOSE), methods=("OPTIONS",))
    assert (reply.status, reply.headers["allow"], reply.body, after.status) == (204, allowed, b"", 200)


async def test_options_of_a_path_that_is_nowhere_is_a_404(site: Site) -> None:
    [reply] = await site.ask(f"OPTIONS /nowhere HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
    assert reply.status == 404


# --- what is no request -------------------------------------------------------------------------------

_CHUNKED = HOST + b"Transfer-Encoding: chunked\r\n"
BAD = {
    "no method": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port without
    "lower method": b"get / HTTP/1.1\r\n" + HOST + b"\r\n",
    "unknown method": b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\n" + HOST + b"Connection: keep-alive\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no Host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /echo HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "two Hosts of 1.0": b"GET /echo HTTP/1.0\r\n" + HOST + HOST + b"\r\n",
    "Host with a space": b"GET /echo HTTP/1.1\r\nHost: a b\r\n\r\n",
    "Host with a path": b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "Host with a user": b"GET /echo HTTP/1.1\r\nHost: a@b\r\n\r\n",
    "Host with a bad port": b"GET /echo HTTP/1.1\r\nHost: a:b\r\n\r\n",
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\nxyz",
    "obs-fold": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "CR in a value": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\rb\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\nY: b\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\n" + HOST + b"X : b\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\n" + HOST + b"nothing\r\n\r\n",
    "non-ASCII name": b"GET / HTTP/1.1\r\n" + HOST + b"X\xe9: b\r\n\r\n",
    "control in the target": b"GET /\x01 HTTP/1.1\r\n" + HOST + b"\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
    "chunks and length": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two equal lengths": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "signed length": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\nabc",
    "list of lengths": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3, 3\r\n\r\nabc",
    "empty length": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length:\r\n\r\nabc",
    "length beyond 64 bits": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "chunks of 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "gzip": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n\r\n",
    "gzip, chunked": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size without digits": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\nx\r\n",
    "chunk size beyond 64 bits": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\nfffffffffffffffff\r\n",
    "0x in a chunk size": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n0x1\r\na\r\n0\r\n\r\n",
    "bare LF after a chunk size": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n1\na\r\n0\r\n\r\n",
    "bare LF after a chunk": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n1\r\na\n0\r\n\r\n",
    "bare LF in a chunk extension": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n1;a\nb\r\na\r\n0\r\n\r\n",
    "bare LF after the chunks": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n1\r\na\r\n0\r\n\n",
    "length in a trailer": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n0\r\nContent-Length: 3\r\n\r\nabc",
    "bare LF after the head": b"GET / HTTP/1.1\r\n" + HOST + b"\n",
    "vertical tab before chunked": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "upgrade with length and chunks": b"POST / HTTP/1.1\r\n" + _CHUNKED
    + b"Content-Length: 5\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n0\r\n\r\n",
    "length with a space": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1 0\r\n\r\na",
    "length with an underscore": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1_0\r\n\r\naaaaaaaaaa",
    "negative length": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\na",
    "length in hex": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0x1\r\n\r\na",
    "two different lengths": b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "chunked in quotes": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n",
    "chunked, identity": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: identity\r\n\r\n",
    "chunked on a folded line": b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a folded length": b"POST / HTTP/1.1\r\n" + HOST + b"X: a\r\n Content-Length: 5\r\nContent-Length: 1\r\n\r\na",
    "sign before a chunk size": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n+1\r\na\r\n0\r\n\r\n",
    "space after a chunk size": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n1 \r\na\r\n0\r\n\r\n",
    "bare LF in a trailer": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n0\r\nX: a\nY: b\r\n\r\n",
    "tabs in the request line": b"GET\t/echo\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "bare LF in the whole head": b"GET /echo HTTP/1.1\nHost: x\n\n",
    "chunk longer than told": b"POST / HTTP/1.1\r\n" + _CHUNKED + b"\r\n3\r\nabcd\r\n0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_request_gets_400_and_the_end(site: Site, name: str) -> None:
    [reply] = await site.ask(BAD[name])
    assert (reply.status, reply.headers["connection"]) == (400, "close"), reply
    assert seen(reply.body)["error"]["type"] == "invalid_request_error"
    assert site.handlers.handled == 0


@pytest.mark.parametrize("name", BAD)
async def test_a_request_before_it_is_answered_first(site: Site, name: str) -> None:
    good, bad = await site.ask(post("/echo", b"good") + BAD[name])
    assert (good.status, seen(good.body)["body"], bad.status) == (200, "good", 400)
    reader, writer = await site.open(post("/wait", b"good") + BAD[name])
    async with asyncio.timeout(PATIENCE_S):
        await site.handlers.began.wait()
        site.handlers.gate.set()
        assert [reply.status for reply in read_replies(await reader.read())] == [200, 400]
    writer.close()


async def test_a_refused_client_that_goes_on_sending_gets_the_reply(site: Site) -> None:
    reader, writer = await site.open(BAD["gzip"])
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(50):
            writer.write(bytes(10_000))
            await asyncio.sleep(0)
        [reply] = read_replies(await reader.read())
    assert reply.status == 400
    writer.close()


# --- handlers that fail -------------------------------------------------------------------------------


async def replies_of(handler: Any, data: bytes, **settings: Any) -> bytes:
    """Return the bytes that a server with this handler, at GET /, sends."""
    async with listening(App([Route("GET", "/", handler)], **settings), "127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(data)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        except ConnectionResetError:
            return b"reset"
        finally:
            writer.close()


async def test_a_failure_becomes_a_reply_and_the_connection_is_kept() -> None:
    failures: list[Exception] = [
        RuntimeError("a bug"), InvalidRequestError("wrong", param="p"), OverloadedError("full", retry_after_s=3),
    ]  # fmt: skip

    async def fail(request: Request) -> Reply:
        raise failures.pop(0)

    bug, wrong, full = read_replies(await replies_of(fail, get("/") * 2 + get("/", CLOSE)))
    assert (bug.status, b"a bug" in bug.body) == (500, False)
    assert (wrong.status, seen(wrong.body)["error"]["param"]) == (400, "p")
    assert (full.status, full.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MeshError("a failure"), None])
async def test_a_stream_that_breaks_off_is_cut(error: Exception | None) -> None:
    async def fail(request: Request) -> ReplyStream:
        reply = request.open_stream({})
        reply.write(b"some")
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return reply  # which has no end

    data = await replies_of(fail, get("/"))
    assert data == b"reset" or not data.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("reply", [Reply(status=999), Reply(headers={"x": "a\r\nset-cookie: b"})], ids=["999", "CRLF"])
async def test_a_reply_that_cannot_be_sent_is_none(reply: Reply) -> None:
    async def answer(request: Request) -> Reply:
        return reply

    assert await replies_of(answer, get("/")) in (b"", b"reset")


async def test_a_line_break_in_a_stream_header_is_a_500() -> None:
    async def answer(request: Request) -> ReplyStream:
        return request.open_stream({"x": "a\nb"})

    [reply] = read_replies(await replies_of(answer, get("/", CLOSE)))
    assert reply.status == 500


async def test_what_is_written_after_the_end_is_not_sent() -> None:
    async def answer(request: Request) -> ReplyStream:
        reply = request.open_stream({})
        reply.end(b"end")
        reply.write(b"more")
        reply.end(b"more")
        return reply

    first, second = read_replies(await replies_of(answer, get("/") + get("/", CLOSE)))
    assert first.body == second.body == b"end"


async def test_a_broken_write_ends_its_own_stream_alone(site: Site) -> None:
    reply: Any = None

    async def wrong(request: Request) -> ReplyStream:
        nonlocal reply
        reply = request.open_stream({})
        await asyncio.Event().wait()
        return reply

    async with listening(App([Route("GET", "/", wrong)]), "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            writer.write(get("/"))
            await reader.readuntil(b"\r\n\r\n")
            broken = reply
            good_reader, good_writer = await asyncio.open_connection("127.0.0.1", port)
            good_writer.write(get("/"))
            await good_reader.readuntil(b"\r\n\r\n")
            broken.write("no bytes")
            reply.write(b"good")
            assert await good_reader.readuntil(b"good") == b"4\r\ngood"
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        writer.close()
        good_writer.close()


# --- who may pass, and what is told -------------------------------------------------------------------


class Known:
    """A caller that the guard has recognised."""

    def reply_headers(self) -> Mapping[str, str]:
        return {"x-left": "3"}


@pytest.mark.parametrize("path", ["/echo", "/stream", "/status/404"])
async def test_a_caller_adds_headers_to_every_reply(path: str) -> None:
    def guard(request: Request) -> None:
        request.caller = Known()

    async with serving(guard=guard) as site:
        [reply] = await site.ask(get(path, CLOSE))
        assert reply.headers["x-left"] == "3"


async def test_the_guard_sees_the_head_before_the_body_comes() -> None:
    def guard(request: Request) -> None:
        if request.header("authorization") is None:
            raise OverloadedError("not you")
        request.caller = Known()

    async with serving(guard=guard) as site:
        refused = await site.ask(post("/echo", b"body")[:-4])
        assert [reply.status for reply in refused] == [429]
        assert [reply.status for reply in await site.ask(get("/nowhere"))] == [429]
        assert [reply.status for reply in await site.ask(get("/open", CLOSE))] == [200]
        asks = f"OPTIONS /echo HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode()
        assert [reply.status for reply in await site.ask(asks)] == [204]
        [reply] = await site.ask(post("/echo", b"body", "Authorization: x", CLOSE))
        assert (seen(reply.body)["recognised"], seen(reply.body)["body"]) == (True, "body")


@pytest.mark.parametrize("sent", ["my-id.7_A", "two words", "a" * 129, ""])
async def test_every_reply_returns_a_safe_client_id(sent: str) -> None:
    def guard(request: Request) -> None:
        if request.path == "/wait":
            raise OverloadedError("not you")

    async with serving(guard=guard) as site:
        field = f"X-Request-Id: {sent}"
        replies = await site.ask(get("/echo", field) + get("/nowhere", field) + post("/stream", b"", field, CLOSE))
        replies += await site.ask(post("/wait", b"", field))
    assert [reply.status for reply in replies] == [200, 404, 405, 429]
    given = {reply.headers.get("x-request-id") for reply in replies}
    assert given == {sent if sent == "my-id.7_A" else None}


async def test_a_handler_may_name_the_request_itself() -> None:
    async def answer(request: Request) -> Reply:
        return Reply(headers={"x-request-id": "ours"})

    [reply] = read_replies(await replies_of(answer, get("/", "X-Request-Id: theirs", CLOSE)))
    assert reply.headers["x-request-id"] == "ours"


async def test_every_reply_is_told_with_its_route() -> None:
    told: list[tuple[str, int]] = []
    async with serving(on_reply=lambda path, status: told.append((path, status))) as site:
        await site.talk(
            get("/status/204") + get("/parts/a/b") + get("/stream") + get("/x") + post("/stream", b"") + b"?"
        )
    assert sorted(told) == [
        ("/parts/{name}/{rest:path}", 200), ("/status/{status}", 204), ("/stream", 200), ("other", 400), ("other", 404),
        ("other", 405),
    ]  # fmt: skip


async def test_the_access_log_has_a_line_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvmesh.mesh.http.access")
    async with serving(access_log=log_line) as site:
        await site.talk(get("/echo?key=secret") + get("/stream") + b"garbage")
        reader, writer = await site.open(post("/wait", b""))
        await site.handlers.began.wait()
        writer.close()
        await site.until_clean()
    records = [vars(record) for record in caplog.records if record.name == "kvmesh.mesh.http.access"]
    told = [tuple(record.get(name) for name in ("method", "path", "status")) for record in records]
    assert sorted(told, key=str) == [
        ("GET", "/echo", 200), ("GET", "/stream", 200), ("POST", "/wait", 499), (None, None, 400),
    ]  # fmt: skip
    stream = next(record for record in records if record.get("path") == "/stream")
    assert stream["bytes"] == len(b"event 0\nevent 1\nevent 2\nend\n")
    assert 0 <= stream["duration_ms"] < PATIENCE_S * 1e3
    assert "secret" not in caplog.text


async def test_without_the_flag_there_is_no_access_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await site.talk(get("/echo", CLOSE))
    assert not caplog.records
