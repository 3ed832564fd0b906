"""Operators take a worker out of service and put it back; a quiet worker tries its engine."""

import asyncio
import logging
import pstats
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.protocol.errors import DrainingError, EngineError, InvalidRequestError, WrongStateError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import (
    Control,
    ControlAction,
    ControlReply,
    GenerateRequest,
    Role,
    StopConditions,
    encode,
    pack_tokens,
)
from kvmesh.workers.canary import CanaryWatch
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engine import EngineInfo, EngineLoad
from kvmesh.workers.engines.opening import open_engine
from kvmesh.workers.service import Readiness, Worker
from kvmesh.workers.trying import EngineCanary, ask_for_a_token
from tests.support.place import FakePlace


class Call:
    """The part of a call that a handler uses."""

    caller = None

    def __init__(self, body: Any) -> None:
        self.body, self.sent = encode(body), list[Any]()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def offer(self, message: Any) -> bool:
        self.sent.append(message)
        return True


class Site:
    """A worker over a mock engine, in a place that remembers what was done."""

    def __init__(self, engine: Any, info: EngineInfo) -> None:
        self.engine, self.place = engine, FakePlace(Role.AGGREGATED)
        self.readiness = Readiness(1)
        self.readiness.on_ready()
        self.worker = Worker(
            engine, self.place, drain_timeout_s=1.0, on_state=lambda state: self.readiness.on_state("w", state)
        )
        self.worker.info = info

    async def control(self, action: ControlAction, **arguments: str) -> ControlReply:
        call: Any = Call(Control(action=action, arguments=arguments))
        await self.worker.control(call)
        return cast(ControlReply, call.sent[0])

    async def generate(self, prompt: list[int], max_tokens: int = 2) -> list[Any]:
        request = GenerateRequest(
            request_id=RequestId(f"r-{len(prompt)}-{max_tokens}"),
            model=self.worker.info.model if self.worker.info else "",
            prompt=pack_tokens(prompt),
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        call: Any = Call(request)
        await self.worker.generate(call)
        return cast(list[Any], call.sent)

    async def state(self) -> str:
        status = (await self.control(ControlAction.STATUS)).status
        assert status is not None
        return status.state


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    engine = open_engine(
        WorkerConfig(
            model_path=str(CHECKPOINT_DIR),
            role=Role.AGGREGATED,
            engine="mock",
            mock_speedup=0,
            kv_transfer="shm",
            block_size=16,
            num_blocks=64,
        )
    )
    info = await engine.start(WorkerId("w"), "127.0.0.1:1")
    yield Site(engine, info)
    await engine.stop()


async def test_the_status_says_why_routers_get_no_kv_events(site: Site) -> None:
    site.place.publishers = [SimpleNamespace(problem=""), SimpleNamespace(problem="no stream: too little storage")]
    status = (await site.control(ControlAction.STATUS)).status
    assert status is not None
    assert status.problem == "routers miss its KV events: no stream: too little storage"
    assert status.state == "serving"


async def test_a_drained_worker_finishes_what_runs_and_takes_nothing_more(site: Site) -> None:
    running = asyncio.create_task(site.generate([5] * 20, 64))
    await asyncio.sleep(0)
    await site.control(ControlAction.DRAIN)
    assert sum(len(delta.token_ids) for delta in await running) == 64
    with pytest.raises(DrainingError, match="this worker is drained"):
        await site.generate([6] * 20)
    assert (site.place.done, await site.state()) == (["join as draining", "join as drained"], "drained")
    assert site.readiness.problem() == "w is drained"


async def test_a_resumed_worker_serves_again(site: Site) -> None:
    await site.control(ControlAction.DRAIN)
    await site.control(ControlAction.RESUME)
    assert await site.generate([7] * 20)
    assert (site.place.done[-1], await site.state(), site.readiness.problem()) == ("join as aggregated", "serving", "")


async def test_a_request_that_outlasts_the_drain_goes_elsewhere(site: Site) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    stuck = asyncio.create_task(forever())
    site.worker.life.requests.add(stuck)
    site.worker.life._drain_timeout_s = 0.01
    await site.control(ControlAction.DRAIN)
    assert stuck.cancelled()


async def test_a_sleeping_worker_has_forgotten_its_cache(site: Site) -> None:
    await site.generate([8] * 64)
    assert site.engine.load().cached_blocks
    await site.control(ControlAction.SLEEP)
    assert (site.engine.load().cached_blocks, await site.state()) == (0, "asleep")
    with pytest.raises(WrongStateError, match="asleep; wake it"):
        await site.control(ControlAction.RESUME)
    await site.control(ControlAction.WAKE)
    assert await site.state() == "serving"


async def test_a_cache_in_use_is_not_reset(site: Site) -> None:
    await site.generate([8] * 64)
    events: list[Any] = []
    site.engine.on_kv_events(events.extend)
    held = site.engine.awake._pool.allocate(1)
    with pytest.raises(InvalidRequestError, match="1 blocks of the cache are in use; drain the worker"):
        await site.control(ControlAction.RESET_PREFIX_CACHE)
    site.engine.awake._pool.release(held)
    await site.control(ControlAction.RESET_PREFIX_CACHE)
    assert site.engine.load().cached_blocks == 0 and events, "routers hear of it"


async def test_a_reset_names_tiers_that_there_are(site: Site) -> None:
    await site.generate([8] * 64)
    for tiers, error in (("disk", "no disk tier; it has device"), ("tape", "no tiers: 'tape'; some of device,host")):
        with pytest.raises(InvalidRequestError, match=error):
            await site.control(ControlAction.RESET_PREFIX_CACHE, tiers=tiers)
    assert site.engine.load().cached_blocks > 0
    await site.control(ControlAction.RESET_PREFIX_CACHE, tiers="device")
    assert site.engine.load().cached_blocks == 0


async def test_a_resting_worker_does_not_change_its_role(site: Site) -> None:
    await site.control(ControlAction.DRAIN)
    with pytest.raises(WrongStateError, match="this worker is drained; resume it first"):
        await site.control(ControlAction.SET_ROLE, role="decode")


async def test_an_engine_that_cannot_sleep_keeps_serving() -> None:
    class Plain:
        def load(self) -> EngineLoad:
            return EngineLoad(0, 0, 0, 0, 64, 0)

    site = Site(Plain(), EngineInfo("m", "/m", 32, 64, 512, 8, None, ""))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="cannot sleep; drain it"):
        await site.control(ControlAction.SLEEP)
    assert site.place.done == []


