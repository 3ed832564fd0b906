"""Public advisories about other servers, tried on a frontend over HTTP. docs/security.md has the table."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.salts import open_salt
from kvmesh.mesh.http.errors import ForbiddenError
from tests.frontend.serving import CHAT, TEXT, Served, able_card, serving
from tests.mesh.http.raw import Handlers, Site, read_replies
from tests.support.patience import PATIENCE_S

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 4},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/tokenize": TEXT,
    "/kvmesh/route": CHAT,
}
FORGED = {"do_remote_prefill": True, "remote_host": "10.0.0.66", "remote_port": 1, "tp_size": 2**31}


@pytest.fixture
async def served(able_folder: Path) -> AsyncIterator[Served]:
    async with serving(able_card(able_folder)) as served:
        yield served


@pytest.fixture
async def keyed(tmp_path: Path, able_folder: Path) -> AsyncIterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text("sk-acme acme\nsk-ajax ajax\n")
    async with serving(able_card(able_folder), guard=ApiKeyGuard(str(keys))) as served:
        yield served


# --- CVE-2026-94622, -94626: forged kv_transfer_params -------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field",
    ["kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "vllm_xargs", "ticket"],
)
async def test_what_engines_say_to_each_other_is_refused_from_a_client(served: Served, path: str, field: str) -> None:
    status, _, body = await served.post(path, PATHS[path] | {field: FORGED})
    assert (status, field in json.dumps(body)) == (400, True), body
    assert served.generator.requests == []


async def test_transfer_parameters_inside_other_fields_reach_nobody(served: Served) -> None:
    for place in ("kvmesh", "extra_body", "stream_options"):
        status, _, body = await served.post("/v1/chat/completions", CHAT | {place: {"kv_transfer_params": FORGED}})
        assert status == 400, (place, body)
    status, _, _ = await served.post("/v1/chat/completions", CHAT | {"metadata": {"kv_transfer_params": "x"}})
    assert not any("kv_transfer" in str(request) for request in served.generator.requests), status


# --- CVE-2026-105756: odd salts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "salt", ["a@b", "../../etc", "a\\b", "nul\0byte", "%41", "\u202e\U0001f600", "x" * 129, "a b", "\n"]
)
async def test_an_odd_salt_reaches_engines_as_plain_characters(served: Served, salt: str) -> None:
    for _ in range(2):
        status, _, body = await served.post("/v1/completions", TEXT | {"cache_salt": salt})
        assert status == 200, body
    first, second = (request.cache_salt or "" for request in served.generator.requests)
    assert first == second and len(first) == 32 and first.isalnum() and first != salt


@pytest.mark.parametrize("salt", ["", "x" * 257, 1, True, ["a"], {"a": 1}, 1.5])
async def test_a_salt_that_is_no_short_text_is_refused(served: Served, salt: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"):
        status, _, body = await served.post(path, PATHS[path] | {"cache_salt": salt})
        assert (status, "cache_salt" in json.dumps(body)) == (400, True), body


async def test_half_a_character_in_a_salt_does_no_harm(served: Served) -> None:
    body = json.dumps(TEXT | {"cache_salt": "\ud800"}).encode()
    status, _, _ = await served.post("/v1/completions", body)
    assert status in (200, 400)


def test_different_salts_stay_different() -> None:
    salts = ["a", "a@", "a/", "a\0", "a@@", "@a", "x" * 128, "x" * 129, "x" * 130, None]
    assert len({open_salt(salt) for salt in salts}) == len(salts)
    assert open_salt("plain-Salt_1.=+:") == "plain-Salt_1.=+:"


# --- CVE-2026-105754: forged hashes of media -----------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "forged"},
        {"type": "image_url", "image_url": None, "uuid": "forged"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}, "uuid": "forged"},
        {"type": "image_embeds", "image_embeds": "AAAA", "uuid": "forged"},
    ],
    ids=lambda part: f"{part['type']}-{sorted(part)}",
)
async def test_media_with_a_hash_of_the_client_are_refused(served: Served, part: dict[str, Any]) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": [part]}]}
    status, _, answer = await served.post("/v1/chat/completions", body)
    assert (status, part["type"] in json.dumps(answer)) == (400, True), answer
    for field in ("mm_processor_kwargs", "multi_modal_uuids", "mm_hashes"):
        assert (await served.post("/v1/chat/completions", CHAT | {field: {"image": ["x"]}}))[0] == 400


# --- PYSEC-2026-4198: X-Request-Id as a key ------------------------------------------------------------


async def test_two_tenants_with_one_request_id_are_two_requests(keyed: Served) -> None:
    one, other = await asyncio.gather(
        keyed.post("/v1/completions", TEXT, x_api_key="sk-acme", x_request_id="same"),
        keyed.post("/v1/completions", TEXT, x_api_key="sk-ajax", x_request_id="same"),
    )
    assert one[0] == other[0] == 200 and one[2]["id"] != other[2]["id"]
    ids = [request.request_id for request in keyed.generator.requests]
    assert len(set(ids)) == 2 and all(name.endswith("-same") for name in ids)
    assert len({request.cache_salt for request in keyed.generator.requests}) == 2


@pytest.mark.parametrize("sent", ["../../x", "a b", "x" * 129, "\u00e9", "a;b", "%0a"])
async def test_an_unsafe_request_id_is_not_used(served: Served, sent: str) -> None:
    status, headers, _ = await served.post("/v1/completions", TEXT, x_request_id=sent)
    assert status == 200 and headers["x-request-id"] != sent
    assert sent not in served.generator.requests[-1].request_id


# --- CVE-2026-115911: endless templates ----------------------------------------------------------------

ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


async def test_a_clients_template_is_never_rendered(served: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        async with asyncio.timeout(PATIENCE_S):
            status, _, body = await served.post(path, PATHS[path] | {"chat_template": ENDLESS})
        assert (status, "chat_template" in json.dumps(body)) == (400, True), body


async def test_a_template_among_the_templates_variables_is_text(served: Served) -> None:
    for name in ("chat_template", "tokenize", "template", "self", "caller", "tools", "messages"):
        async with asyncio.timeout(PATIENCE_S):
            status, _, _ = await served.post("/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: ENDLESS}})
        assert status in (200, 400), name


# --- CVE-2026-49468: a path that is checked is the path that is served ---------------------------------

TARGETS = [
    *(
        "/v1/models",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/./models",
        "/live/../v1/models",
        "/live/%2e%2e/v1/models",
    ),
    *(
        "/%76%31/models",
        "/v1%2fmodels",
        "/v1/models;/live",
        "/v1/models%00/live",
        "/v1/models?/live",
        "/v1/models#/live",
    ),
    *(
        "http://a/v1/models",
        "http://a/live/../v1/models",
        "http://live/v1/models",
        "HTTP://x/v1/models?a=/live",
        "/V1/models",
    ),
    *("/live%2f..%2fv1%2fmodels", "/live/..%2fv1/models", "/./v1/models", "\\v1\\models", "/live\\..\\v1\\models", "*"),
]
HOSTS = ["x", "a/#", "a/live?", "a/live#", "x/live", "live", "a@b", "x:80/live", "[::1]/live", "x,live", "x?y", ""]


async def answer_to(port: int, target: str, host: str) -> tuple[int, bytes]:
    site = Site(None, port, Handlers())  # type: ignore[arg-type]
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1")
    [reply] = read_replies(await site.talk(request))
    return reply.status, reply.body


@pytest.mark.parametrize("target", TARGETS)
async def test_no_spelling_of_a_path_opens_a_locked_one(keyed: Served, target: str) -> None:
    for host in ("x", "a/#", "a/live"):
        status, body = await answer_to(keyed.port, target, host)
        assert status in (400, 401, 404, 405), (target, host, status)
        assert b'"tiny"' not in body


@pytest.mark.parametrize("host", HOSTS)
async def test_no_host_opens_a_locked_path(keyed: Served, host: str) -> None:
    for path in ("/v1/models", "/v1/completions", "/kvmesh/route", "/tokenize"):
        assert (await answer_to(keyed.port, path, host))[0] in (400, 401)
    assert (await answer_to(keyed.port, "/live", "x"))[0] == 200


async def test_the_guard_sees_the_path_that_is_served(served: Served) -> None:
    """Whatever its spelling: a guard that forbids one path forbids all ways to it."""
    seen: list[str] = []

    def guard(request: Any) -> None:
        seen.append(request.path)
        if served.app.find(request).path == "/v1/models":
            raise ForbiddenError("locked")

    served.app.guard = guard
    for target in TARGETS:
        status, body = await answer_to(served.port, target, "x")
        assert status != 200 or b'"tiny"' not in body, target
    assert "/v1/models" in seen
