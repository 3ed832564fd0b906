"""Test that web pages of strangers cannot use a mesh without keys: each HTTP port of each service, from outside."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import mesh_tls
from tests.support.services import NEW, Services, quiet_port

pytestmark = pytest.mark.skipif(mesh_tls.IS_ON, reason="ports that ask for certificates check no web pages")

EVIL = "http://evil.example"
PROMPT = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 4}).encode()


class Ports:
    """The HTTP ports of a mesh of one frontend, one router and one worker."""

    def __init__(self, services: Services) -> None:
        self.frontend = services.start("frontend", NEW, "--router", "remote")
        self.router = services.start("router", NEW, "--metrics-port", str(quiet_port()))
        self.worker = services.start("aggregated", NEW)
        services.until_ready(self.frontend, self.router, self.worker)
        services.until_joined(self.frontend, 1)
        self.of_frontend = _port(services.url(self.frontend))
        self.of_router = _port(services.url(self.router))
        found = re.search(r"\bmetrics=(http://\S+)/metrics", services.log(self.worker))
        assert found is not None
        self.of_worker = _port(found[1])


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("web-pages")
    with ExitStack() as stack:
        yield Ports(Services(folder, f"file:{folder / 'discovery'}", stack))


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = client.getresponse()
        is_feed = answer.getheader("content-type") == "text/event-stream"
        return answer.status, b"" if is_feed else answer.read()
    finally:
        client.close()


FRONTEND_READS = (
    "/v1/models",
    "/metrics",
    "/health",
    "/live",
    "/ui",
    "/ui/events",
    "/docs",
    "/openapi.json",
    "/nowhere",
)


def test_a_page_that_rebinds_its_name_reads_nothing(ports: Ports) -> None:
    pages = [(ports.of_frontend, path) for path in FRONTEND_READS]
    pages += [(ports.of_router, path) for path in ("/workers", "/snapshot", "/metrics", "/health")]
    pages += [(ports.of_worker, path) for path in ("/metrics", "/health")]
    for port, path in pages:
        status, body = ask(port, "GET", path, Host="evil.example:8000")
        assert (status, "--allowed-hosts" in body.decode()) == (403, True), (path, body)


def test_a_page_of_another_origin_can_send_and_read_nothing(ports: Ports) -> None:
    tries = [(ports.of_frontend, "POST", "/v1/completions"), (ports.of_router, "POST", "/place")]
    tries += [(ports.of_frontend, "GET", path) for path in FRONTEND_READS]
    tries += [(ports.of_router, "GET", "/workers"), (ports.of_worker, "GET", "/metrics")]
    for port, method, path in tries:
        body = PROMPT if method == "POST" else None
        for sign in ({"Origin": EVIL}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
            assert ask(port, method, path, body, Content_Type="text/plain", **sign)[0] == 403, (method, path, sign)


def test_what_people_and_programs_do_still_works(ports: Ports) -> None:
    for host in ("localhost:8000", "frontend:8000", "10.0.0.7:8000", "demo-frontend.prod.svc.cluster.local:8000"):
        assert ask(ports.of_frontend, "GET", "/v1/models", Host=host)[0] == 200
    form = "application/x-www-form-urlencoded"  # what `curl -d` sends
    assert ask(ports.of_frontend, "POST", "/v1/completions", PROMPT, Content_Type=form)[0] == 200
    own = f"http://127.0.0.1:{ports.of_frontend}"
    json_page = {"Content_Type": "application/json", "Sec_Fetch_Site": "same-origin"}
    assert ask(ports.of_frontend, "POST", "/v1/completions", PROMPT, Origin=own, **json_page)[0] == 200
    assert ask(ports.of_frontend, "POST", "/v1/completions", PROMPT, Origin=own, Content_Type="text/plain")[0] == 415
    assert ask(ports.of_frontend, "GET", "/ui/events", Sec_Fetch_Site="same-origin")[0] == 200  # the live page's feed
    assert ask(ports.of_frontend, "GET", "/ui", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate")[0] == 200
    assert ask(ports.of_worker, "GET", "/metrics", Host="worker-0:9100")[0] == 200
