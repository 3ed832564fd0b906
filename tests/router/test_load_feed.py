"""A router follows the load that workers report, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import LoadReport, WorkerCard
from kvmesh.router import load_feed
from kvmesh.router.index import Holder
from kvmesh.router.load import NOTHING, ActiveLoad, Share
from kvmesh.router.load_feed import LoadFeed
from kvmesh.router.reported import ReportedLoad
from tests.support.patience import PATIENCE_S
from tests.support.routing import card

HOLDER = Holder(WorkerId("w1"), 0)


@dataclass
class ReportingWorker:
    """Answers `load` with what is put into `reports`; None ends the call."""

    reports: "asyncio.Queue[LoadReport | None]" = field(default_factory=asyncio.Queue)
    calls: int = 0

    async def answer(self, call: Call) -> None:
        self.calls += 1
        while (report := await self.reports.get()) is not None:
            await call.send(report)


@dataclass
class Followed:
    load: ActiveLoad
    feed: LoadFeed
    changes: int = 0

    def on_change(self) -> None:
        self.changes += 1

    async def until(self, share: Share) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.load.of(HOLDER).total != share:
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def followed() -> AsyncIterator[Followed]:
    plane, load = PlaneClient(), ActiveLoad()
    load.join(HOLDER)
    seen = Followed(load, None)  # type: ignore[arg-type]
    seen.feed = LoadFeed(ReportedLoad(load), plane, seen.on_change)
    yield seen
    await seen.feed.close()
    await plane.close()


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[tuple[PlaneServer, WorkerCard]]]]:
    servers: list[PlaneServer] = []

    async def start(worker: ReportingWorker, port: int = 0) -> tuple[PlaneServer, WorkerCard]:
        server = PlaneServer({"load": worker.answer})
        servers.append(server)
        return server, card("w1", address=await server.start("127.0.0.1", port), reports_load=True)

    yield start
    for server in servers:
        await server.close()


async def test_reports_reach_the_load_of_the_router(followed: Followed, start: Callable[..., Awaitable]) -> None:
    worker = ReportingWorker()
    _, known = await start(worker)
    followed.feed.follow(known)
    followed.feed.follow(known)
    worker.reports.put_nowait(LoadReport(outside_requests=2, outside_blocks=30))
    await followed.until(Share(0, 30, 2))
    assert (followed.changes, worker.calls) == (1, 1)


async def test_a_worker_that_ends_its_reports_is_not_asked_again(
    followed: Followed, start: Callable[..., Awaitable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_feed, "RETRY_S", 0.0)
    worker = ReportingWorker()
    _, known = await start(worker)
    followed.feed.follow(known)
    for report in (LoadReport(outside_requests=2), None):
        worker.reports.put_nowait(report)
        await followed.until(Share(requests=2) if report else NOTHING)
    await asyncio.sleep(0.05)
    assert worker.calls == 1


async def test_a_broken_call_is_opened_again(
    followed: Followed, start: Callable[..., Awaitable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_feed, "RETRY_S", 0.01)
    worker = ReportingWorker()
    server, known = await start(worker)
    followed.feed.follow(known)
    worker.reports.put_nowait(LoadReport(outside_requests=2))
    await followed.until(Share(requests=2))
    await server.close()
    await followed.until(NOTHING)
    await start(worker, int(known.address.rpartition(":")[2]))
    worker.reports.put_nowait(LoadReport(outside_requests=1))
    await followed.until(Share(requests=1))


async def test_a_worker_that_falls_silent_is_forgotten(followed: Followed, start: Callable[..., Awaitable]) -> None:
    worker = ReportingWorker()
    _, known = await start(worker)
    followed.feed.follow(known)
    worker.reports.put_nowait(LoadReport(outside_requests=2, valid_s=0.1))
    await followed.until(Share(requests=2))
    await followed.until(NOTHING)


async def test_a_worker_that_leaves_is_forgotten(followed: Followed, start: Callable[..., Awaitable]) -> None:
    worker = ReportingWorker()
    _, known = await start(worker)
    followed.feed.follow(known)
    worker.reports.put_nowait(LoadReport(outside_requests=2))
    await followed.until(Share(requests=2))
    followed.feed.leave(known.worker_id)
    assert followed.load.of(HOLDER).total == NOTHING
    followed.feed.leave(known.worker_id)


async def test_a_worker_that_makes_no_reports_is_not_called(
    followed: Followed, start: Callable[..., Awaitable]
) -> None:
    worker = ReportingWorker()
    _, known = await start(worker)
    followed.feed.follow(card("w1", address=known.address))
    await asyncio.sleep(0.05)
    assert worker.calls == 0
