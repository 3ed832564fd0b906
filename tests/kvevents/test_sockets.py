"""Publisher and subscriber over real ZMQ sockets on free ports: what tests/contracts/test_kv_events.py does not ask."""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from kvmesh.kvevents.formats import decode_payload
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.kvevents.sockets import LoopSocket, open_socket
from kvmesh.kvevents.subscriber import KvEventSubscriber, Patience
from kvmesh.kvevents.transport import KvSource, Snapshot
from kvmesh.protocol.errors import ConfigError, PeerLostError
from kvmesh.protocol.events import Digest, Stored
from kvmesh.protocol.ids import EngineHash, WorkerId
from tests.support.held import held_by
from tests.support.kv_events import Index, blocks, payload
from tests.support.patience import PATIENCE_S
from tests.support.proxy import Proxy

W1, W2 = WorkerId("w1"), WorkerId("w2")
PATIENCE = Patience(answer_s=0.2, tries=2, backoff_s=0.01)


def free_endpoint() -> str:
    """An address where nobody listens yet; a ZMQ socket would give its port back only some time after close()."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
async def index() -> Index:
    return Index()


@pytest.fixture
async def subscriber(index: Index) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(index, patience=PATIENCE)
    yield subscriber
    await subscriber.close()


@pytest.fixture
async def publisher() -> AsyncIterator[KvEventPublisher]:
    publisher = KvEventPublisher()
    yield publisher
    await publisher.close()


def source(
    publisher: KvEventPublisher,
    worker_id: WorkerId = W1,
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
) -> KvSource:
    return KvSource(worker_id, publisher.endpoint, publisher.replay_endpoint, snapshot=snapshot)


class Relay:
    """A PUB socket of our own in front of a publisher's replay: live batches come when the test says so."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self.replay_endpoint = publisher.replay_endpoint
        self._pub = open_socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._subscribed = asyncio.Event()
        self._socket = LoopSocket(self._pub, lambda _: self._subscribed.set())

    async def subscribed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._subscribed.wait()

    def send(self, seq: int, payload: bytes) -> None:
        assert self._socket.send((b"", seq.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def relayed(
    subscriber: KvEventSubscriber,
    publisher: KvEventPublisher,
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
) -> AsyncIterator[Relay]:
    relay = Relay(publisher)
    subscriber.add(KvSource(W1, relay.endpoint, relay.replay_endpoint, snapshot=snapshot))
    try:
        await relay.subscribed()
        yield relay
    finally:
        relay.close()


async def test_a_ring_too_short_leads_to_a_snapshot(index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = KvEventPublisher(ring_batches=2)
    for number in range(5):
        publisher.publish(blocks(number))

    async def snapshot() -> Snapshot:
        return Snapshot(publisher.last_seq, [payload(*range(5))])

    subscriber.add(source(publisher, snapshot=snapshot))
    await index.holds(0, 1, 2, 3, 4)
    assert subscriber.stats["snapshots"] == 1
    publisher.publish(blocks(5))
    await index.holds(0, 1, 2, 3, 4, 5)
    await publisher.close()


async def test_a_ring_too_short_without_snapshots_gives_what_it_has(
    index: Index, subscriber: KvEventSubscriber
) -> None:
    publisher = KvEventPublisher(ring_batches=2)
    for number in range(5):
        publisher.publish(blocks(number))
    subscriber.add(source(publisher))
    await index.holds(3, 4)
    await publisher.close()


async def test_a_silent_replay_socket_leads_to_a_snapshot(index: Index, subscriber: KvEventSubscriber) -> None:
    silent = open_socket(zmq.ROUTER)
    silent.bind("tcp://127.0.0.1:*")
    publisher = KvEventPublisher()

    async def snapshot() -> Snapshot:
        return Snapshot(-1, [payload(8)])

    endpoint = silent.getsockopt_string(zmq.LAST_ENDPOINT)
    subscriber.add(KvSource(W1, publisher.endpoint, endpoint, snapshot=snapshot))
    await index.holds(8)
    silent.close()
    await publisher.close()


async def test_a_snapshot_that_fails_is_tried_again(index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = KvEventPublisher()
    answers = iter([PeerLostError("down"), KeyError("bug")])

    async def snapshot() -> Snapshot:
        if error := next(answers, None):
            raise error
        return Snapshot(-1, [payload(1)])

    subscriber.add(KvSource(W1, publisher.endpoint, snapshot=snapshot))
    await index.until(lambda: index.resets == 1)  # given up after two tries
    await index.holds()
    await publisher.close()


async def test_a_restarted_worker_is_a_new_one(index: Index, subscriber: KvEventSubscriber) -> None:
    first = KvEventPublisher()
    subscriber.add(source(first))
    first.publish(blocks(1))
    await index.holds(1)
    await first.close()
    subscriber.remove(W1)
    second = KvEventPublisher()
    subscriber.add(source(second, W2))
    second.publish(blocks(2))
    await index.holds(2, worker_id=W2)
    await index.holds(1)
    await second.close()


@asynccontextmanager
async def publishing(endpoints: tuple[str, str], *numbers: int) -> AsyncIterator[KvEventPublisher]:
    """A publisher that has published those blocks, one by one; its address may have just been used by another."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                publisher = KvEventPublisher(*endpoints)
                break
            except ConfigError:
                await asyncio.sleep(0.01)
    for number in numbers:
        publisher.publish(blocks(number))
    yield publisher
    await publisher.close()


@pytest.mark.parametrize("published", [0, 3, 4, 5, 6, 20])
async def test_a_new_process_at_an_address_is_followed_from_0(
    index: Index, subscriber: KvEventSubscriber, published: int
) -> None:
    endpoints = free_endpoint(), free_endpoint()
    async with publishing(endpoints, 0, 1, 2, 3, 4):
        subscriber.add(KvSource(W1, *endpoints))
        await index.holds(0, 1, 2, 3, 4)
    async with publishing(endpoints, *range(100, 100 + published)):
        await index.holds(*range(100, 100 + published))


async def test_a_new_process_with_the_expected_number_is_noticed(index: Index, subscriber: KvEventSubscriber) -> None:
    endpoints = free_endpoint(), free_endpoint()
    async with publishing(endpoints, 0, 1, 2):
        subscriber.add(KvSource(W1, *endpoints))
        await index.holds(0, 1, 2)
    async with publishing(endpoints, 100, 101, 102) as second:
        while not index.resets:  # its first batches were for nobody
            second.publish(blocks(100 + second.last_seq + 1))
            await asyncio.sleep(0.05)
        await index.holds(*range(100, 100 + second.last_seq + 1))


async def test_removing_breaking_sources_does_not_stop_others(
    index: Index, subscriber: KvEventSubscriber, publisher: KvEventPublisher
) -> None:
    publisher.publish(blocks(1))
    for _ in range(5):
        proxy = await Proxy(int(publisher.endpoint.rpartition(":")[2])).start()
        names = [WorkerId(f"leaving-{number}") for number in range(40)]
        for name in names:
            subscriber.add(KvSource(name, f"tcp://127.0.0.1:{proxy.port}", publisher.replay_endpoint))
        for name in names:
            await index.holds(1, worker_id=name)
        proxy.cut()
        await asyncio.sleep(0)
        for name in names:
            subscriber.remove(name)
            del index.held[name, 0]
        await proxy.close()
    subscriber.add(source(publisher))
    await index.holds(1)


async def test_a_source_that_is_replaced_forgets_what_it_held(index: Index, subscriber: KvEventSubscriber) -> None:
    first, second = KvEventPublisher(), KvEventPublisher()
    first.publish(blocks(1))
    subscriber.add(source(first))
    await index.holds(1)
    second.publish(blocks(2))
    subscriber.add(source(second))
    await index.holds(2)
    await first.close()
    await second.close()


async def test_a_source_that_starts_later_is_found(index: Index, subscriber: KvEventSubscriber) -> None:
    later = KvSource(W1, free_endpoint(), free_endpoint())
    subscriber.add(later)
    publisher = KvEventPublisher(later.endpoint, later.replay_endpoint)
    publisher.publish(blocks(1))
    await index.holds(1)
    await publisher.close()


async def test_an_unreadable_batch_is_counted_and_passed_over(
    index: Index, subscriber: KvEventSubscriber, publisher: KvEventPublisher
) -> None:
    async with relayed(subscriber, publisher) as relay:
        relay.send(0, b"\xc1")
        relay.send(1, payload(1))
        await index.holds(1)
        assert subscriber.stats["unreadable"] == 1


async def test_a_sink_that_fails_gets_the_next_batch(
    publisher: KvEventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(Index):
        def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
            super().on_batch(worker_id, dp_rank, payload)
            if len(self.batches) == 1:
                raise KeyError("bug")

        def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
            raise KeyError("another")

    index = Buggy()
    subscriber = KvEventSubscriber(index, patience=PATIENCE)
    subscriber.add(source(publisher))
    publisher.publish(blocks(1))
    publisher.publish(blocks(1, 2))
    await index.holds(1, 2)
    await asyncio.sleep(0.15)  # the first recheck asks for the digest
    publisher.publish(blocks(3))
    await index.holds(1, 2, 3)
    assert "batch 0 was lost" in caplog.text
    await subscriber.close()


async def test_bad_addresses_are_refused(subscriber: KvEventSubscriber) -> None:
    with pytest.raises(ConfigError, match="cannot follow KV events at 'nonsense'"):
        subscriber.add(KvSource(W1, "nonsense"))
    with pytest.raises(ConfigError, match="cannot follow KV events at 'nonsense'"):
        subscriber.add(KvSource(W1, "tcp://127.0.0.1:9", "nonsense"))
    with pytest.raises(ConfigError, match="cannot publish KV events on tcp"):
        KvEventPublisher("tcp://192.0.2.1:9")


async def test_the_advertised_host_replaces_the_bound_one() -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:*", advertise_host="node-7")
    assert publisher.endpoint.startswith("tcp://node-7:")
    assert publisher.replay_endpoint.startswith("tcp://node-7:")
    await publisher.close()
    await publisher.close()


def free_pair() -> int:
    """Return a port on which, and on the one after it, nobody listens."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


async def test_ports_of_a_range_are_taken_in_order() -> None:
    first = free_pair()
    publisher = KvEventPublisher(*2 * [f"tcp://127.0.0.1:{first}-{first + 1}"])
    assert publisher.endpoint.endswith(f":{first}")
    assert publisher.replay_endpoint.endswith(f":{first + 1}")
    with pytest.raises(ConfigError, match=f"cannot publish KV events on .*{first + 1}: Address already in use"):
        KvEventPublisher(*2 * [f"tcp://127.0.0.1:{first}-{first + 1}"])
    await publisher.close()


class ReplayClient:
    """A DEALER as vLLM's example client uses it."""

    def __init__(self, endpoint: str, receive: int = 1000) -> None:
        self._answers: asyncio.Queue[list[bytes]] = asyncio.Queue()
        dealer = open_socket(zmq.DEALER, receive=receive)
        dealer.connect(endpoint)
        self.socket = LoopSocket(dealer, self._answers.put_nowait)

    async def ask(self, *frames: bytes) -> list[tuple[int, bytes]]:
        self.socket.send(frames)
        got: list[tuple[int, bytes]] = []
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await self._answers.get())[-2] != (-1).to_bytes(8, "big", signed=True):
                assert answer[0] == b""
                got.append((int.from_bytes(answer[-2], "big"), answer[-1]))
        return got


@pytest.mark.parametrize("start", [0, 7, 10, 2**64 - 1])
async def test_replay_speaks_vllms_protocol(publisher: KvEventPublisher, start: int) -> None:
    for number in range(10):
        publisher.publish(blocks(number))
    client = ReplayClient(publisher.replay_endpoint)
    got = await client.ask(b"", start.to_bytes(8, "big"))
    assert [seq for seq, _ in got] == list(range(min(start, 10), 10))
    assert [decode_payload(data).events for _, data in got] == [blocks(seq) for seq, _ in got]
    client.socket.close()


async def test_malformed_replay_requests_are_ignored(publisher: KvEventPublisher) -> None:
    publisher.publish(blocks(1))
    client = ReplayClient(publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"", b"", b"", bytes(8)], [b"", bytes(9)]):
        client.socket.send(frames)
    assert len(await client.ask(bytes(8))) == 1  # and the delimiter may be missing
    client.socket.close()


async def test_a_stalled_client_delays_nobody_and_misses_nothing(publisher: KvEventPublisher) -> None:
    filler = Stored((EngineHash(1),), None, tuple(range(70_000, 90_000)), 20_000)
    for _ in range(300):  # 30 MB: more than the sockets hold
        publisher.publish([filler])
    stuck = open_socket(zmq.DEALER, receive=1)
    stuck.connect(publisher.replay_endpoint)
    stuck.send_multipart([b"", bytes(8)])
    client = ReplayClient(publisher.replay_endpoint)
    assert len(await client.ask(b"", bytes(8))) == 300
    got: asyncio.Queue[bytes] = asyncio.Queue()
    awake = LoopSocket(stuck, lambda frames: got.put_nowait(frames[-2]))
    async with asyncio.timeout(PATIENCE_S):
        seqs = [await got.get() for _ in range(301)]
    assert seqs == [*(seq.to_bytes(8, "big") for seq in range(300)), b"\xff" * 8]
    awake.close()
    client.socket.close()


async def test_an_older_engines_replay_without_topics_is_understood(
    index: Index, subscriber: KvEventSubscriber
) -> None:
    router = open_socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    event = msgspec.msgpack.encode([1.0, [["BlockStored", [4], None, [1, 2], 2]], None])

    def answer(frames: list[bytes]) -> None:
        client, delimiter, start = frames
        old.send((client, delimiter, start, event))
        old.send((client, delimiter, (-1).to_bytes(8, "big", signed=True), b""))

    old = LoopSocket(router, answer)
    subscriber.add(KvSource(W1, "tcp://127.0.0.1:9", router.getsockopt_string(zmq.LAST_ENDPOINT)))
    await index.holds(4)
    old.close()


async def test_a_publisher_without_news_frees_closed_connections() -> None:
    publisher, numbers = KvEventPublisher(), itertools.count()

    def subscribe_and_leave(times: int) -> None:
        for _ in range(times):
            subscriber = open_socket(zmq.SUB)
            events = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED, f"inproc://watched-{next(numbers)}")
            subscriber.connect(publisher.endpoint)
            assert events.poll(1000 * PATIENCE_S)
            subscriber.disable_monitor()
            subscriber.close()
            events.close()

    await asyncio.to_thread(subscribe_and_leave, 50)
    before = held_by(os.getpid()).private_mib
    await asyncio.to_thread(subscribe_and_leave, 800)
    grown_mib = held_by(os.getpid()).private_mib - before
    await publisher.close()
    assert grown_mib < 3, "800 connections that are not freed hold 10 MiB"
