"""The table of endpoints: what is added to it is served, described and documented."""

from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvmesh.frontend.bodies import decode_body
from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.endpoint import Endpoint, Services, identified
from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.operation import OWN_FAILURES, Operation
from kvmesh.frontend.shapes import Strict
from kvmesh.frontend.table import ENDPOINTS, check_settings
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import listening
from kvmesh.protocol.errors import ConfigError
from tests.support.generator import ScriptedGenerator

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


class GreetRequest(Strict, frozen=True):
    name: str


class GreetReply(msgspec.Struct, frozen=True):
    greeting: str


async def greet(services: Services, request: Request) -> Reply:
    asked = decode_body(request.body, msgspec.json.Decoder(GreetRequest))
    return json_reply(GreetReply(f"Hello, {asked.name}."))


ADDED = Endpoint(
    method="POST",
    path="/greet",
    handler=identified(greet, "greet"),
    operation=Operation(summary="Greet somebody", request=(GreetRequest,), reply=GreetReply, failures=OWN_FAILURES),
)


async def test_an_endpoint_added_to_the_table_is_served_and_described() -> None:
    api = FrontendApi(HttpSettings(), ModelRegistry(), ScriptedGenerator(), endpoints=(*ENDPOINTS, ADDED))
    async with listening(api.app, "127.0.0.1", 0) as url, aiohttp.ClientSession(url) as session:
        async with session.post("/greet", json={"name": "Ada"}) as reply:
            assert (reply.status, await reply.json()) == (200, {"greeting": "Hello, Ada."})
            assert reply.headers["x-request-id"].startswith("greet-")
        async with session.post("/greet", json={"nam": "Ada"}) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["param"]) == (400, "nam")
        async with session.get("/openapi.json") as reply:
            described = (await reply.json())["paths"]["/greet"]["post"]
            assert described["summary"] == "Greet somebody"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_the_page_of_the_api_has_every_endpoint(endpoint: Endpoint) -> None:
    path = endpoint.path.replace("{name:path}", "<name>")
    assert f"`{endpoint.method} {path}`" in API_PAGE.read_text(encoding="utf-8")


def test_no_two_endpoints_share_a_route() -> None:
    routes = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]
    assert len(set(routes)) == len(routes)


@pytest.mark.parametrize("setting", [{"api_keys_file": "k"}, {"jwt_keys": "k"}, {"responses_store": "memory"}])
def test_a_setting_whose_extension_is_missing_is_refused(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs an extension"):
        check_settings(FrontendConfig(**setting), [])
    check_settings(FrontendConfig(**setting))
    check_settings(FrontendConfig(), [])
