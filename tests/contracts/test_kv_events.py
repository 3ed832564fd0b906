"""Test the contract of every transport of KV events: a follower ends with the content of the workers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvmesh.kvevents.connect import Links
from kvmesh.kvevents.nats.transport import NatsKvEventPublisher
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.kvevents.subscriber import KvEventSubscriber, Patience
from kvmesh.kvevents.transport import EventLink, KvSource, Listener, Publisher, Snapshot
from kvmesh.protocol.events import Cleared, Removed, Stored
from kvmesh.protocol.ids import EngineHash, WorkerId
from kvmesh.protocol.messages import KvDigest
from tests.support.kv_events import W1, Index, block, blocks, digest_of, payload
from tests.support.nats_server import WHY_NONE, NatsProcess
from tests.support.patience import PATIENCE_S
from tests.support.proxy import Proxy

W2 = WorkerId("w2.of *>")  # any text is a worker's id
PATIENCE = Patience(answer_s=0.5, tries=2, backoff_s=0.01)
IMPATIENT = replace(PATIENCE, recheck_s=0.05)


class Wire:
    """Publishers, and sources behind connections that can be cut."""

    def __init__(self) -> None:
        self._publishers: list[Publisher] = []
        self._proxies: dict[int, Proxy] = {}

    def publisher(self, worker_id: WorkerId = W1, dp_rank: int = 0) -> Publisher:
        publisher = self._open(worker_id, dp_rank)
        self._publishers.append(publisher)
        return publisher

    async def source(self, publisher: Publisher, worker_id: WorkerId = W1, dp_rank: int = 0) -> KvSource:
        endpoint, replay = await self._behind_proxy(publisher.endpoint), publisher.replay_endpoint
        return KvSource(worker_id, endpoint, replay and await self._behind_proxy(replay), dp_rank)

    def cut(self) -> None:
        for proxy in self._proxies.values():
            proxy.cut()

    def mend(self) -> None:
        for proxy in self._proxies.values():
            proxy.mend()

    async def close(self) -> None:
        for publisher in self._publishers:
            await publisher.close()
        for proxy in self._proxies.values():
            await proxy.close()

    async def _behind_proxy(self, endpoint: str) -> str:
        scheme, _, rest = endpoint.partition("://")
        address, slash, subject = rest.partition("/")
        port = int(address.rpartition(":")[2])
        if port not in self._proxies:
            self._proxies[port] = await Proxy(port).start()
        return f"{scheme}://127.0.0.1:{self._proxies[port].port}{slash}{subject}"

    def _open(self, worker_id: WorkerId, dp_rank: int) -> Publisher:
        return KvEventPublisher(dp_rank=dp_rank)


class NatsWire(Wire):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def _open(self, worker_id: WorkerId, dp_rank: int) -> Publisher:
        return NatsKvEventPublisher(self._url, worker_id, dp_rank=dp_rank)


class LossyLinks(Links):
    """Live batches are lost on the last part of their way while `is_deaf`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_deaf = False
        self.num_lost = 0

    def open(self, source: KvSource, listener: Listener) -> EventLink:
        return super().open(source, _Ears(self, listener))


class _Ears:
    def __init__(self, links: LossyLinks, listener: Listener) -> None:
        self._links = links
        self.on_unreadable = listener.on_unreadable
        self.on_disconnected = listener.on_disconnected
        self.on_reconnected = listener.on_reconnected
        self._on_live = listener.on_live

    def on_live(self, seq: int, payload: bytes) -> None:
        if self._links.is_deaf:
            self._links.num_lost += 1
        else:
            self._on_live(seq, payload)


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    server = NatsProcess(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest_asyncio.fixture(params=["zmq", pytest.param("nats", marks=pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE))])
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    is_nats = request.param == "nats"
    wire = NatsWire(request.getfixturevalue("nats_server").url) if is_nats else Wire()
    yield wire
    await wire.close()


@pytest_asyncio.fixture
async def index() -> Index:
    return Index()


@pytest_asyncio.fixture
async def links() -> LossyLinks:
    return LossyLinks()


@pytest_asyncio.fixture
async def subscriber(index: Index, links: LossyLinks) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(index, patience=PATIENCE, links=links)
    yield subscriber
    await subscriber.close()


