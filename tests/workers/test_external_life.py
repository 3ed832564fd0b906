"""External engines have one life, one launch and one count of requests in flight in common."""

import asyncio
import threading

import pytest

from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import NO_LAYOUT
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.external.launch import Launch
from kvmesh.workers.engines.external.life import EngineLife

INFO = EngineInfo("m", "/m", 16, 8, 128, 4, NO_LAYOUT, "")


def ready() -> EngineLife:
    life = EngineLife()
    life.begin(WorkerId("w-1"), "host:1")
    life.info = INFO
    return life


async def test_an_engine_serves_from_its_info_until_it_stops() -> None:
    life = EngineLife()
    with pytest.raises(EngineError, match="has not started"):
        life.check()
    life = ready()
    assert life.check() is INFO
    assert life.stop()
    assert not life.stop(), "a second call does nothing"
    with pytest.raises(EngineError, match="w-1 is stopping"):
        life.check()


async def test_the_first_failure_is_the_one_that_is_reported() -> None:
    life = ready()
    life.fail(EngineError("it died"))
    life.fail(EngineError("it is still dead"))
    with pytest.raises(EngineError, match="it died"):
        life.check()


@pytest.mark.parametrize("end", [lambda life: life.fail(EngineError("gone")), lambda life: life.stop()])
async def test_a_failure_or_a_stop_ends_all_waits(end: object) -> None:
    life = ready()
    asking = asyncio.create_task(life.waits.result(asyncio.Event().wait))
    await asyncio.sleep(0)
    assert callable(end)
    end(life)
    with pytest.raises(EngineError, match=r"gone|w-1 is stopping"):
        await asking


async def test_requests_are_in_flight_until_they_end_or_fail() -> None:
    life = ready()
    with pytest.raises(ValueError), life.counted():
        with life.counted():
            assert life.in_flight == 2
        raise ValueError
    assert life.in_flight == 0


async def test_a_launch_goes_on_when_its_caller_is_cancelled() -> None:
    may_end = threading.Event()
    launch = Launch("a test", lambda: may_end.wait() and "up")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await launch.result()
    assert not await launch.has_ended(0)
    may_end.set()
    assert await launch.ended() == "up"


async def test_a_launch_that_failed_leaves_nothing_to_close() -> None:
    def fail() -> None:
        raise EngineError("no GPU")

    launch = Launch("a test", fail)
    with pytest.raises(EngineError, match="no GPU"):
        await launch.result()
    assert await launch.ended() is None
