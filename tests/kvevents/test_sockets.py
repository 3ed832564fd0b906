"""Publisher and subscriber over real sockets on free ports."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from kvevents.formats import decode_payload, encode_payload
from kvevents.publisher import KvEventPublisher
from kvevents.sockets import LoopSocket, open_socket
from kvevents.subscriber import KvEventSubscriber, KvSource, Patience, Snapshot
from protocol.errors import ConfigError, PeerLostError
from protocol.events import Cleared, KvEvent, Removed, Stored
from protocol.ids import EngineHash, WorkerId

W1, W2 = WorkerId("w1"), WorkerId("w2")
PATIENCE = Patience(answer_s=0.2, tries=2, backoff_s=0.01)


def block(number: int) -> Stored:
    return Stored((EngineHash(number),), None, (number, number), 2)


def blocks(*numbers: int) -> list[KvEvent]:
    return [block(number) for number in numbers]


def free_endpoint() -> str:
    """An address where nobody listens yet; a ZMQ socket would give its port back only some time after close()."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Index:
    """What a router would keep: the blocks of each worker; a test waits for what it expects to see."""

    def __init__(self) -> None:
        self.held: dict[tuple[WorkerId, int], set[int]] = {}
        self.resets = 0
        self._changed = asyncio.Event()

    def on_events(self, worker_id: WorkerId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        held = self.held.setdefault((worker_id, dp_rank), set())
        for event in events:
            match event:
                case Stored():
                    held.update(event.hashes)
                case Removed():
                    held.difference_update(event.hashes)
                case Cleared():
                    held.clear()
                    self.resets += 1
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def holds(self, *numbers: int, worker_id: WorkerId = W1, dp_rank: int = 0) -> None:
        await self.until(lambda: self.held.get((worker_id, dp_rank)) == set(numbers))


@pytest.fixture
async def index() -> Index:
    return Index()


@pytest.fixture
async def subscriber(index: Index) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(index.on_events, patience=PATIENCE)
    yield subscriber
    await subscriber.close()


@pytest.fixture
async def publisher() -> AsyncIterator[KvEventPublisher]:
    publisher = KvEventPublisher()
    yield publisher
    publisher.close()


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
        async with asyncio.timeout(5):
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


def payload(*numbers: int) -> bytes:
    return encode_payload(blocks(*numbers), 1.0)


async def test_events_arrive_in_order(index: Index, subscriber: KvEventSubscriber, publisher: KvEventPublisher) -> None:
    subscriber.add(source(publisher))
    assert publisher.publish(blocks(1, 2)) == 0
    await index.holds(1, 2)
    assert publisher.publish([Removed((EngineHash(1),)), block(3)]) == 1
    await index.holds(2, 3)
    publisher.publish([Cleared()])
    await index.holds()


async def test_a_late_joiner_gets_the_history(
    index: Index, subscriber: KvEventSubscriber, publisher: KvEventPublisher
) -> None:
    for number in range(300):
        publisher.publish(blocks(number))
    subscriber.add(source(publisher))
    await index.holds(*range(300))
    await index.until(lambda: subscriber.is_live(W1))


async def test_lost_batches_are_recovered_by_replay(
    index: Index, subscriber: KvEventSubscriber, publisher: KvEventPublisher
) -> None:
    async with relayed(subscriber, publisher) as relay:
        relay.send(publisher.publish(blocks(0)), payload(0))
        await index.holds(0)
        publisher.publish(blocks(1))
        publisher.publish(blocks(2))
        relay.send(publisher.publish(blocks(3)), payload(3))
        await index.holds(0, 1, 2, 3)
        assert index.resets == 0


async def test_a_lost_last_batch_is_found_by_the_recheck(index: Index, publisher: KvEventPublisher) -> None:
    subscriber = KvEventSubscriber(index.on_events, patience=Patience(recheck_s=0.05))
    async with relayed(subscriber, publisher) as relay:
        relay.send(publisher.publish(blocks(0)), payload(0))
        await index.holds(0)
        publisher.publish(blocks(1))
        await index.holds(0, 1)
    await subscriber.close()


async def test_a_ring_too_short_leads_to_a_snapshot(index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = KvEventPublisher(ring_batches=2)
    for number in range(5):
        publisher.publish(blocks(number))

    async def snapshot() -> Snapshot:
        return Snapshot(publisher.last_seq, blocks(*range(5)))

    subscriber.add(source(publisher, snapshot=snapshot))
    await index.holds(0, 1, 2, 3, 4)
    assert subscriber.stats["snapshots"] == 1
    publisher.publish(blocks(5))
    await index.holds(0, 1, 2, 3, 4, 5)
    publisher.close()


async def test_a_ring_too_short_without_snapshots_gives_what_it_has(
    index: Index, subscriber: KvEventSubscriber
) -> None:
    publisher = KvEventPublisher(ring_batches=2)
    for number in range(5):
        publisher.publish(blocks(number))
    subscriber.add(source(publisher))
    await index.holds(3, 4)
    publisher.close()


async def test_a_silent_replay_socket_leads_to_a_snapshot(index: Index, subscriber: KvEventSubscriber) -> None:
    silent = open_socket(zmq.ROUTER)
    silent.bind("tcp://127.0.0.1:*")
    publisher = KvEventPublisher()

    async def snapshot() -> Snapshot:
        return Snapshot(-1, blocks(8))

    endpoint = silent.getsockopt_string(zmq.LAST_ENDPOINT)
    subscriber.add(KvSource(W1, publisher.endpoint, endpoint, snapshot=snapshot))
    await index.holds(8)
    silent.close()
    publisher.close()


async def test_a_snapshot_that_fails_is_tried_again(index: Index, subscriber: KvEventSubscriber) -> None:
    publisher = KvEventPublisher()
    answers = iter([PeerLostError("down"), KeyError("bug")])

    async def snapshot() -> Snapshot:
        if error := next(answers, None):
            raise error
        return Snapshot(-1, blocks(1))

    subscriber.add(KvSource(W1, publisher.endpoint, snapshot=snapshot))
    await index.until(lambda: index.resets == 1)  # given up after two tries
    await index.holds()
    publisher.close()


async def test_a_restarted_worker_is_a_new_one(index: Index, subscriber: KvEventSubscriber) -> None:
    first = KvEventPublisher()
    subscriber.add(source(first))
    first.publish(blocks(1))
    await index.holds(1)
    first.close()
    subscriber.remove(W1)
    second = KvEventPublisher()
    subscriber.add(source(second, W2))
    second.publish(blocks(2))
    await index.holds(2, worker_id=W2)
    await index.holds(1)
    second.close()


async def test_ranks_of_one_worker_are_followed_side_by_side(index: Index, subscriber: KvEventSubscriber) -> None:
    ranks = [KvEventPublisher(dp_rank=rank) for rank in range(2)]
    for rank, publisher in enumerate(ranks):
        subscriber.add(KvSource(W1, publisher.endpoint, publisher.replay_endpoint, dp_rank=rank))
        publisher.publish(blocks(rank))
    await index.holds(0, dp_rank=0)
    await index.holds(1, dp_rank=1)
    subscriber.remove(W1)
    assert not subscriber.is_live(W1, 0)
    for publisher in ranks:
        publisher.close()


async def test_a_source_that_starts_later_is_found(index: Index, subscriber: KvEventSubscriber) -> None:
    later = KvSource(W1, free_endpoint(), free_endpoint())
    subscriber.add(later)
    publisher = KvEventPublisher(later.endpoint, later.replay_endpoint)
    publisher.publish(blocks(1))
    await index.holds(1)
    publisher.close()


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
    got: asyncio.Queue[int] = asyncio.Queue()

    def sink(worker_id: WorkerId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        got.put_nowait(len(events))
        if len(events) == 1:
            raise KeyError("bug")

    subscriber = KvEventSubscriber(sink, patience=PATIENCE)
    subscriber.add(source(publisher))
    publisher.publish(blocks(1))
    publisher.publish(blocks(1, 2))
    async with asyncio.timeout(5):
        assert [await got.get(), await got.get()] == [1, 2]
    assert "events were lost" in caplog.text
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
    publisher.close()
    publisher.close()


async def test_a_large_step_becomes_several_batches(publisher: KvEventPublisher) -> None:
    event = Stored((EngineHash(1),), None, tuple(range(100_000)), 100_000)
    assert publisher.publish([event] * 4) == 1
    assert publisher.publish([]) == 2


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
        async with asyncio.timeout(5):
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


async def test_a_client_that_does_not_read_holds_up_nobody_and_misses_nothing(publisher: KvEventPublisher) -> None:
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
    async with asyncio.timeout(5):
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