# --- profile and log level ----------------------------------------------------------------------------------


async def test_a_profile_can_be_read(site: Site) -> None:
    await site.control(ControlAction.START_PROFILE)
    with pytest.raises(InvalidRequestError, match="profiled already"):
        await site.control(ControlAction.START_PROFILE)
    await site.generate([9] * 20)
    reply = await site.control(ControlAction.STOP_PROFILE)
    path = Path(reply.detail.split()[3])
    try:
        assert any("step_engine" in where[0] for where in pstats.Stats(str(path)).stats)  # type: ignore[attr-defined]
    finally:
        path.unlink()
    with pytest.raises(InvalidRequestError, match="is not profiled"):
        await site.control(ControlAction.STOP_PROFILE)


@pytest.fixture
def same_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.mark.usefixtures("same_level")
async def test_the_log_level_is_set_and_checked(site: Site) -> None:
    await site.control(ControlAction.LOG_LEVEL, level="ERROR")
    assert logging.getLogger().level == logging.ERROR
    with pytest.raises(InvalidRequestError, match="one of debug, info, warning, error"):
        await site.control(ControlAction.LOG_LEVEL, level="loud")


# --- the canary ---------------------------------------------------------------------------------------------


def test_a_quiet_engine_is_asked_once_an_interval() -> None:
    watch = CanaryWatch(60.0, 30.0, now_s=0.0)
    assert [watch.is_due(0, now_s) for now_s in (10.0, 59.0, 60.0, 61.0)] == [False, False, True, False]
    watch.note(62.0)
    assert [watch.is_due(0, now_s) for now_s in (121.0, 122.0)] == [False, True]


def test_a_busy_engine_is_left_alone() -> None:
    assert not CanaryWatch(60.0, 30.0, now_s=0.0).is_due(1, 1e6)
    assert not CanaryWatch(0.0, 30.0, now_s=0.0).is_due(0, 1e6), "0: never"


def test_a_canary_without_an_answer_is_a_hang() -> None:
    watch = CanaryWatch(60.0, 30.0, now_s=0.0)
    assert watch.is_due(0, 60.0)
    assert watch.hangs(89.0) == ""
    assert watch.hangs(91.0) == "a request for one token has not been answered for 31 s"


async def test_the_canary_is_a_real_request(site: Site) -> None:
    assert site.worker.info is not None
    await ask_for_a_token(site.engine, site.worker.info)
    canary = EngineCanary(site.engine, interval_s=1.0)
    quiet_until = asyncio.get_running_loop().time() + 1000
    assert canary.look(0, quiet_until, site.worker.info) == ""
    assert canary._asking is not None
    await canary._asking
    await canary.close()


async def test_a_worker_whose_engine_gives_no_token_ends() -> None:
    class Hung:
        def check_health(self) -> None: ...

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

    worker = Worker(cast(Any, Hung()), FakePlace(Role.AGGREGATED))
    worker.info = EngineInfo("m", "/m", 32, 64, 512, 8, None, "")  # type: ignore[arg-type]
    worker.canary = EngineCanary(cast(Any, worker._engine), interval_s=1e-6, patience_s=0.0)
    worker.check_health()
    await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="hangs: a request for one token"):
        worker.check_health()
    await worker.canary.close()
