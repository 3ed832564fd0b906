"""A publisher that lies, floods or talks nonsense harms nobody but itself."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import zmq

from kvmesh.kvevents.allowance import EventRates
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.kvevents.sockets import LoopSocket, open_socket
from kvmesh.kvevents.subscriber import KvEventSubscriber, Patience
from kvmesh.kvevents.transport import KvSource, Snapshot
from kvmesh.protocol.ids import WorkerId
from tests.support.kv_events import W1, Index, blocks, payload
from tests.support.patience import PATIENCE_S

W2 = WorkerId("w2")
PATIENCE = Patience(answer_s=0.2, tries=2, backoff_s=0.01)
FEW = EventRates(events_per_s=200, bytes_per_s=1e6, burst_s=0.5)  # 100 events at once


def source(publisher: KvEventPublisher, worker_id: WorkerId = W1) -> KvSource:
    return KvSource(worker_id, publisher.endpoint, publisher.replay_endpoint)


class Liar:
    """Sends any frames from a PUB socket."""

    def __init__(self) -> None:
        pub = open_socket(zmq.XPUB)
        pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        pub.bind("tcp://127.0.0.1:*")
        self.endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._subscribed = asyncio.Event()
        self._socket = LoopSocket(pub, lambda _: self._subscribed.set())

    async def subscribed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._subscribed.wait()

    def send(self, *frames: bytes) -> None:
        assert self._socket.send(frames)

    def batch(self, seq: int, payload: bytes) -> None:
        self.send(b"", seq.to_bytes(8, "big"), payload)

    def close(self) -> None:
        self._socket.close()


@pytest_asyncio.fixture
async def liar() -> AsyncIterator[Liar]:
    liar = Liar()
    yield liar
    liar.close()


@pytest_asyncio.fixture
async def honest() -> AsyncIterator[KvEventPublisher]:
    publisher = KvEventPublisher()
    yield publisher
    await publisher.close()


class Watched(Index):
    """An index that counts how many events came in each second."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        super().on_batch(worker_id, dp_rank, payload)
        if worker_id == W1:
            self.times += [asyncio.get_running_loop().time()] * self.batches[-1]

    def most_within(self, seconds: float) -> int:
        return max(sum(1 for other in self.times if time <= other < time + seconds) for time in self.times)


async def test_a_flood_is_slowed_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    index, rests = Watched(), list[int]()
    flooding, quiet = KvEventPublisher(), KvEventPublisher()
    follower = KvEventSubscriber(index, patience=PATIENCE, rates=FEW, on_rest=lambda: rests.append(1))
    with caplog.at_level(logging.WARNING):
        follower.add(source(flooding))
        follower.add(source(quiet, W2))
        for number in range(400):
            flooding.publish(blocks(number))
        quiet.publish(blocks(1))
        await index.holds(1, worker_id=W2)
        assert len(index.held.get((W1, 0), ())) < 400  # the quiet one was not behind the flood
        await index.holds(*range(400))
    assert len(rests) == follower.stats["rests"] >= 2
    assert index.most_within(0.4) <= 200  # a burst, and what is earned meanwhile
    assert sum("sends more events" in line for line in caplog.messages) == 1
    await follower.close()
    await flooding.close()
    await quiet.close()


async def test_a_publisher_at_rest_is_not_live() -> None:
    index, publisher = Index(), KvEventPublisher()
    follower = KvEventSubscriber(index, patience=PATIENCE, rates=EventRates(10, 1e6, 1.0))
    follower.add(source(publisher))
    for number in range(30):
        publisher.publish(blocks(number))
    await index.until(lambda: follower.stats["rests"] > 0 or len(index.batches) > 9)
    while not follower.stats["rests"]:
        await asyncio.sleep(0.01)
    assert not follower.is_live(W1)
    await follower.close()
    await publisher.close()


async def test_a_flood_beyond_the_ring_ends_in_a_snapshot() -> None:
    index, publisher = Index(), KvEventPublisher(ring_batches=5)

    async def snapshot() -> Snapshot:
        return Snapshot(publisher.last_seq, [payload(*range(publisher.last_seq + 1), ts=2.0)])

    follower = KvEventSubscriber(index, patience=PATIENCE, rates=FEW)
    follower.add(KvSource(W1, publisher.endpoint, publisher.replay_endpoint, snapshot=snapshot))
    for number in range(300):
        publisher.publish(blocks(number))
        if number % 50 == 0:
            await asyncio.sleep(0.01)
    await index.holds(*range(300))
    await follower.close()
    await publisher.close()


NONSENSE: Sequence[tuple[bytes, ...]] = [
    (b"",),
    (b"", b"short", b"x"),
    (b"", bytes(8), b""),
    (b"", bytes(8), b"\x93"),
    (b"", bytes(8), b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"),
    (b"", bytes(8), b"\xc1" * 1000),
    (b"", bytes(8), b"\x91" * 100_000),
    (b"", b"\xff" * 8, payload(7)),
    (b"", bytes(8), payload(7), b"one more"),
]


@pytest.mark.parametrize("frames", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_never_ends_a_feed(liar: Liar, honest: KvEventPublisher, frames: tuple[bytes, ...]) -> None:
    index = Index()
    follower = KvEventSubscriber(index, patience=PATIENCE)
    follower.add(KvSource(W1, liar.endpoint, honest.replay_endpoint))
    await liar.subscribed()
    liar.send(*frames)
    liar.send(*frames)
    honest.publish(blocks(1))
    honest.publish(blocks(2))
    liar.batch(1, payload(2, ts=3e9))
    await index.until(lambda: {1, 2} <= index.held.get((W1, 0), set()))
    await follower.close()


async def test_a_flood_of_nonsense_is_cut(liar: Liar, honest: KvEventPublisher) -> None:
    index = Index()
    follower = KvEventSubscriber(index, patience=PATIENCE, rates=FEW)
    follower.add(KvSource(W1, liar.endpoint, ""))
    follower.add(source(honest, W2))
    await liar.subscribed()
    for _ in range(500):
        liar.send(b"no batch")
    honest.publish(blocks(3))
    await index.holds(3, worker_id=W2)
    async with asyncio.timeout(PATIENCE_S):
        while not follower.stats["rests"]:
            await asyncio.sleep(0.01)
    assert follower.stats["unreadable"] < 400
    await follower.close()
