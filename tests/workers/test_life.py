"""A worker carries out pairs of orders, one after the other and both at once, with a request in hand."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kvmesh.protocol.errors import ConfigError, DrainingError, EngineError, WrongStateError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import NO_LAYOUT, Role
from kvmesh.workers.engine import EngineInfo, EngineLoad
from kvmesh.workers.life import WorkerLife
from kvmesh.workers.states import CHANGES, WorkerState
from tests.support.place import FakePlace

INFO = EngineInfo("m", "/m", 32, 64, 512, 8, NO_LAYOUT, "shm", roles=tuple(Role))
ORDERS = ("sleep", "wake", "drain", "resume", "prefill", "decode", "aggregated", "stop")


class Engine:
    """It takes some turns of the event loop to fall asleep and to wake."""

    def __init__(self) -> None:
        self.is_awake = True
        self.fails = False

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 64, 0)

    def rename(self, worker_id: WorkerId) -> None:
        assert self.is_awake, "no engine is there to be renamed"

    async def sleep(self) -> str:
        assert self.is_awake
        for _ in range(3):
            await asyncio.sleep(0)
        if self.fails:
            raise ConfigError("this engine cannot sleep")
        self.is_awake = False
        return "asleep"

    async def wake(self) -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        if self.fails:
            raise ConfigError("no memory")
        self.is_awake = True
        return "awake"


class Site:
    def __init__(self) -> None:
        self.engine, self.place = Engine(), FakePlace(Role.AGGREGATED)
        self.health = [""]
        self.life = WorkerLife(cast(Any, self.engine), self.place, lambda: INFO, 5.0, self.health.append)
        self.is_stopped = False

    @property
    def state(self) -> WorkerState:
        return self.place.states.state

    async def order(self, word: str) -> str:
        """Return "" for an order that was carried out, else why it was refused."""
        life, engine = self.life, self.engine
        orders: dict[str, Callable[[], Awaitable[object]]] = {
            "sleep": lambda: life.sleep(engine.sleep),
            "wake": lambda: life.wake(engine.wake),
            "drain": life.drain,
            "resume": life.resume,
            "stop": self.stop,
        }
        try:
            await (orders[word] if word in orders else lambda: life.turn(Role(word)))()
        except (WrongStateError, DrainingError, ConfigError) as error:
            return str(error)
        return ""

    async def stop(self) -> None:
        self.is_stopped = True
        await self.life.end()

    def request(self) -> asyncio.Task[None]:
        """Begin a request that takes some turns, as a worker does: refused unless the worker serves."""

        async def serve() -> None:
            self.life.requests.add(cast(Any, task))
            try:
                if (refusal := self.place.states.refusal()) is not None:
                    raise refusal
                for _ in range(7):
                    assert self.engine.is_awake, "a sleeping engine got a request"
                    await asyncio.sleep(0)
            finally:
                self.life.requests.discard(cast(Any, task))

        task = asyncio.create_task(serve())
        return task

    def check(self, orders: object) -> None:
        assert self.state not in CHANGES, f"{orders}: a change has not ended"
        shown = self.place.states.on_card
        assert self.health[-1] == shown or self.is_stopped, orders
        if self.place.states.has_card and any(what.startswith("join") for what in self.place.done):
            assert self.place.done[-1] == f"join as {shown or self.place.role.value}", orders
        if self.state is WorkerState.SERVING:
            assert self.engine.is_awake, orders
        if not self.is_stopped:
            assert (self.state is WorkerState.ASLEEP) == (not self.engine.is_awake), orders
        self.life.check_health()


async def ended(requests: list[asyncio.Task[None]]) -> None:
    for outcome in await asyncio.gather(*requests, return_exceptions=True):
        assert outcome is None or isinstance(outcome, DrainingError), outcome


async def carried_out(orders: tuple[str, ...], gaps: tuple[int | None, ...]) -> None:
    """Give each order so many turns after the one before; None: when the one before has ended."""
    site = Site()
    requests, asked = [site.request()], []
    async with asyncio.timeout(10):
        for word, gap in zip(orders, gaps, strict=True):
            task = asyncio.create_task(site.order(word))
            asked.append(task)
            if gap is None:
                await task
            for _ in range(gap or 0):
                await asyncio.sleep(0)
            requests.append(site.request())
        await asyncio.gather(*asked)
        await ended(requests)
    site.check((orders, gaps))


@pytest.mark.parametrize("first", ORDERS)
async def test_every_pair_of_orders_leaves_one_clear_state(first: str) -> None:
    for second in ORDERS:
        for gap in (None, 0, 1, 2, 5, 12):
            await carried_out((first, second), (gap, None))


async def test_every_three_orders_at_once_leave_one_clear_state() -> None:
    for orders in itertools.product(ORDERS, repeat=3):
        await carried_out(orders, (1, 1, 1))


async def test_random_sequences_of_orders_leave_one_clear_state() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        orders = tuple(rng.choices(ORDERS[:-1], k=8))
        await carried_out(orders, tuple(rng.choices((None, 0, 1, 4, 10), k=8)))


async def test_an_engine_that_cannot_sleep_serves_on() -> None:
    site = Site()
    site.engine.fails = True
    assert await site.order("sleep") == "this engine cannot sleep"
    assert (site.state, site.health[-1]) == (WorkerState.SERVING, "")
    await ended([site.request()])


async def test_an_engine_that_cannot_wake_sleeps_on() -> None:
    site = Site()
    await site.order("sleep")
    site.engine.fails = True
    assert await site.order("wake") == "no memory"
    assert (site.state, site.health[-1], site.place.done[-1]) == (WorkerState.ASLEEP, "asleep", "join as asleep")


async def test_a_sleeping_worker_keeps_its_role() -> None:
    site = Site()
    await site.order("sleep")
    assert await site.order("decode") == "this worker is asleep; wake it first"
    site.life.check_health()
    await site.order("wake")
    assert await site.order("decode") == ""
    assert site.place.role is Role.DECODE


async def test_a_caller_who_leaves_does_not_stop_a_sleep() -> None:
    site = Site()
    asked = asyncio.create_task(site.order("sleep"))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await site.order("sleep") == "", "it waits for the first one"
    site.check("sleep")


async def test_a_change_of_role_that_breaks_ends_the_worker() -> None:
    site = Site()

    def fail() -> None:
        raise OSError("no port is left")

    site.place.on_change = fail
    with pytest.raises(OSError, match="no port"):
        await site.order("decode")
    assert await site.order("sleep") == "this worker is shutting down"
    with pytest.raises(EngineError, match="could not change its role"):
        site.life.check_health()
