"""The memory service over its socket: sealed memory, one address, writers and services that die."""

import asyncio
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvmesh.protocol.errors import ConfigError, EngineError, WireError
from kvmesh.workers.memory import client
from kvmesh.workers.memory.__main__ import table_of
from kvmesh.workers.memory.client import ImageLease, read_holdings
from kvmesh.workers.memory.messages import MAX_PACKET_BYTES, from_service, from_worker
from kvmesh.workers.memory.pages import address_of, make_space, map_image, read_only, seal
from kvmesh.workers.memory.service import ImageCounter, listening
from kvmesh.workers.memory.shelf import ImageShelf

KEY = b"k" * 32
MIB = 1 << 20


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[str]:
    path = tmp_path / "memory.sock"
    counter = ImageCounter(ImageShelf(8 * MIB, 60.0), listening(path), 60.0)
    yield str(path)
    counter.close()


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(work, *arguments), 10)


def write(path: str, data: bytes, key: bytes = KEY) -> ImageLease:
    lease = ImageLease(path)
    assert lease.want(key, "model", 5.0) is None
    fd = lease.space(len(data))
    os.pwrite(fd, data, 0)
    os.close(fd)
    os.close(lease.commit().fd)
    return lease


def read(path: str, key: bytes = KEY) -> tuple[ImageLease, Any]:
    lease = ImageLease(path)
    memory = lease.want(key, "model", 5.0)
    assert memory is not None
    image = map_image(memory.fd, memory.num_bytes, address_of(key))
    os.close(memory.fd)
    return lease, image


async def test_what_one_wrote_another_maps(service: str) -> None:
    first = await in_thread(write, service, b"weights" * 1000)
    lease, image = await in_thread(read, service)
    assert (bytes(image.memory[:7]), len(image.memory)) == (b"weights", 7000)
    holdings = await in_thread(read_holdings, service)
    assert [(one.label, one.state, one.users) for one in holdings.images] == [("model", "ready", 2)]
    assert "2 users  model" in table_of(holdings)
    first.close()
    lease.close()


async def test_it_is_mapped_at_the_same_address_again(service: str) -> None:
    (await in_thread(write, service, b"w" * 5000)).close()
    addresses = []
    for _ in range(3):
        lease, image = await in_thread(read, service)
        addresses.append((image.address, image.has_moved))
        del image
        lease.close()
    assert addresses == [(address_of(KEY), False)] * 3


async def test_where_its_address_is_taken_it_is_mapped_elsewhere(service: str) -> None:
    (await in_thread(write, service, b"w" * 5000)).close()
    first, here = await in_thread(read, service)
    second, there = await in_thread(read, service)
    assert (here.has_moved, there.has_moved) == (False, True)
    assert bytes(there.memory) == b"w" * 5000
    first.close()
    second.close()


async def test_nobody_can_change_a_complete_image(service: str) -> None:
    lease = ImageLease(service)
    assert await in_thread(lease.want, KEY, "model", 5.0) is None
    writable = await in_thread(lease.space, 5000)
    memory = await in_thread(lease.commit)
    for fd in (writable, memory.fd):
        with pytest.raises(OSError, match=r"not permitted|Bad file"):
            os.pwrite(fd, b"evil", 0)
        with pytest.raises(OSError, match=r"not permitted|Bad file|Invalid"):
            os.ftruncate(fd, 10)
        os.close(fd)
    lease.close()


async def test_an_image_is_refused_while_its_writer_can_write(service: str) -> None:
    lease = ImageLease(service)
    await in_thread(lease.want, KEY, "model", 5.0)
    fd = await in_thread(lease.space, 5000)
    with mmap.mmap(fd, 5000), pytest.raises(EngineError, match="could not be sealed"):
        await in_thread(lease.commit)
    os.close(fd)
    lease.close()
    assert (await in_thread(read_holdings, service)).images == ()


async def test_a_writer_that_dies_is_followed_by_one_that_waits(service: str) -> None:
    dying, waiting = ImageLease(service), ImageLease(service)
    await in_thread(dying.want, KEY, "model", 5.0)
    os.close(await in_thread(dying.space, 5000))
    answer = asyncio.create_task(in_thread(waiting.want, KEY, "model", 5.0))
    while (await in_thread(read_holdings, service)).images[0].waiting == 0:
        await asyncio.sleep(0.005)
    dying.close()  # as the kernel does for a process that is killed
    assert await answer is None, "it is the writer now"
    waiting.close()


async def test_whoever_waits_too_long_loads_by_itself(service: str) -> None:
    writer, waiting = ImageLease(service), ImageLease(service)
    await in_thread(writer.want, KEY, "model", 5.0)
    with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
        await in_thread(waiting.want, KEY, "model", 0.05)
    writer.close()
    waiting.close()


async def test_more_than_the_limit_is_refused(service: str) -> None:
    lease = ImageLease(service)
    await in_thread(lease.want, KEY, "model", 5.0)
    with pytest.raises(EngineError, match=f"no room: {9 * MIB} bytes are wanted, 0 of {8 * MIB}"):
        await in_thread(lease.space, 9 * MIB)
    lease.close()


@pytest.mark.parametrize("packet", [b"", b"\x80", b"\xff" * 100, b"\x81\xa4type\xa6wrote2", b"x" * MAX_PACKET_BYTES])
async def test_nonsense_ends_the_connection_and_nothing_else(service: str, packet: bytes) -> None:
    odd = ImageLease(service)
    if packet:
        odd._socket.send(packet)
        with pytest.raises((EngineError, OSError)):
            await in_thread(odd.holdings)
        for read_packet in (from_worker, from_service):
            with pytest.raises(WireError):
                read_packet(packet)
    odd.close()
    (await in_thread(write, service, b"w" * 10)).close()


async def test_a_second_service_does_not_take_the_socket_of_the_first(service: str) -> None:
    with pytest.raises(ConfigError, match=r"listens at .* already"):
        await in_thread(listening, Path(service))


def test_the_socket_of_a_killed_service_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "memory.sock"
    listening(path).close()
    again = listening(path)
    assert path.stat().st_mode & 0o777 == 0o600
    again.close()


def test_without_a_service_the_client_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "START_S", 0.0)
    with pytest.raises(FileNotFoundError):
        ImageLease(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no memory service at"):
        read_holdings(str(tmp_path / "none"))


def test_a_client_waits_for_a_service_that_is_just_starting(tmp_path: Path) -> None:
    path = tmp_path / "memory.sock"
    made: list[Any] = []
    starting = threading.Timer(0.1, lambda: made.append(listening(path)))
    starting.start()
    ImageLease(str(path)).close()
    made.pop().close()


def test_a_service_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listening(tmp_path / "memory.sock")
    monkeypatch.setattr(client, "peer_uid", lambda _: os.geteuid() + 1)
    with pytest.raises(EngineError, match="belongs to user"):
        ImageLease(str(tmp_path / "memory.sock"))
    listener.close()


def test_memory_that_is_not_sealed_is_not_mapped() -> None:
    fd = make_space(5000)
    with pytest.raises(EngineError, match="not sealed, or of another size"):
        map_image(fd, 5000, address_of(KEY))
    seal(fd)
    with pytest.raises(EngineError, match="not sealed, or of another size"):
        map_image(fd, 4000, address_of(KEY))
    copy = read_only(fd)
    assert len(map_image(copy, 5000, address_of(KEY)).memory) == 5000
    os.close(fd)
    os.close(copy)
