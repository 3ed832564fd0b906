"""The feed of the live page over HTTP: who may read it, and what it costs while nobody does."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.keys.keyfile import KeyLine, hashed, written
from kvmesh.frontend.live.hub import MAX_VIEWERS, LiveHub
from kvmesh.frontend.live.looking import distant_look
from kvmesh.frontend.live.pages import BUILT, routes
from kvmesh.frontend.live.picture import Picture
from kvmesh.frontend.timeline import Timelines
from kvmesh.mesh.http.server import App, Guard, listening
from kvmesh.router.feeds import WorkerFeed
from tests.support.patience import PATIENCE_S


class QuietDispatcher:
    """A dispatcher that runs nothing."""

    wants_reasons = None


class ServedPage:
    """A live page that is served."""

    def __init__(self) -> None:
        self.dispatcher, self.timelines, self.stop = QuietDispatcher(), Timelines(), asyncio.Event()
        self.workers = WorkerFeed()
        self.hub = LiveHub(Picture({}), self.workers, self.dispatcher, self.timelines, lambda: 0, self.stop)
        self.hub.look = distant_look(self.hub.in_flight_by_worker)
        self.url = ""


@asynccontextmanager
async def served(guard: Guard | None = None) -> AsyncIterator[tuple[ServedPage, aiohttp.ClientSession]]:
    page = ServedPage()
    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with (
        listening(App(routes(page.hub), guard=guard), "127.0.0.1", 0) as page.url,
        aiohttp.ClientSession(page.url, timeout=timeout) as http,
    ):
        yield page, http
        page.stop.set()


async def until_nobody_looks(page: ServedPage) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while page.hub.num_viewers:
            await asyncio.sleep(0.01)


async def test_a_viewer_gets_the_whole_picture_and_then_changes() -> None:
    async with served() as (_, http), http.get("/ui/events") as reply:
        text = b""
        while text.count(b"\n\n") < 2:
            text += await reply.content.readany()
    assert reply.content_type == "text/event-stream"
    assert re.findall(rb"event: (\w+)\ndata: \{", text)[:2] == [b"whole", b"change"]


async def test_the_root_leads_to_the_page() -> None:
    async with served() as (_, http), http.get("/", allow_redirects=False) as reply:
        assert (reply.status, reply.headers["location"]) == (307, "/ui")


async def test_nothing_is_computed_while_nobody_looks() -> None:
    async with served() as (page, http):
        assert not page.timelines.is_watched
        async with http.get("/ui/events") as reply:
            await reply.content.readany()
            assert page.timelines.is_watched and page.dispatcher.wants_reasons is not None
        await until_nobody_looks(page)
        assert not page.timelines.is_watched and page.dispatcher.wants_reasons is None
        assert page.hub.is_at_rest


async def test_viewers_are_bounded() -> None:
    async with served() as (page, http):
        replies = [await http.get("/ui/events") for _ in range(MAX_VIEWERS)]
        async with http.get("/ui/events") as refused:
            assert refused.status == 429
        for reply in replies:
            reply.close()
        await until_nobody_looks(page)


async def test_viewers_are_sent_away_when_the_frontend_stops() -> None:
    async with served() as (page, http), http.get("/ui/events") as reply:
        page.stop.set()
        assert (await reply.content.read()).endswith(b"\n\n")


@pytest.mark.parametrize("path", list(BUILT))
async def test_the_page_loads_nothing_from_elsewhere(path: str) -> None:
    async with served() as (_, http), http.get(path) as reply:
        body, policy = await reply.text(), reply.headers["content-security-policy"]
        assert reply.status == 200
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    loaded = re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?(\w+:)?//[^"')\s]+""", body)
    assert loaded == []


def key_file(folder: Path, **fields: object) -> str:
    path = folder / "keys"
    path.write_text(written(KeyLine(name="k", sha256=hashed("sk-1"), **fields)) + "\n")  # type: ignore[arg-type]
    return str(path)


async def test_the_feed_needs_a_key_where_keys_are_set(tmp_path: Path) -> None:
    async with served(ApiKeyGuard(key_file(tmp_path))) as (_, http):
        async with http.get("/ui") as page, http.get("/ui/events") as refused:
            assert (page.status, refused.status) == (200, 401)
        async with http.get("/ui/events", headers={"authorization": "Bearer sk-1"}) as allowed:
            assert allowed.status == 200


@pytest.mark.parametrize("fields", [{"tenant": "acme"}, {"models": ("tiny*",)}])
async def test_the_key_of_a_tenant_does_not_show_the_whole_mesh(tmp_path: Path, fields: dict[str, object]) -> None:
    key = {"x-api-key": "sk-1"}
    async with (
        served(ApiKeyGuard(key_file(tmp_path, **fields))) as (_, http),
        http.get("/ui/events", headers=key) as no,
    ):
        assert no.status == 403
        assert "tenant" in await no.text()
