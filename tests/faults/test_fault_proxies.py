"""The proxies of the fault machine disturb connections and ZMQ messages."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator

import pytest
import zmq

from kvmesh.lab.faults.proxies import TroubledProxy, Weather
from kvmesh.lab.faults.zmtp import EventTrouble, Piece, TroubledMessages, ZmtpCutter, frames_of, message_of
from tests.support.patience import PATIENCE_S

HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, THERE, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def proxy(echo: int) -> AsyncIterator[TroubledProxy]:
    made = TroubledProxy(HERE, echo, THERE, Weather(), zmtp=False, seed="test")
    await made.start()
    yield made
    await made.close()


async def connected(proxy: TroubledProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HERE, proxy.port)
    writer.write(b"one")
    assert await reader.read(100) == b"one"
    return reader, writer


async def test_a_partition_holds_bytes_until_it_heals(proxy: TroubledProxy) -> None:
    reader, writer = await connected(proxy)
    proxy.weather.cut()
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(100), 0.1)
    proxy.weather.heal()
    assert await reader.read(100) == b"two"
    writer.close()


async def test_a_reset_ends_the_connection_at_both_ends(proxy: TroubledProxy) -> None:
    reader, writer = await connected(proxy)
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await reader.read(100)
    writer.close()


async def test_a_half_open_connection_says_nothing_more(proxy: TroubledProxy) -> None:
    reader, writer = await connected(proxy)
    proxy.forget()
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(100), 0.1)
    writer.close()
    new_reader, new_writer = await connected(proxy)
    assert not new_reader.at_eof()
    new_writer.close()


def pieces_of(*parts: tuple[bytes, ...]) -> bytes:
    """Return what a real publisher writes for these messages."""
    with zmq.Context() as context, socket.create_server((HERE, 0)) as listening:
        pub = context.socket(zmq.PUSH)
        pub.setsockopt(zmq.LINGER, 2000)
        pub.connect(f"tcp://{HERE}:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x04PULL"
        connection.sendall(greeting + bytes([4, len(ready)]) + ready)
        for part in parts:
            pub.send_multipart(part)
        pub.close()
        data = b""
        while chunk := connection.recv(1 << 16):
            data += chunk
        connection.close()
    return data


def test_messages_of_a_real_publisher_are_cut_whole() -> None:
    sent = [(b"kv", b"1", b"x" * 300), (b"kv", b"2", b"y")]
    data = pieces_of(*sent)
    cutter = ZmtpCutter()
    pieces = [piece for at in range(0, len(data), 7) for piece in cutter.feed(data[at : at + 7])]
    assert b"".join(piece.data for piece in pieces) == data
    messages = [piece.data for piece in pieces if piece.is_message]
    assert len(messages) == 2
    assert messages[0].endswith(b"x" * 300) and messages[1].endswith(b"y")


@pytest.mark.parametrize(
    ("kind", "comes"),
    [
        ("", b"abc"),
        ("events_lost", b""),
        ("events_repeated", b"aabbcc"),
        ("events_reordered", b"ba"),
    ],
)
def test_messages_get_the_trouble_that_is_set(kind: str, comes: bytes) -> None:
    troubled = TroubledMessages(EventTrouble(kind, 1.0), random.Random(1))
    passed = b"".join(troubled.pass_on(Piece(data, True)) for data in (b"a", b"b", b"c"))
    assert passed == comes


def test_a_command_is_never_troubled() -> None:
    troubled = TroubledMessages(EventTrouble("events_lost", 1.0), random.Random(1))
    assert troubled.pass_on(Piece(b"ping", False)) == b"ping"


def test_a_flipped_message_differs_in_one_bit() -> None:
    troubled = TroubledMessages(EventTrouble("events_flipped", 1.0), random.Random(1))
    before = bytes(100)
    after = troubled.pass_on(Piece(before, True))
    assert sum(byte.bit_count() for byte in after) == 1


async def test_a_subscriber_hears_a_publisher_through_the_proxy() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, context.socket(zmq.SUB) as sub:
        pub.linger = 0
        port = pub.bind_to_random_port(f"tcp://{THERE}")
        proxy = TroubledProxy(HERE, port, THERE, Weather(), zmtp=True, seed="test")
        await proxy.start()
        sub.subscribe(b"")
        sub.connect(f"tcp://{HERE}:{port}")
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(sub.poll, 20):
                pub.send_multipart([b"kv", b"1"])
        assert sub.recv_multipart() == [b"kv", b"1"]
        await proxy.close()


def test_a_second_publisher_adds_messages_and_changes_none() -> None:
    troubled = TroubledMessages(EventTrouble("events_forged", 1.0), random.Random(1))
    sent = [message_of([b"kv", number.to_bytes(8, "big"), b"x" * 300]) for number in range(40)]
    got = [troubled.pass_on(Piece(one, True)) for one in sent]
    assert all(passed.startswith(one) for passed, one in zip(got, sent, strict=True))
    added = [frames_of(passed[len(one) :]) for passed, one in zip(got, sent, strict=True)]
    assert all(added)
    assert len({tuple(map(len, frames)) for frames in added}) > 3, "lies of several kinds"


def test_what_is_no_event_is_not_forged() -> None:
    troubled = TroubledMessages(EventTrouble("events_forged", 1.0), random.Random(1))
    for frames in ([b"one"], [b"kv", b"1"], [b"", b"a", b"b"]):
        assert troubled.pass_on(Piece(message_of(frames), True)) == message_of(frames)
