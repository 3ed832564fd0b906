"""A small service on a Unix socket: routes, JSON in and out, failures."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, Route, listening_unix
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from tests.mesh.http.raw import CLOSE, Got, get, post, read_replies
from tests.support.patience import PATIENCE_S


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    count: int


async def scale(request: Request) -> Reply:
    asked = request.json(Scale)
    if asked.count > 8:
        raise InvalidRequestError("at most 8 workers fit", param="count")
    return json_reply({"pool": request.params["pool"], "count": asked.count})


async def fail(request: Request) -> Reply:
    raise RuntimeError("a secret")


APP = App([Route("POST", "/pools/{pool}", scale), Route("GET", "/fail", fail)])


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "socket"
    async with listening_unix(APP, path) as url:
        assert url == f"unix:{path}"
        yield path


async def ask(path: Path, data: bytes) -> Got:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(data)
        [reply] = read_replies(await reader.read())
        writer.close()
    return reply


def error(reply: Got) -> dict[str, Any]:
    return json.loads(reply.body)["error"]


async def test_json_in_and_out(path: Path) -> None:
    reply = await ask(path, post("/pools/decode", b'{"count": 3}', CLOSE))
    assert (reply.status, json.loads(reply.body)) == (200, {"pool": "decode", "count": 3})


BAD_BODIES = [b"", b"{", b"[]", b'{"count": "3"}', b'{"count": 3, "cuont": 4}', b"\xff", b'{"\xff": 1}', b"[" * 10_000]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: str(body[:8]))
async def test_a_bad_body_is_a_400(path: Path, body: bytes) -> None:
    reply = await ask(path, post("/pools/decode", body, CLOSE))
    assert (reply.status, error(reply)["type"]) == (400, "invalid_request_error")


async def test_an_error_of_the_handler_names_the_parameter(path: Path) -> None:
    reply = await ask(path, post("/pools/decode", b'{"count": 9}', CLOSE))
    assert (reply.status, error(reply)["param"]) == (400, "count")


async def test_a_bug_is_a_500_without_its_text(path: Path) -> None:
    reply = await ask(path, get("/fail", CLOSE))
    assert reply.status == 500
    assert b"secret" not in reply.body


async def test_an_unknown_path_is_a_404(path: Path) -> None:
    assert (await ask(path, get("/nowhere", CLOSE))).status == 404


async def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with listening_unix(APP, path):
        assert (await ask(path, get("/fail", CLOSE))).status == 500
    assert not path.exists()


async def test_a_path_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another directory"):
        async with listening_unix(APP, tmp_path / "missing" / "socket"):
            pass
