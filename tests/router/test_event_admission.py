"""A router and a worker of a closed mesh: the key is shown over the request plane, the events come over CURVE."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from kvmesh.kvevents.door import EventDoor, new_keys
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import PlaneServer
from kvmesh.protocol.events import Stored
from kvmesh.protocol.ids import EngineHash, WorkerId
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router.feeds import KvFeed
from kvmesh.router.fleet import WorkerFleet
from kvmesh.router.index import Holder
from kvmesh.workers.event_keys import EventKeys
from tests.support.patience import PATIENCE_S
from tests.support.routing import card, router

W = WorkerId("w")
HOLDER = Holder(W, 0)


class ClosedWorker:
    """A worker's event side: a door, a publisher, and the method that admits followers."""

    def __init__(self, worker_id: WorkerId = W) -> None:
        self.worker_id = worker_id
        self.door = EventDoor()
        keys = new_keys()
        self.event_key = keys.public
        self.publisher = KvEventPublisher(door=self.door, keys=keys)
        self.server = PlaneServer({}, standing={"event_key": EventKeys(self.door, self).answer})

    async def start(self, port: int = 0) -> WorkerCard:
        address = await self.server.start("127.0.0.1", port)
        endpoints = {"kv_events": self.publisher.endpoint, "kv_replay": self.publisher.replay_endpoint}
        return card(self.worker_id, address=address, kv_key=self.event_key, **endpoints)

    def store(self, *names: int) -> None:
        self.publisher.publish([Stored((EngineHash(name),), None, (name,) * 16, 16) for name in names])

    async def stop(self) -> None:
        await self.server.close()
        await self.publisher.close()
        await self.door.close()


class Router:
    def __init__(self, *, closed: bool = True) -> None:
        self.plane = PlaneClient()
        self.fleet: WorkerFleet = router().fleet
        self.feed = KvFeed(self.fleet, self.plane, keys=new_keys() if closed else None)

    def join(self, one: WorkerCard) -> None:
        self.fleet.add_worker(one, 0.0)
        self.feed.follow(one)

    def leave(self, worker_id: WorkerId) -> None:
        self.feed.leave(worker_id)
        self.fleet.remove_worker(worker_id, 0.0)

    def blocks(self) -> int:
        index = self.fleet.indexes.get("m")
        return 0 if index is None else index.blocks_of(HOLDER)

    async def stop(self) -> None:
        await self.feed.close()
        await self.plane.close()


async def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[ClosedWorker]:
    worker = ClosedWorker()
    yield worker
    await worker.stop()


@pytest_asyncio.fixture
async def follower() -> AsyncIterator[Router]:
    follower = Router()
    yield follower
    await follower.stop()


async def test_a_router_that_shows_its_key_follows(worker: ClosedWorker, follower: Router) -> None:
    one = await worker.start()
    worker.store(1, 2)
    follower.join(one)
    await until(lambda: follower.blocks() == 2, 2.0)
    assert follower.feed.status_of(one) == "live"
    worker.store(3)
    await until(lambda: follower.blocks() == 3)


async def test_a_key_ends_with_its_follower(worker: ClosedWorker, follower: Router) -> None:
    one = await worker.start()
    follower.join(one)
    await until(lambda: worker.door.admissions.followers == 1)
    follower.leave(W)
    await until(lambda: worker.door.admissions.followers == 0)


async def test_a_key_ends_with_its_followers_connection(worker: ClosedWorker, follower: Router) -> None:
    follower.join(await worker.start())
    await until(lambda: worker.door.admissions.followers == 1)
    await follower.plane.close()
    await until(lambda: worker.door.admissions.followers == 0)


async def test_a_key_is_shown_again_after_a_broken_link(worker: ClosedWorker, follower: Router) -> None:
    follower.join(await worker.start())
    worker.store(1)
    await until(lambda: follower.blocks() == 1)
    for link in list(worker.server._links):
        link.abort("cut")
    worker.store(2)
    await until(lambda: follower.blocks() == 2)
    await until(lambda: worker.door.admissions.followers == 1, 3.0)


async def test_a_worker_that_starts_again_is_followed_with_its_new_key(follower: Router) -> None:
    first = ClosedWorker()
    one = await first.start()
    first.store(1, 2)
    follower.join(one)
    await until(lambda: follower.blocks() == 2)
    await first.stop()
    second = ClosedWorker()
    again = await second.start(int(one.address.rpartition(":")[2]))
    assert again.kv_key != one.kv_key
    second.store(7)
    follower.join(again)
    await until(lambda: follower.blocks() == 1, 3.0)
    await second.stop()


async def test_a_worker_that_comes_later_than_its_card_is_followed(follower: Router) -> None:
    worker = ClosedWorker()
    one = await worker.start()
    await worker.server.close()
    follower.join(one)
    await asyncio.sleep(0.05)
    assert follower.feed.status_of(one) == "recovering"
    worker.server = PlaneServer({}, standing={"event_key": EventKeys(worker.door, worker).answer})
    await worker.server.start("127.0.0.1", int(one.address.rpartition(":")[2]))
    worker.store(1)
    await until(lambda: follower.blocks() == 1, 5.0)
    await worker.stop()


@pytest.mark.parametrize("lie", ["worker_id", "event_key"])
async def test_a_card_with_the_key_of_another_is_not_followed(
    worker: ClosedWorker, follower: Router, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A liar puts a card with the address of an honest worker, and a key or an id that is not of that worker."""
    one = await worker.start()
    setattr(worker, lie, new_keys().public)
    worker.store(1)
    follower.join(one)
    await until(lambda: follower.feed.status_of(one) == "broken")
    assert follower.blocks() == 0
    assert "answers at its address, or its key is another" in caplog.text


async def test_open_events_are_not_followed_in_a_closed_mesh(
    follower: Router, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = KvEventPublisher()
    follower.join(one := card(W, kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint))
    assert follower.feed.status_of(one) == "broken"
    assert "its KV events are open, expected were closed ones" in caplog.text
    await publisher.close()


async def test_closed_events_are_not_followed_in_an_open_mesh(worker: ClosedWorker) -> None:
    follower = Router(closed=False)
    follower.join(one := await worker.start())
    assert follower.feed.status_of(one) == "broken"
    await follower.stop()


async def test_an_open_worker_says_that_it_admits_nobody(follower: Router, caplog: pytest.LogCaptureFixture) -> None:
    worker = ClosedWorker()
    worker.server = PlaneServer({}, standing={"event_key": EventKeys(None, worker).answer})
    follower.join(one := await worker.start())
    await until(lambda: follower.feed.status_of(one) == "broken")
    assert "start it with --mesh-tls" in caplog.text
    await worker.stop()
