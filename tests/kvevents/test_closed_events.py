"""Closed KV events: only admitted keys may follow, and a follower takes batches of the card's key alone."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
import zmq

from kvmesh.kvevents import door as doors
from kvmesh.kvevents.connect import Links
from kvmesh.kvevents.door import Admissions, EventDoor, KeyPair, new_keys
from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.kvevents.sockets import LoopSocket, open_socket
from kvmesh.kvevents.subscriber import KvEventSubscriber, Patience
from kvmesh.kvevents.transport import KvSource
from kvmesh.protocol.card_checks import is_event_key
from kvmesh.protocol.errors import ConfigError, InvalidRequestError, OverloadedError
from tests.support.kv_events import W1, Index, blocks, payload
from tests.support.patience import PATIENCE_S
from tests.support.proxy import Proxy

PATIENCE = Patience(answer_s=0.3, tries=2, backoff_s=0.01, recheck_s=0.2)
FOLLOWER, STRANGER = new_keys(), new_keys()
SILENCE_S = 0.4


@pytest.fixture(autouse=True)
def short_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.3)


@pytest_asyncio.fixture
async def door() -> AsyncIterator[EventDoor]:
    door = EventDoor()
    yield door
    await door.close()


@pytest_asyncio.fixture
async def open_closed(door: EventDoor) -> AsyncIterator[Callable[..., tuple[KvEventPublisher, KvSource]]]:
    """A function that opens a publisher with keys, and says where it publishes."""
    opened: list[KvEventPublisher] = []

    def open_one(
        endpoint: str = "tcp://127.0.0.1:*", replay: str = "tcp://127.0.0.1:*"
    ) -> tuple[KvEventPublisher, KvSource]:
        keys = new_keys()
        publisher = KvEventPublisher(endpoint, replay, door=door, keys=keys)
        opened.append(publisher)
        return publisher, KvSource(W1, publisher.endpoint, publisher.replay_endpoint, key=keys.public)

    yield open_one
    for publisher in opened:
        await publisher.close()


Open = Callable[..., tuple[KvEventPublisher, KvSource]]


@pytest_asyncio.fixture
async def follow() -> AsyncIterator[Callable[[KvSource, KeyPair], Index]]:
    followers: list[KvEventSubscriber] = []

    def follow(source: KvSource, keys: KeyPair) -> Index:
        index = Index()
        followers.append(KvEventSubscriber(index, patience=PATIENCE, links=Links(keys=keys)))
        followers[-1].add(source)
        return index

    yield follow
    for follower in followers:
        await follower.close()


Follow = Callable[[KvSource, KeyPair], Index]


async def silent(index: Index) -> bool:
    """Return whether nothing comes for a while."""
    await asyncio.sleep(SILENCE_S)
    return not index.held.get((W1, 0))


async def test_an_admitted_follower_gets_batches_and_replays(
    door: EventDoor, open_closed: Open, follow: Follow
) -> None:
    publisher, source = open_closed()
    publisher.publish(blocks(1))
    with door.admitted(FOLLOWER.public):
        index = follow(source, FOLLOWER)
        await index.holds(1)
        publisher.publish(blocks(2))
        await index.holds(1, 2)


async def test_a_stranger_gets_neither_batches_nor_replays(door: EventDoor, open_closed: Open, follow: Follow) -> None:
    publisher, source = open_closed()
    publisher.publish(blocks(1))
    with door.admitted(FOLLOWER.public):
        known, stranger = follow(source, FOLLOWER), follow(source, STRANGER)
        await known.holds(1)
        publisher.publish(blocks(2))
        await known.holds(1, 2)
        assert await silent(stranger)


async def test_a_follower_is_heard_although_its_key_comes_late(
    door: EventDoor, open_closed: Open, follow: Follow
) -> None:
    publisher, source = open_closed()
    publisher.publish(blocks(1))
    index = follow(source, FOLLOWER)
    assert await silent(index)
    with door.admitted(FOLLOWER.public):
        await index.holds(1)


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
async def test_a_client_without_keys_gets_nothing(door: EventDoor, open_closed: Open, kind: int) -> None:
    publisher, source = open_closed()
    heard: list[list[bytes]] = []
    socket = open_socket(kind)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(source.endpoint if kind == zmq.SUB else source.replay_endpoint)
    client = LoopSocket(socket, heard.append)
    if kind == zmq.DEALER:
        client.send((b"", bytes(8)))
    for number in range(4):
        publisher.publish(blocks(number))
        await asyncio.sleep(SILENCE_S / 4)
    client.close()
    assert not heard


async def test_a_key_that_was_dismissed_opens_no_connection(door: EventDoor, open_closed: Open, follow: Follow) -> None:
    publisher, source = open_closed()
    publisher.publish(blocks(1))
    with door.admitted(FOLLOWER.public):
        await follow(source, FOLLOWER).holds(1)
    assert door.admissions.followers == 0
    assert await silent(follow(source, FOLLOWER))


async def test_another_publisher_cannot_speak_for_the_card(door: EventDoor, open_closed: Open, follow: Follow) -> None:
    """An impostor at the same address has another key: nothing that it says is taken."""
    impostor, its_source = open_closed()
    impostor.publish(blocks(66))
    with door.admitted(FOLLOWER.public):
        assert await silent(follow(replace(its_source, key=new_keys().public), FOLLOWER))


async def test_an_open_impostor_is_not_heard(follow: Follow) -> None:
    impostor = KvEventPublisher()
    impostor.publish(blocks(66))
    source = KvSource(W1, impostor.endpoint, impostor.replay_endpoint, key=new_keys().public)
    index = follow(source, FOLLOWER)
    impostor.publish(blocks(67))
    assert await silent(index)
    await impostor.close()


async def test_an_admitted_follower_cannot_publish(door: EventDoor, open_closed: Open, follow: Follow) -> None:
    """A follower with a PUB socket of its own, which connects where batches come from, reaches nobody."""
    publisher, source = open_closed()
    with door.admitted(FOLLOWER.public), door.admitted(STRANGER.public):
        index = follow(source, FOLLOWER)
        lies = open_socket(zmq.PUB)
        doors.show_key(lies, STRANGER, source.key)
        lies.connect(source.endpoint)
        for number in range(5):
            lies.send_multipart((b"", number.to_bytes(8, "big"), payload(66)))
            await asyncio.sleep(0.05)
        publisher.publish(blocks(1))
        await index.holds(1)
        lies.close()


async def test_a_cut_connection_is_made_again(door: EventDoor, open_closed: Open, follow: Follow) -> None:
    publisher, source = open_closed()
    live = await Proxy(int(source.endpoint.rpartition(":")[2])).start()
    with door.admitted(FOLLOWER.public):
        index = follow(replace(source, endpoint=f"tcp://127.0.0.1:{live.port}"), FOLLOWER)
        publisher.publish(blocks(1))
        await index.holds(1)
        live.cut()
        publisher.publish(blocks(2))
        live.mend()
        async with asyncio.timeout(PATIENCE_S):
            await index.holds(1, 2)
    await live.close()


async def test_a_publisher_that_returns_with_other_keys_is_followed_by_its_new_card(
    door: EventDoor, open_closed: Open, follow: Follow
) -> None:
    first, source = open_closed()
    index = Index()
    follower = KvEventSubscriber(index, patience=PATIENCE, links=Links(keys=FOLLOWER))
    with door.admitted(FOLLOWER.public):
        follower.add(source)
        first.publish(blocks(1))
        await index.holds(1)
        await first.close()
        second, its_source = None, None
        async with asyncio.timeout(PATIENCE_S):
            while second is None:
                try:
                    second, its_source = open_closed(source.endpoint, source.replay_endpoint)
                except ConfigError:  # the port is not free yet
                    await asyncio.sleep(0.02)
        second.publish(blocks(2))
        assert its_source is not None
        follower.add(its_source)
        await index.holds(2)
    await follower.close()


async def test_open_and_closed_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="are open, expected were closed"):
        Links(keys=FOLLOWER).open(KvSource(W1, "tcp://127.0.0.1:9"), KvEventSubscriberStub())
    with pytest.raises(ConfigError, match="are closed, expected were open"):
        Links().open(KvSource(W1, "tcp://127.0.0.1:9", key=FOLLOWER.public), KvEventSubscriberStub())
    with pytest.raises(ConfigError, match="no key"):
        Links(keys=FOLLOWER).open(KvSource(W1, "tcp://127.0.0.1:9", key="x" * 41), KvEventSubscriberStub())


class KvEventSubscriberStub:
    def on_live(self, seq: int, payload: bytes) -> None: ...
    def on_unreadable(self, what: str) -> None: ...
    def on_disconnected(self) -> None: ...
    def on_reconnected(self) -> None: ...


# --- who is admitted ---------------------------------------------------------------------------------------------


def test_a_key_counts_while_one_of_its_calls_is_open() -> None:
    admissions = Admissions()
    admissions.admit(b"k")
    admissions.admit(b"k")
    admissions.dismiss(b"k")
    assert admissions.ask((b"c", b"1"), b"k")
    admissions.dismiss(b"k")
    assert not admissions.ask((b"c", b"2"), b"k")


def test_connections_that_waited_are_let_in_with_their_key() -> None:
    admissions = Admissions()
    assert not admissions.ask((b"c", b"1"), b"k")
    assert not admissions.ask((b"d", b"1"), b"other")
    assert admissions.admit(b"k") == [(b"c", b"1")]
    assert admissions.waiting == 1


def test_waiting_connections_are_bounded_and_the_oldest_makes_room() -> None:
    admissions = Admissions(max_waiting=2)
    for number in range(5):
        admissions.ask((b"c%d" % number, b"1"), b"k%d" % number)
    assert admissions.waiting == 2
    assert admissions.admit(b"k4") == [(b"c4", b"1")]
    assert admissions.admit(b"k0") == []


def test_followers_are_bounded() -> None:
    admissions = Admissions(max_followers=1)
    admissions.admit(b"k")
    admissions.admit(b"k")
    with pytest.raises(OverloadedError):
        admissions.admit(b"other")


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "x" * 39 + " ", "ü" * 40, '"' * 40])
async def test_what_is_no_key_is_refused(door: EventDoor, text: str) -> None:
    assert not is_event_key(text)
    with pytest.raises(InvalidRequestError), door.admitted(text):
        pass


def test_a_secret_key_is_not_printed() -> None:
    assert FOLLOWER.secret not in repr(FOLLOWER)
    assert is_event_key(FOLLOWER.public)


# --- the end of a process ----------------------------------------------------------------------------------------


ENDS = """
import asyncio, gc
from kvmesh.kvevents.door import EventDoor, new_keys
from kvmesh.kvevents.publisher import KvEventPublisher

def opened():
    door = EventDoor()
    return door, KvEventPublisher(door=door, keys=new_keys())

async def forgotten():
    opened()

async def kept():
    global door
    door = opened()

async def left_open():
    door, publisher = opened()
    await door.close()

gc.disable()  # until the door, its context and its sockets are garbage together
asyncio.run({}())
gc.collect()
print("ended")
"""


@pytest.mark.parametrize("how", ["forgotten", "kept", "left_open"])
def test_no_door_holds_up_the_end_of_its_process(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(how)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
