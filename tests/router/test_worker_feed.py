"""Tests of a worker's membership as routers see it: what a lapsed lease means for a worker that still answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import WorkerCard, WorkerIdentity, encode
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.metrics import LAPSED_WORKERS
from tests.support.patience import PATIENCE_S
from tests.support.routing import card


class Site:
    """A worker that answers at an address, and a feed that follows it."""

    def __init__(self) -> None:
        self.discovery, self.plane = MemoryDiscovery(), PlaneClient()
        self.server = PlaneServer({"identify": self.identify})
        self.worker_id = WorkerId("d1-id")
        self.card = card("d1")
        self.present: dict[WorkerId, WorkerCard] = {}
        self.joined = 0
        self.feed = WorkerFeed(self.plane)
        self.feed.listen(self.join, lambda worker_id: self.present.pop(worker_id, None))

    async def identify(self, call: Call) -> None:
        await call.send(WorkerIdentity(worker_id=self.worker_id))

    def join(self, card: WorkerCard) -> None:
        self.present[card.worker_id] = card
        self.joined += 1

    async def start(self) -> None:
        self.card = replace(self.card, worker_id=self.worker_id, address=await self.server.start("127.0.0.1"))
        self.following = asyncio.create_task(self.feed.run(self.discovery))
        await self.discovery.put(f"workers/{self.worker_id}", encode(self.card))
        await self.until(lambda: self.worker_id in self.present)

    def lapse(self) -> None:
        self.discovery.remove(f"workers/{self.worker_id}", has_lapsed=True)

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("kvmesh.mesh.lapsed.ASK_AGAIN_S", 0.05)
    site = Site()
    await site.start()
    yield site
    site.following.cancel()
    await asyncio.wait([site.following])
    await site.plane.close()
    await site.server.close()


async def test_a_worker_that_answers_outlives_its_lease(site: Site) -> None:
    site.lapse()
    await site.until(lambda: LAPSED_WORKERS._value.get() == 1)
    await asyncio.sleep(0.2)
    assert site.worker_id in site.present
    await site.discovery.put(f"workers/{site.worker_id}", encode(site.card))
    await site.until(lambda: LAPSED_WORKERS._value.get() == 0)
    assert site.joined == 1, "nobody has to be told of a worker that was never away"


async def test_a_worker_that_is_gone_leaves_with_its_lease(site: Site) -> None:
    await site.server.close()
    site.lapse()
    await site.until(lambda: not site.present)
    assert LAPSED_WORKERS._value.get() == 0


async def test_a_worker_that_falls_silent_later_leaves(site: Site) -> None:
    site.lapse()
    await site.until(lambda: LAPSED_WORKERS._value.get() == 1)
    await site.server.close()
    await site.until(lambda: not site.present)


async def test_another_worker_at_the_address_does_not_keep_it(site: Site) -> None:
    lapsed, site.worker_id = site.worker_id, WorkerId("d2-id")
    site.discovery.remove(f"workers/{lapsed}", has_lapsed=True)
    await site.until(lambda: not site.present)


async def test_a_withdrawn_worker_leaves_at_once(site: Site) -> None:
    site.discovery.remove(f"workers/{site.worker_id}")
    await site.until(lambda: not site.present)


async def test_a_lapsed_worker_may_come_back_with_another_card(site: Site) -> None:
    site.lapse()
    await site.until(lambda: LAPSED_WORKERS._value.get() == 1)
    await site.discovery.put(f"workers/{site.worker_id}", encode(replace(site.card, capacity=2.0)))
    await site.until(lambda: site.present[site.worker_id].capacity == 2.0)


async def test_a_lapsed_worker_may_withdraw(site: Site) -> None:
    site.lapse()
    await site.until(lambda: LAPSED_WORKERS._value.get() == 1)
    await site.discovery.put(f"workers/{site.worker_id}", encode(site.card))
    await site.until(lambda: LAPSED_WORKERS._value.get() == 0)
    site.discovery.remove(f"workers/{site.worker_id}")
    await site.until(lambda: not site.present)


async def test_a_worker_replaces_the_one_before_it_at_its_address(site: Site) -> None:
    """The card of a worker that was killed stands until its lease ends, and its successor answers there."""
    before, site.worker_id = site.worker_id, WorkerId("d2-id")
    await site.discovery.put(f"workers/{site.worker_id}", encode(replace(site.card, worker_id=site.worker_id)))
    await site.until(lambda: set(site.present) == {site.worker_id})
    site.discovery.remove(f"workers/{before}", has_lapsed=True)
    await asyncio.sleep(0.2)
    assert set(site.present) == {site.worker_id}
    assert LAPSED_WORKERS._value.get() == 0


async def test_a_dead_card_does_not_replace_the_worker_at_its_address(site: Site) -> None:
    """A frontend that has just started may see the card of the dead worker last."""
    dead = WorkerId("d0-id")
    await site.discovery.put(f"workers/{dead}", encode(replace(site.card, worker_id=dead)))
    await site.until(lambda: site.joined == 2 and set(site.present) == {site.worker_id})


@pytest.mark.parametrize("answers", ["nobody", "a stranger"])
async def test_cards_of_one_address_stay_while_neither_worker_answers(site: Site, answers: str) -> None:
    if answers == "nobody":
        await site.server.close()
    other, site.worker_id = WorkerId("d2-id"), WorkerId("unknown")
    await site.discovery.put(f"workers/{other}", encode(replace(site.card, worker_id=other)))
    await site.until(lambda: site.joined == 2)
    await asyncio.sleep(0.2)
    assert set(site.present) == {site.card.worker_id, other}


async def test_a_worker_that_rests_has_left_until_its_card_says_otherwise(site: Site) -> None:
    key = f"workers/{site.worker_id}"
    await site.discovery.put(key, encode(replace(site.card, resting="drained")))
    await site.until(lambda: not site.present)
    assert site.feed.resting[site.worker_id].resting == "drained"
    assert "it is drained" in str(site.feed.report())
    await site.discovery.put(key, encode(site.card))
    await site.until(lambda: site.worker_id in site.present)
    assert (site.feed.resting, site.joined) == ({}, 2)


async def test_a_resting_worker_that_ends_is_forgotten(site: Site) -> None:
    resting = await site.discovery.put(f"workers/{site.worker_id}", encode(replace(site.card, resting="asleep")))
    await site.until(lambda: not site.present)
    await resting.withdraw()
    await site.until(lambda: not site.feed.resting)


async def test_the_log_names_each_worker_once_that_does_not_say_its_weights(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def named(worker_id: str) -> int:
        return sum(f"worker {worker_id} does not say with which weights" in text for text in caplog.messages)

    known = replace(site.card, worker_id=WorkerId("known"), address="known:1", content_fingerprint="abc")
    old = replace(site.card, worker_id=WorkerId("old"), address="old:1")
    cards = [replace(old, capacity=speed) for speed in (1.0, 2.0)]
    for one in (*cards, known):
        await site.discovery.put(f"workers/{one.worker_id}", encode(one))
        await site.until(lambda one=one: site.present.get(one.worker_id) == one)
    assert (named("old"), named("known")) == (1, 0)
