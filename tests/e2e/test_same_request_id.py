"""Test that X-Request-Id is no key: one id of two tenants at the same time (PYSEC-2026-4198), from outside."""

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from tests.support.services import NEW, Services
from tests.support.streams import Stream, check_mock_answer

pytestmark = pytest.mark.e2e

PROMPT = tuple(range(20, 100))
OTHER = tuple(range(200, 260))
ID = "the-same-id"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("same-id")
    keys = folder / "keys"
    keys.write_text("".join(f"{written(KeyLine(name=n, sha256=hashed(f'sk-{n}'), tenant=n))}\n" for n in ("a", "b")))
    keys.chmod(0o600)
    with ExitStack() as stack:
        mesh = Services(folder, f"file:{folder / 'discovery'}", stack)
        keyed = ("--api-keys-file", str(keys), "--responses-store", "memory")
        frontend = mesh.start("frontend", NEW, *keyed)
        worker = mesh.start("aggregated", NEW, "--mock-itl-ms", "30")
        mesh.until_ready(frontend, worker)
        mesh.until_joined(frontend, 1)
        yield mesh.url(frontend)


def asked_by(tenant: str) -> dict[str, str]:
    return {"x-api-key": f"sk-{tenant}", "x-request-id": ID}


def test_the_requests_of_two_tenants_do_not_mix_or_end_each_other(url: str) -> None:
    """Also where one of them leaves: the other one's answer is whole."""
    staying = [Stream(url, PROMPT, 60, headers=asked_by("a")), Stream(url, OTHER, 60, headers=asked_by("b"))]
    leaving = [Stream(url, PROMPT, 60, headers=asked_by(tenant)) for tenant in ("a", "b")]
    for stream in (*staying, *leaving):
        stream.until_tokens(1)
    for stream in leaving:
        stream.leave()
    for stream in staying:
        check_mock_answer(stream.join())
        assert stream.headers["x-request-id"] == ID


def test_a_stored_response_is_not_found_by_a_request_id(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as http:
        body = {"model": "tiny", "input": "a secret", "max_output_tokens": 4, "store": True}
        stored = http.post("/v1/responses", json=body, headers=asked_by("a")).json()["id"]
        assert http.get(f"/v1/responses/{stored}", headers=asked_by("a")).status_code == 200
        for name in (stored, ID, f"resp_{ID}"):
            for path in (f"/v1/responses/{name}", f"/v1/responses/{name}/input_items"):
                assert http.get(path, headers=asked_by("b")).status_code == 404
            assert http.post(f"/v1/responses/{name}/cancel", headers=asked_by("b")).status_code == 404
            assert http.delete(f"/v1/responses/{name}", headers=asked_by("b")).status_code == 404
            continued = body | {"previous_response_id": name}
            assert http.post("/v1/responses", json=continued, headers=asked_by("b")).status_code in (400, 404)
        assert http.get(f"/v1/responses/{stored}", headers=asked_by("a")).status_code == 200
