"""The fault machine's hostile clients complain of a mesh that takes a bomb, or does not refuse it in time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvmesh.lab.faults import bombs


async def complaints_about(answer: Callable[[web.Request], Awaitable[web.Response]]) -> list[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        return await bombs.send_bombs([f"http://{server.host}:{server.port}"], "seed", lambda: 0.0)


async def test_a_bomb_that_is_refused_is_no_complaint() -> None:
    async def refuses(_: web.Request) -> web.Response:
        return web.Response(status=400)

    assert await complaints_about(refuses) == []


async def test_a_bomb_that_is_taken_or_breaks_the_server_is_a_complaint() -> None:
    async def takes(_: web.Request) -> web.Response:
        return web.Response(status=200)

    found = await complaints_about(takes)
    assert len(found) == bombs.BOMBS
    assert "status 200" in found[0]


async def test_a_bomb_without_an_answer_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bombs, "REFUSED_S", 0.05)

    async def hangs(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    assert "had no answer" in (await complaints_about(hangs))[0]
