"""A worker that invents blocks cannot fill the router's memory, and takes nothing from other workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from kvmesh.kvevents.formats import encode_payload
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, PlaneServer
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash, WorkerId
from kvmesh.protocol.messages import KvSnapshot, WorkerCard
from kvmesh.router import feeds
from kvmesh.router.feeds import KvFeed, KvSink, most_snapshot_bytes
from kvmesh.router.fleet import FEW_BLOCKS, TIERS_SHARE, OverfullError, WorkerFleet
from kvmesh.router.index import Holder
from kvmesh.router.metrics import OVERFULL
from tests.support.routing import card, router

TINY = card("liar", total_blocks=10)
MOST = TIERS_SHARE * 10 + FEW_BLOCKS
"""The most blocks that a worker with such a card may report."""
LIAR, HONEST = Holder(WorkerId("liar"), 0), Holder(WorkerId("honest"), 0)
SIZE = TINY.block_size


def invented(first: int, count: int, *, tokens_of: int | None = None) -> bytes:
    """Return a batch of `count` prompts of one block each, or of as many names for one prompt."""
    events: list[KvEvent] = []
    for number in range(first, first + count):
        token = number if tokens_of is None else tokens_of
        events.append(Stored((EngineHash(number),), None, (token,) * SIZE, SIZE))
    return encode_payload(events, 1.0)


@pytest.fixture
def fleet() -> WorkerFleet:
    fleet = router(TINY, card("honest", total_blocks=100_000)).fleet
    fleet.on_kv_batch(HONEST.worker_id, 0, invented(0, 500))
    return fleet


def test_a_worker_may_report_more_blocks_than_fit_on_its_device(fleet: WorkerFleet) -> None:
    fleet.on_kv_batch(LIAR.worker_id, 0, invented(0, MOST))
    assert fleet.pools[TINY.model].index.blocks_of(LIAR) == MOST


def test_invented_blocks_are_forgotten(fleet: WorkerFleet) -> None:
    index, before = fleet.pools[TINY.model].index, OVERFULL._value.get()
    sink, most = KvSink(fleet), 0
    for batch in range(40):
        with suppress(OverfullError):
            sink.on_batch(LIAR.worker_id, 0, invented(1000 * batch, 1000))
        most = max(most, index.blocks_of(LIAR))
    assert most <= MOST
    assert OVERFULL._value.get() - before == 40_000 // 5_000
    assert index.blocks_of(HONEST) == 500


def test_many_names_for_one_block_count_too(fleet: WorkerFleet) -> None:
    index = fleet.pools[TINY.model].index
    with pytest.raises(OverfullError, match="the card has 10"):
        for batch in range(10):
            fleet.on_kv_batch(LIAR.worker_id, 0, invented(1000 * batch, 1000, tokens_of=7))
    assert index.blocks_of(LIAR) == 0
    assert index.num_entries == 500


def test_a_worker_whose_cache_turns_over_is_never_overfull(fleet: WorkerFleet) -> None:
    for number in range(0, 50_000, 500):
        fleet.on_kv_batch(LIAR.worker_id, 0, invented(number, 500))
        gone = encode_payload([Removed(tuple(EngineHash(n) for n in range(number, number + 500)))], 1.0)
        fleet.on_kv_batch(LIAR.worker_id, 0, gone)


class Endless:
    """A worker whose snapshots do not end."""

    def __init__(self) -> None:
        self.sent = 0
        self.server = PlaneServer({"kv_snapshot": self.snapshot})

    async def snapshot(self, call: Call) -> None:
        while True:
            self.sent += 1
            await call.send(KvSnapshot(seq=1, payload=bytes(1 << 20)))


@pytest_asyncio.fixture
async def endless() -> AsyncIterator[tuple[Endless, WorkerCard]]:
    worker = Endless()
    address = await worker.server.start("127.0.0.1")
    yield worker, card("liar", total_blocks=10, address=address)
    await worker.server.close()


async def test_a_snapshot_without_end_is_left(endless: tuple[Endless, WorkerCard], fleet: WorkerFleet) -> None:
    worker, its_card = endless
    plane = PlaneClient()
    feed = KvFeed(fleet, plane)
    async with asyncio.timeout(feeds.SNAPSHOT_TIMEOUT_S / 2):
        with pytest.raises(WireError, match="more than the 10 blocks"):
            await feed._snapshot(its_card, 0)
    assert worker.sent << 20 < most_snapshot_bytes(its_card) + (300 << 20)  # the window of a stream
    await feed.close()
    await plane.close()
