"""Test which web pages may call, as browsers ask and decide."""

import asyncio
import json

import pytest

from kvmesh.mesh.http.cors import Cors, read_origins
from kvmesh.mesh.http.errors import UnauthorizedError
from kvmesh.mesh.http.request import Reply, Request
from kvmesh.mesh.http.server import HttpLimits, Route
from kvmesh.protocol.errors import ConfigError, OverloadedError
from tests.mesh.http.raw import CLOSE, Got, get, post, serving
from tests.support.patience import PATIENCE_S

PAGE = "https://app.example"
ORIGIN = f"Origin: {PAGE}"


def rules(origins: str = f"{PAGE},http://localhost:3000") -> Cors:
    return Cors(read_origins(origins), ("x-request-id", "retry-after"))


def preflight(path: str, *headers: str, method: str = "POST") -> bytes:
    asks = f"Access-Control-Request-Method: {method}"
    lines = "".join(f"{header}\r\n" for header in (asks, *headers, CLOSE))
    return f"OPTIONS {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()


def without_date(reply: Got) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name not in ("date", "connection")}


# --- preflights ---------------------------------------------------------------------------------------


async def test_a_preflight_allows_what_the_page_asks_for() -> None:
    async with serving(cors=rules()) as site:
        asked = "Access-Control-Request-Headers: authorization,content-type,x-stainless-os"
        [reply] = await site.ask(preflight("/echo", ORIGIN, asked))
        assert (reply.status, reply.body) == (204, b"")
        assert without_date(reply) == {
            "allow": "GET, HEAD, OPTIONS, POST",
            "access-control-allow-origin": PAGE,
            "access-control-allow-credentials": "true",
            "access-control-allow-methods": "GET, HEAD, OPTIONS, POST",
            "access-control-allow-headers": "authorization,content-type,x-stainless-os",
            "access-control-expose-headers": "x-request-id, retry-after",
            "access-control-max-age": "7200",
            "vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
        }


async def test_a_page_of_another_origin_is_not_allowed() -> None:
    async with serving(cors=rules()) as site:
        for origin in ("https://evil.example", "http://app.example", f"{PAGE}:8443", f"{PAGE}.evil.example", "null"):
            [reply] = await site.ask(preflight("/echo", f"Origin: {origin}"))
            assert without_date(reply) == {"allow": "GET, HEAD, OPTIONS, POST", "vary": "Origin"}


async def test_all_pages_may_call_where_the_setting_says_so_without_credentials() -> None:
    async with serving(cors=rules("*")) as site:
        [reply] = await site.ask(preflight("/echo", "Origin: null"))
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
        [reply] = await site.ask(get("/echo", ORIGIN, CLOSE))
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "vary" not in reply.headers


async def test_a_path_or_method_that_is_nowhere_is_told_by_the_reply_and_not_by_the_preflight() -> None:
    async with serving(cors=rules()) as site:
        [reply] = await site.ask(preflight("/nowhere", ORIGIN))
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, PAGE)
        [reply] = await site.ask(preflight("/echo", ORIGIN, method="DELETE"))
        assert "DELETE" in reply.headers["access-control-allow-methods"]
        assert "DELETE" not in reply.headers["allow"]


async def test_a_page_may_reach_a_private_network_if_the_browser_asks() -> None:
    async with serving(cors=rules()) as site:
        [reply] = await site.ask(preflight("/echo", ORIGIN, "Access-Control-Request-Private-Network: true"))
        assert reply.headers["access-control-allow-private-network"] == "true"
        [reply] = await site.ask(preflight("/echo", ORIGIN))
        assert "access-control-allow-private-network" not in reply.headers


async def test_a_preflight_needs_no_key() -> None:
    def guard(request: Request) -> None:
        raise UnauthorizedError("no key")

    async with serving(cors=rules(), guard=guard) as site:
        assert [reply.status for reply in await site.ask(preflight("/echo", ORIGIN))] == [204]
        [reply] = await site.ask(post("/echo", b"", ORIGIN))
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (401, PAGE)


# --- replies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/echo", ORIGIN), 200),
        (get("/stream", ORIGIN), 200),
        (get("/nowhere", ORIGIN), 404),
        (post("/stream", b"", ORIGIN), 405),
        (post("/echo", b"x" * 200, ORIGIN), 413),
        (post("/echo", b"x", ORIGIN, "Content-Encoding: br"), 415),
        (get("/full", ORIGIN), 429),
        (get("/bug", ORIGIN), 500),
        (get("/status/304", ORIGIN), 304),
    ],
)
async def test_every_reply_may_be_read_by_its_page(request_: bytes, status: int) -> None:
    async def fail(request: Request) -> Reply:
        raise OverloadedError("full")

    async def break_down(request: Request) -> Reply:
        raise RuntimeError("a bug")

    more = [Route("GET", "/full", fail), Route("GET", "/bug", break_down)]
    async with serving(HttpLimits(max_body_bytes=100), more=more, cors=rules()) as site:
        [reply] = await site.ask(request_.replace(ORIGIN.encode(), f"{ORIGIN}\r\n{CLOSE}".encode()))
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-expose-headers"] == "x-request-id, retry-after"
        assert reply.headers["vary"] == "Origin"


async def test_a_cache_in_between_learns_that_the_origin_matters() -> None:
    async with serving(cors=rules()) as site:
        [reply] = await site.ask(get("/echo", CLOSE))
        assert reply.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in reply.headers


async def test_without_the_setting_nothing_of_it_is_sent() -> None:
    async with serving() as site:
        [reply] = await site.ask(get("/echo", ORIGIN, CLOSE))
        assert not [name for name in reply.headers if name.startswith("access-control") or name == "vary"]
        [reply] = await site.ask(preflight("/echo", ORIGIN))
        assert without_date(reply) == {"allow": "GET, HEAD, OPTIONS, POST"}
        assert [reply.status for reply in await site.ask(preflight("/nowhere", ORIGIN))] == [404]


# --- the setting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", []),
        ("*", ["*"]),
        ("https://a.example, http://localhost:3000", ["https://a.example", "http://localhost:3000"]),
        ("HTTPS://A.Example/,", ["https://a.example"]),
        ("https://a:443,http://a:80,http://a:443", ["https://a", "http://a", "http://a:443"]),
        ("http://[::1]:8080,tauri://localhost", ["http://[::1]:8080", "tauri://localhost"]),
    ],
)
def test_origins_are_read_as_browsers_write_them(text: str, origins: list[str]) -> None:
    assert read_origins(text) == origins


@pytest.mark.parametrize(
    "text",
    ["a.example", "https://", "https://a/path", "https://*.a", "http://localhost:*", "null", "https://a b", "**"],
)
def test_what_is_no_origin_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_origins(f"https://b,{text}")
    assert repr(text) in str(refused.value)


async def test_a_page_that_asks_twice_is_answered_twice() -> None:
    async with serving(cors=rules()) as site, asyncio.timeout(PATIENCE_S):
        replies = await site.ask(get("/echo", ORIGIN) + get("/stream", "Origin: https://evil.example", CLOSE))
    assert [reply.headers.get("access-control-allow-origin") for reply in replies] == [PAGE, None]
    assert json.loads(replies[0].body)["path"] == "/echo"