async def test_events_arrive_in_order(wire: Wire, index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = wire.publisher()
    subscriber.add(await wire.source(publisher))
    assert publisher.publish(blocks(1, 2)) == 0
    await index.holds(1, 2)
    assert publisher.publish([Removed((EngineHash(1),)), block(3)]) == 1
    publisher.publish([Cleared(), block(4)])
    assert publisher.publish([Removed((EngineHash(4),)), block(5)]) == publisher.last_seq == 3
    await index.holds(5)
    assert index.batches == [2, 2, 2, 2]


async def test_a_late_follower_gets_the_history_and_goes_on(
    wire: Wire, index: Index, subscriber: KvEventSubscriber
) -> None:
    publisher = wire.publisher()
    for number in range(700):
        publisher.publish(blocks(number))
    subscriber.add(await wire.source(publisher))
    await index.holds(*range(700))
    publisher.publish(blocks(700))
    await index.holds(*range(701))
    assert (len(index.batches), index.resets) == (701, 0)


async def test_lost_batches_are_replayed_once_a_later_one_comes(
    wire: Wire, index: Index, subscriber: KvEventSubscriber, links: LossyLinks
) -> None:
    publisher = wire.publisher()
    subscriber.add(await wire.source(publisher))
    publisher.publish(blocks(0))
    await index.holds(0)
    await asyncio.sleep(1.2)  # the first rechecks are over, unless this machine is slow: they find losses too
    links.is_deaf = True
    for number in range(1, 20):
        publisher.publish(blocks(number))
    async with asyncio.timeout(PATIENCE_S):
        while not links.num_lost:
            await asyncio.sleep(0.01)
    links.is_deaf = False
    publisher.publish(blocks(20))
    await index.holds(*range(21))
    assert (len(index.batches), index.resets) == (21, 0)


async def test_a_lost_last_batch_is_found_by_the_recheck(wire: Wire, index: Index, links: LossyLinks) -> None:
    links.is_deaf = True
    subscriber = KvEventSubscriber(index, patience=IMPATIENT, links=links)
    publisher = wire.publisher()
    subscriber.add(await wire.source(publisher))
    for number in range(5):
        publisher.publish(blocks(number))
        await index.holds(*range(number + 1))
    await subscriber.close()


async def test_a_connection_that_breaks_loses_nothing(wire: Wire, index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = wire.publisher()
    subscriber.add(await wire.source(publisher))
    publisher.publish(blocks(0))
    await index.holds(0)
    for number in range(1, 4):
        wire.cut()
        publisher.publish(blocks(10 * number))
        await asyncio.sleep(0.05)
        wire.mend()
        await index.until(lambda latest=10 * number: latest in index.held[W1, 0])  # type: ignore[misc]
    publisher.publish(blocks(99))
    await index.holds(0, 10, 20, 30, 99)
    assert index.resets == 0


async def test_a_follower_that_cannot_connect_at_first_gets_all(
    wire: Wire, index: Index, subscriber: KvEventSubscriber
) -> None:
    publisher = wire.publisher()
    source = await wire.source(publisher)
    wire.cut()
    subscriber.add(source)
    publisher.publish(blocks(1))
    await asyncio.sleep(0.05)
    wire.mend()
    publisher.publish(blocks(2))
    await index.holds(1, 2)


async def test_large_steps_become_several_batches(wire: Wire, index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = wire.publisher()
    subscriber.add(await wire.source(publisher))
    names = tuple(EngineHash(number) for number in range(5000))
    last = publisher.publish([Stored(names, None, tuple(range(2**31, 2**31 + 5000 * 128)), 128)])
    assert last >= 3
    await index.holds(*range(5000))
    publisher.publish([Removed(names[1:])])
    await index.holds(0)


async def test_workers_and_ranks_are_kept_apart(wire: Wire, index: Index, subscriber: KvEventSubscriber) -> None:
    for number, (worker_id, dp_rank) in enumerate([(W1, 0), (W1, 1), (W2, 0)]):
        publisher = wire.publisher(worker_id, dp_rank)
        subscriber.add(await wire.source(publisher, worker_id, dp_rank))
        for step in range(5):
            publisher.publish(blocks(10 * number + step))
    await index.holds(0, 1, 2, 3, 4)
    await index.holds(10, 11, 12, 13, 14, dp_rank=1)
    await index.holds(20, 21, 22, 23, 24, worker_id=W2)


async def test_a_removed_worker_is_silent_and_can_return(
    wire: Wire, index: Index, subscriber: KvEventSubscriber
) -> None:
    publisher, other = wire.publisher(), wire.publisher(W2)
    source = await wire.source(publisher)
    subscriber.add(source)
    subscriber.add(await wire.source(other, W2))
    publisher.publish(blocks(1))
    await index.holds(1)
    subscriber.remove(W1)
    publisher.publish(blocks(2))
    other.publish(blocks(3))
    await index.holds(3, worker_id=W2)
    await index.holds(1)
    subscriber.add(source)
    await index.holds(1, 2)


async def test_a_follower_resumes_with_its_kept_index(wire: Wire, index: Index) -> None:
    publisher = wire.publisher()
    source = await wire.source(publisher)
    first = KvEventSubscriber(index, patience=PATIENCE)
    first.add(source)
    for number in range(10):
        publisher.publish(blocks(number))
    await index.holds(*range(10))
    position = first.positions()[W1, 0]
    await first.close()
    for number in range(10, 15):
        publisher.publish(blocks(number))
    second = KvEventSubscriber(index, patience=PATIENCE)
    second.add(replace(source, resume=position))
    await index.holds(*range(15))
    assert (len(index.batches), index.resets) == (15, 0)
    await second.close()


async def test_what_was_lost_in_silence_is_found_by_the_digest(wire: Wire, index: Index) -> None:
    publisher = wire.publisher()
    held: list[int] = []

    async def digest() -> KvDigest:
        mine = digest_of(held)
        return KvDigest(seq=publisher.last_seq, blocks=mine.blocks, value=mine.value)

    async def snapshot() -> Snapshot:
        return Snapshot(publisher.last_seq, [payload(*held)])

    subscriber = KvEventSubscriber(index, patience=IMPATIENT)
    subscriber.add(replace(await wire.source(publisher), digest=digest, snapshot=snapshot))
    for number in range(20):
        held.append(number)
        publisher.publish(blocks(number))
    await index.holds(*range(20))
    assert subscriber.stats["divergences"] == 0
    index.held[W1, 0] ^= {7, 1000}
    await index.holds(*range(20))
    assert (subscriber.stats["divergences"], subscriber.stats["snapshots"]) == (1, 1)
    await subscriber.close()


async def test_closing_leaves_nothing_behind(wire: Wire, index: Index) -> None:
    before = asyncio.all_tasks()
    publisher = wire.publisher()
    subscriber = KvEventSubscriber(index, patience=PATIENCE)
    subscriber.add(await wire.source(publisher))
    publisher.publish(blocks(1))
    await index.holds(1)
    await subscriber.close()
    await subscriber.close()
    await wire.close()
    await publisher.close()
    async with asyncio.timeout(PATIENCE_S):
        while not asyncio.all_tasks() <= before:  # a library may still have something to end
            await asyncio.sleep(0.01)
    assert subscriber.pending_bytes == 0
