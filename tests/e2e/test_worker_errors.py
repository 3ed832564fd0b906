"""An error that a worker raises reaches the HTTP client with all of its fields."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from kvmesh.mesh.discovery import open_discovery
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError
from kvmesh.protocol.messages import encode
from tests.frontend import tiny
from tests.frontend.whole_mesh import running_frontend
from tests.support.patience import PATIENCE_S

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


class RefusingMesh:
    """A frontend with its router, and a worker that refuses every request with `error`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.error = MeshError("not set")
        self._url = url
        self._session = session

    async def generate(self, call: Call) -> None:
        raise self.error

    async def ask(self, **fields: Any) -> tuple[int, Any, str]:
        """Return (status, headers, text) of the reply."""
        async with self._session.post(f"{self._url}/v1/completions", json=BODY | fields) as reply:
            return reply.status, reply.headers, await reply.text()

    async def until_worker_is_known(self) -> None:
        while True:
            async with self._session.get(f"{self._url}/health") as reply:
                if sum((await reply.json())["workers"].get("tiny", {}).values()):
                    return
            await asyncio.sleep(0.02)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[RefusingMesh]:
    place = f"file:{tmp_path / 'run'}"
    discovery, server = open_discovery(place), PlaneServer({})
    try:
        async with (
            running_frontend(place) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
        ):
            mesh = RefusingMesh(url, session)
            server.handlers["generate"] = mesh.generate
            address = await server.start("127.0.0.1")
            card = replace(tiny.card("w", path=tiny.save_model(tmp_path / "model")), address=address)
            await discovery.put("workers/w", encode(card))
            async with asyncio.timeout(PATIENCE_S):
                await mesh.until_worker_is_known()
            yield mesh
    finally:
        await discovery.close()
        await server.close()


async def test_the_client_learns_which_parameter_a_worker_refused(mesh: RefusingMesh) -> None:
    mesh.error = InvalidRequestError("min_p is 2, the most is 1", hint="send less", param="min_p")
    expected = (
        '{"error":{"message":"min_p is 2, the most is 1; send less",'
        '"type":"invalid_request_error","param":"min_p","code":null}}'
    )
    status, _, text = await mesh.ask()
    assert (status, text) == (400, expected)
    _, _, text = await mesh.ask(stream=True)
    assert expected in text


async def test_the_client_learns_when_to_retry(mesh: RefusingMesh) -> None:
    mesh.error = OverloadedError("too many sequences", retry_after_s=8.2)
    status, headers, text = await mesh.ask()
    assert (status, headers["Retry-After"]) == (429, "9")
    assert "too many sequences; retry after 9 s" in text
