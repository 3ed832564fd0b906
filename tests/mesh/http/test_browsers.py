"""Test what an open port refuses because a stranger's web page may have made a browser send it."""

import http.client
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvmesh.mesh.http import browsers
from kvmesh.mesh.http.browsers import BrowserPolicy, own_names
from kvmesh.mesh.http.cors import Cors, read_origins
from kvmesh.mesh.http.errors import ForbiddenError, UnauthorizedError, UnsupportedTypeError
from kvmesh.mesh.http.request import Request
from kvmesh.mesh.http.server import App, listening
from kvmesh.mesh.telemetry import serve_metrics
from kvmesh.protocol.errors import ConfigError
from tests.mesh.http.raw import Got, Handlers, Site, read_replies

PAGE = "https://app.example"
JSON = ("content-type", "application/json")
BODY = ("content-length", "2")


def policy(allowed: str = "", origins: str = "", *, checks_host: bool = True) -> BrowserPolicy:
    cors = Cors(read_origins(origins)) if origins else None
    return BrowserPolicy(allowed, own_names("0.0.0.0", "gpu1.example.com"), cors, checks_host=checks_host)


def refuses(rules: BrowserPolicy, *headers: tuple[str, str], method: str = "GET") -> bool:
    try:
        rules.check(method, headers)
    except ForbiddenError:
        return True
    return False


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        *("", "localhost", "LOCALHOST:8000", "app.localhost", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.1"),
        *("0.0.0.0:8000", "10.1.2.3", "[::1]", "[::1]:8000", "[fe80::1%25eth0]:80", "frontend", "frontend:8000"),
        *("kvmesh_upstream", "host.docker.internal:8000", "host.containers.internal", "ip-10-0-0-1.ec2.internal"),
        *(
            "demo-frontend.prod.svc",
            "demo-frontend.prod.svc.cluster.local:8000",
            "gpu1.example.com",
            "GPU1.example.com",
        ),
    ],
)
def test_names_that_nobody_can_register_are_served(host: str) -> None:
    assert not refuses(policy(), ("host", host))


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "evil.example.", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("evillocalhost.com", "svc.cluster.local.evil.example", "printer.local", "gpu1.example.com.evil.example"),
        *("localhost,evil.example", "xn--80ak6aa92e.com", "1.2.3.4.nip.io", "demo-frontend.dev"),
    ],
)
def test_names_that_somebody_can_register_are_refused(host: str) -> None:
    assert refuses(policy(), ("host", host))


def test_the_own_name_of_the_host_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsers.socket, "gethostname", lambda: "Node7.example.org")
    assert not refuses(policy(), ("host", "node7.example.org:8000"))
    monkeypatch.setattr(browsers.socket, "gethostname", lambda: "laptop")
    assert not refuses(policy(), ("host", "laptop.local"))


def test_the_refusal_names_the_host_and_the_setting() -> None:
    with pytest.raises(ForbiddenError, match=r"'llm\.example\.com:80'.*add llm\.example\.com to --allowed-hosts"):
        policy().check("GET", [("host", "llm.example.com:80")])


def test_the_operator_allows_further_names() -> None:
    rules = policy("LLM.example.com, *.corp.example")
    assert not refuses(rules, ("host", "llm.example.com"))
    assert not refuses(rules, ("host", "a.b.corp.example:8000"))
    for host in ("x.llm.example.com", "corp.example", "evilcorp.example", "corp.example.evil.example"):
        assert refuses(rules, ("host", host))
    assert not refuses(policy("*"), ("host", "evil.example"))


@pytest.mark.parametrize(
    "name", ["https://llm.example.com", "llm.example.com:8000", "a/b", "*x.example.com", "a b", "**"]
)
def test_an_allowed_host_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        policy(name)


def test_names_are_remembered_up_to_a_limit() -> None:
    rules = policy()
    for number in range(browsers.MOST_KNOWN + 10):
        rules.check("GET", [("host", f"host{number}")])
    assert len(rules._known) <= browsers.MOST_KNOWN


# --- pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [("origin", "http://evil.example")],
        [("origin", "null")],
        [("origin", "http://localhost:3000")],  # another program of this computer
        [("origin", "http://localhost.evil.example:8000")],
        [("sec-fetch-site", "cross-site")],
        [("sec-fetch-site", "same-site")],
        [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "script")],
        [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")],
        [("sec-fetch-site", "cross-site"), ("origin", "http://localhost:8000")],
        [("sec-fetch-site", "anything")],
    ],
)
def test_a_page_of_another_origin_is_refused(headers: Sequence[tuple[str, str]]) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        assert refuses(policy(), ("host", "localhost:8000"), *headers, method=method)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("llm:443", "https://llm"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("LOCALHOST:8000", "http://localhost:8000"),
    ],
)
def test_pages_of_the_own_origin_are_served(host: str, origin: str) -> None:
    assert not refuses(policy(), ("host", host), ("origin", origin), JSON, method="POST")
    assert not refuses(policy(), ("host", host), ("sec-fetch-site", "same-origin"))


def test_a_page_behind_a_proxy_that_changes_the_host_is_served_if_its_browser_says_same_origin() -> None:
    page = [("host", "upstream"), ("origin", "https://chat.example"), JSON]
    assert not refuses(policy(), *page, ("sec-fetch-site", "same-origin"), method="POST")
    assert refuses(policy(), *page, method="POST")


