"""An endpoint reads more of a request than its body, and says more than the body of its reply: headers."""

from typing import cast

import pytest

from kvmesh.frontend.endpoint import with_hints
from kvmesh.frontend.generator import Hints
from kvmesh.frontend.keys.caller import KeyCaller
from kvmesh.frontend.keys.usage import Usage, UsageLog
from kvmesh.frontend.openai.parameters import CHAT_NAMES
from kvmesh.frontend.request import ParsedRequest
from kvmesh.mesh.http.connection import Connection
from kvmesh.mesh.http.request import Request
from tests.frontend.serving import TEXT, Served

CHAT = ParsedRequest(names=CHAT_NAMES, model="tiny", hints=Hints(session="s"))


def request(*headers: tuple[str, str], tenant: str = "") -> Request:
    made = Request(cast(Connection, None), "POST", "/v1/chat/completions", "", list(headers), 0.0)
    if tenant:
        made.caller = KeyCaller(Usage("k", UsageLog()), tenant=tenant)
    return made


def test_the_tenant_of_an_api_key_wins_over_the_header() -> None:
    asked = request(("x-kvmesh-tenant", "theirs"), ("x-kvmesh-priority", "3"), tenant="ours")
    assert with_hints(asked, CHAT).hints == Hints(session="s", tenant="ours", priority=3)
    assert with_hints(request(tenant="ours"), CHAT).hints.tenant == "ours"


def test_without_such_a_key_the_header_is_believed() -> None:
    assert with_hints(request(("x-kvmesh-tenant", "theirs")), CHAT).hints.tenant == "theirs"
    assert with_hints(request(), CHAT) is CHAT


@pytest.mark.parametrize("model", ["tiny", "none"])
async def test_embeddings_tell_the_request_id_whatever_comes_of_them(able: Served, model: str) -> None:
    body = {"model": model, "input": TEXT["prompt"]}
    status, headers, _ = await able.post("/v1/embeddings", body, x_request_id="mine")
    assert status == (200 if model == "tiny" else 404)
    assert headers["x-request-id"] == "mine"
    _, headers, _ = await able.post("/v1/embeddings", body)
    assert headers["x-request-id"].startswith("embd-")
