"""Reports of load to routers: which are due, and that nothing happens while nothing changes."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvmesh.mesh.plane.client import PlaneClient, Stream
from kvmesh.mesh.plane.server import PlaneServer
from kvmesh.protocol.messages import LoadReport
from kvmesh.workers.engine import EngineReport
from kvmesh.workers.load_reports import LoadReports, ToldReports
from tests.support.patience import PATIENCE_S

SOME, MORE, NONE = (LoadReport(outside_requests=n) for n in (1, 2, 0))


def test_a_changed_report_is_due_at_once() -> None:
    told = ToldReports(repeat_s=1.0)
    assert told.take_due([SOME], 0.0) == [SOME]
    assert told.take_due([MORE], 0.1) == [MORE]
    assert told.take_due([NONE], 0.2) == [NONE]


def test_an_equal_report_is_due_when_it_must_be_repeated() -> None:
    told = ToldReports(repeat_s=1.0)
    told.take_due([SOME], 0.0)
    assert told.take_due([SOME], 0.9) == []
    assert told.take_due([SOME], 1.0) == [SOME]
    assert told.take_due([SOME], 1.5) == []


def test_a_report_that_says_nothing_is_never_repeated() -> None:
    told = ToldReports(repeat_s=1.0)
    assert told.take_due([NONE], 0.0) == []
    told.take_due([SOME], 0.0)
    assert told.take_due([NONE], 0.1) == [NONE]
    assert told.take_due([NONE], 9.9) == []


def test_each_rank_is_told_by_itself() -> None:
    told = ToldReports(repeat_s=1.0)
    other = LoadReport(dp_rank=1, outside_requests=1)
    assert told.take_due([SOME, other], 0.0) == [SOME, other]
    assert told.take_due([MORE, other], 0.1) == [MORE]


class ReportingRank:
    """Implements kvmesh.workers.engine.ReportsLoad."""

    def __init__(self) -> None:
        self.now = EngineReport()
        self.asked = 0
        self._listeners: list[Callable[[], object]] = []

    def on_load_change(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)

    def report(self) -> EngineReport:
        self.asked += 1
        return self.now

    def change(self, **fields: int) -> None:
        self.now = EngineReport(**fields)
        for listener in self._listeners:
            listener()


@asynccontextmanager
async def listening(reports: LoadReports) -> Any:
    """Yield the stream of a router that listens."""
    server, client = PlaneServer({"load": reports.answer}), PlaneClient()
    address = await server.start("127.0.0.1", 0)
    try:
        async with client.open(address, "load", None, PATIENCE_S) as stream:
            yield stream
    finally:
        await client.close()
        await server.close()


async def next_of(stream: Stream) -> LoadReport:
    return await anext(stream.messages(LoadReport))


async def test_a_router_hears_of_changes_and_of_nothing_else() -> None:
    rank = ReportingRank()
    async with listening(LoadReports([rank], 0.01)) as stream:
        rank.change(outside_requests=2, outside_blocks=7)
        heard = await next_of(stream)
        assert (heard.dp_rank, heard.outside_requests, heard.outside_blocks) == (0, 2, 7)
        rank.change()
        assert not (await next_of(stream)).says_something
        asked = rank.asked
        await asyncio.sleep(0.1)
        assert rank.asked <= asked + 1, "an idle worker is not asked"


async def test_many_changes_make_one_report_per_interval() -> None:
    rank = ReportingRank()
    async with listening(LoadReports([rank], 0.2)) as stream:
        for tokens in range(1, 100):
            rank.change(queued_tokens=tokens)
        assert (await next_of(stream)).queued_tokens == 99
        assert rank.asked == 1


async def test_a_change_that_is_soon_over_is_not_reported() -> None:
    rank = ReportingRank()
    async with listening(LoadReports([rank], 0.1)) as stream:
        rank.change(queued_tokens=1)
        rank.change()
        await asyncio.sleep(0.2)
        rank.change(queued_tokens=2)
        assert (await next_of(stream)).queued_tokens == 2


async def test_an_interval_of_zero_switches_reports_off() -> None:
    async with listening(LoadReports([ReportingRank()], 0.0)) as stream:
        with pytest.raises(StopAsyncIteration):
            await next_of(stream)


async def test_a_worker_that_stops_ends_its_reports() -> None:
    reports = LoadReports([object(), ReportingRank()], 30.0)
    async with listening(reports) as stream:
        await asyncio.sleep(0)
        reports.close()
        with pytest.raises(StopAsyncIteration):
            await next_of(stream)