def test_a_person_may_type_the_address_or_follow_a_link() -> None:
    visit = (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))
    assert not refuses(policy(), ("host", "localhost"), ("sec-fetch-site", "none"), *visit)
    assert not refuses(policy(), ("host", "localhost"), ("sec-fetch-site", "cross-site"), *visit)
    assert refuses(policy(), ("host", "localhost"), ("sec-fetch-site", "cross-site"), *visit, method="POST")


def test_pages_of_the_allowed_origins_are_served() -> None:
    rules = policy(origins=PAGE)
    for site in ("cross-site", "same-site"):
        page = [("host", "localhost:8000"), ("origin", PAGE), ("sec-fetch-site", site), JSON, BODY]
        assert not refuses(rules, *page, method="POST")
    assert refuses(rules, ("host", "localhost:8000"), ("origin", f"{PAGE}:8443"))
    assert refuses(rules, ("host", "evil.example"), ("origin", PAGE))


def test_where_all_pages_may_call_nothing_is_checked() -> None:
    assert browsers.policy_of("", (), Cors(read_origins("*")), is_tls=False) is None


def test_behind_tls_the_browser_itself_checks_the_name() -> None:
    rules = browsers.policy_of("", (), None, is_tls=True)
    assert rules is not None
    assert not refuses(rules, ("host", "llm.example.com"))
    assert refuses(rules, ("host", "llm.example.com"), ("origin", "https://evil.example"))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_page_has_to_send_json_as_json(kind: str) -> None:
    page = [("host", "localhost"), ("origin", "http://localhost"), ("content-type", kind)]
    for framing in (BODY, ("transfer-encoding", "chunked")):
        with pytest.raises(UnsupportedTypeError, match="application/json"):
            policy().check("POST", [*page, framing])
    policy().check("POST", page)  # without a body
    for good in ("application/json", "Application/JSON; charset=utf-8", "application/problem+json"):
        policy().check("POST", [*page[:2], BODY, ("content-type", good)])


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_programs_that_are_no_browsers_may_send_any_type(kind: str) -> None:
    policy().check("POST", [("host", "localhost"), BODY, ("content-type", kind)])


VALUES = st.text(st.characters(max_codepoint=255), max_size=40) | st.sampled_from(
    [
        "evil.example",
        "http://evil.example",
        "https://",
        "://",
        "null",
        "cross-site",
        "same-origin",
        "[",
        "[]:",
        ":",
        ".",
        "..",
        "a.b",
    ]
)
NAMES = st.sampled_from(["host", "origin", "sec-fetch-site", "sec-fetch-mode", "content-type", "content-length"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8), st.sampled_from(["GET", "POST", "OPTIONS"]))
def test_no_headers_are_worse_than_a_refusal(headers: list[tuple[str, str]], method: str) -> None:
    try:
        policy(origins=PAGE).check(method, headers)
    except (ForbiddenError, UnsupportedTypeError):
        return
    last = dict(headers)
    assert last.get("host") != "evil.example"
    assert last.get("origin") != "http://evil.example" or last.get("sec-fetch-site") == "same-origin"


# --- ports ------------------------------------------------------------------------------------------------


async def asked(url: str, head: str) -> Got:
    site = Site(None, int(url.rpartition(":")[2]), Handlers())  # type: ignore[arg-type]
    [reply] = read_replies(await site.talk(head.encode()))
    return reply


async def test_an_open_port_checks_every_route_and_answers_in_the_shape_of_openai() -> None:
    handlers = Handlers()
    async with listening(App(handlers.routes()), "127.0.0.1", 0) as url:
        for path in ("/echo", "/open", "/nowhere"):
            reply = await asked(url, f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (403, "forbidden")
        page = (
            "Host: localhost\r\nOrigin: http://evil.example\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert (await asked(url, f"POST /echo HTTP/1.1\r\n{page}")).status == 403
        assert handlers.handled == 0
        reply = await asked(url, "GET /echo HTTP/1.0\r\n\r\n")  # the health check of a load balancer
        assert reply.status == 200
        form = "Host: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 2\r\n"
        assert (await asked(url, f"POST /echo HTTP/1.1\r\n{form}Connection: close\r\n\r\n{{}}")).status == 200


async def test_a_port_that_asks_for_keys_takes_every_name() -> None:
    def guard(request: Request) -> None:
        if request.header("authorization") != "Bearer key":
            raise UnauthorizedError("no key")

    async with listening(App(Handlers().routes(), guard=guard), "127.0.0.1", 0) as url:
        head = "GET /echo HTTP/1.1\r\nHost: llm.example.com\r\nConnection: close\r\n"
        assert (await asked(url, f"{head}\r\n")).status == 401
        assert (await asked(url, f"{head}Authorization: Bearer key\r\n\r\n")).status == 200


def test_a_port_of_metrics_refuses_pages_too() -> None:
    url, close = serve_metrics("127.0.0.1", 0, registry=CollectorRegistry(), allowed_hosts="gpu1.example.com")
    try:
        port = int(url.removesuffix("/metrics").rpartition(":")[2])

        def status(path: str, **headers: str) -> int:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            client.request("GET", path, headers=headers)
            return client.getresponse().status

        for path in ("/metrics", "/health"):
            assert status(path, Host="evil.example") == 403
            assert status(path, Host="localhost", Origin="http://evil.example") == 403
            assert status(path, Host="gpu1.example.com:9100") == 200
            assert status(path) == 200
    finally:
        close()
