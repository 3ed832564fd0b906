"""The loads that workers report. A missing load must not look like an idle worker."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from kvmesh.planner.loads import fetch_loads, read_load, shared_out
from kvmesh.planner.model import WorkerLoad
from kvmesh.planner.scrape import MAX_PAGE_BYTES, fetch_page
from kvmesh.protocol.errors import MeshError, WireError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role, WorkerCard

PAGE = """# HELP kvmesh_worker_running_requests Requests in the batch.
# TYPE kvmesh_worker_running_requests gauge
kvmesh_worker_running_requests 4.0
kvmesh_worker_waiting_requests 2.0
kvmesh_worker_used_blocks 10.0
"""


def card(name: str = "decode-0", url: str = "", dp_size: int = 1) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name), name=name, role=Role.DECODE, model="m", model_path="", address="", block_size=16,
        total_blocks=100, context_tokens=64, metrics_url=url, dp_size=dp_size,
    )  # fmt: skip


def test_a_page_becomes_a_load_in_tokens() -> None:
    assert read_load(PAGE, card()) == WorkerLoad(
        name="decode-0", running=4, waiting=2, kv_tokens=160, total_kv_tokens=1600
    )


def test_all_ranks_of_a_worker_have_room_together() -> None:
    assert read_load(PAGE, card(dp_size=2)).total_kv_tokens == 3200


def test_queued_tokens_are_read_or_estimated_from_waiting_requests() -> None:
    assert read_load(PAGE, card(), isl_tokens=300.0).queued_tokens == 600
    assert read_load(PAGE + "kvmesh_worker_queued_tokens 77\n", card(), isl_tokens=300.0).queued_tokens == 77


def test_each_worker_has_its_samples_of_a_shared_page() -> None:
    shared = "".join(
        f'kvmesh_worker_{what}{{worker="{name}"}} {value}\n'
        for name, value in (("a-0", 1), ("a-1", 2))
        for what in ("running_requests", "waiting_requests", "used_blocks")
    )
    assert read_load(shared, card("a-1")).running == 2
    with pytest.raises(WireError, match="a-2"):
        read_load(shared, card("a-2"))


@pytest.mark.parametrize("page", ["", PAGE.replace("4.0", "NaN"), PAGE.replace("kvmesh_worker_used", "x"), "}{"])
def test_a_missing_gauge_is_an_error(page: str) -> None:
    with pytest.raises(WireError):
        read_load(page, card())


# --- over HTTP ----------------------------------------------------------------------------------------


class Pages:
    """A server of /metrics pages by name."""

    def __init__(self) -> None:
        self.pages: dict[str, str | int] = {}
        self.url = ""

    async def get(self, request: web.Request) -> web.StreamResponse:
        page = self.pages.get(request.match_info["name"], 404)
        if page == -1:
            await asyncio.sleep(60)
        return web.Response(status=page) if isinstance(page, int) else web.Response(text=page)


@pytest_asyncio.fixture
async def pages() -> AsyncIterator[Pages]:
    pages = Pages()
    app = web.Application()
    app.add_routes([web.get("/{name}", pages.get)])
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pages.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield pages
    await runner.cleanup()


async def test_loads_are_sorted_by_name(pages: Pages) -> None:
    pages.pages = {"b": PAGE, "a": PAGE.replace("4.0", "1.0")}
    async with aiohttp.ClientSession() as http:
        loads = await fetch_loads(http, [card(name, f"{pages.url}/{name}") for name in "ba"], None)
    assert [(load.name, load.running) for load in loads] == [("a", 1), ("b", 4)]


@pytest.mark.parametrize("broken", [404, "", PAGE.replace("2.0", "NaN")])
async def test_one_missing_load_makes_all_unknown(pages: Pages, broken: str | int) -> None:
    pages.pages = {"a": PAGE, "b": broken}
    async with aiohttp.ClientSession() as http:
        assert await fetch_loads(http, [card(name, f"{pages.url}/{name}") for name in "ab"], None) == ()
        assert await fetch_loads(http, [card("c")], None) == (), "it has no page"


async def test_a_late_or_too_large_page_is_an_error(pages: Pages) -> None:
    pages.pages = {"slow": -1, "huge": "x" * (MAX_PAGE_BYTES + 1)}
    async with aiohttp.ClientSession() as http:
        for name, said in (("slow", "does not answer"), ("huge", "more than")):
            with pytest.raises(MeshError, match=said):
                await fetch_page(http, f"{pages.url}/{name}", 0.3 if name == "slow" else 5.0)


def test_tokens_waiting_in_routers_are_shared_evenly() -> None:
    loads = tuple(WorkerLoad(name=name, queued_tokens=tokens) for name, tokens in (("a", 100), ("b", 0)))
    assert [load.queued_tokens for load in shared_out(loads, 6000.0)] == [3100, 3000]
    assert shared_out((), 6000.0) == (), "workers that do not tell are not made to"


def test_the_blocks_of_a_cache_are_read_where_a_worker_reports_them() -> None:
    assert read_load(PAGE + "kvmesh_worker_cached_blocks 17\n", card()).cached_blocks == 17
    assert read_load(PAGE + "kvmesh_worker_cached_blocks NaN\n", card()).cached_blocks == 0
