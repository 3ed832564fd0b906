"""The seam of a tier's bytes: every store keeps these rules."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmesh.kvcache.tiers.collect import SharedLimits
from kvmesh.kvcache.tiers.disk import DiskStore, form_of
from kvmesh.kvcache.tiers.folder import own_folder
from kvmesh.kvcache.tiers.host import HostStore
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.objects import FolderObjects, Objects
from kvmesh.kvcache.tiers.shared import SharedStore
from kvmesh.kvcache.tiers.store import Payload, TierError, TierStore
from kvmesh.protocol.ids import SequenceHash
from tests.support.s3_server import WHY_NONE, new_objects

BLOCK_BYTES, MOST = 48, 5


def open_disk_store(path: Path) -> TierStore:
    return DiskStore(own_folder(path, form_of(b"k" * 32, BLOCK_BYTES, 2, MOST)), MOST, BLOCK_BYTES)


def open_shared_store(objects: Objects) -> TierStore:
    return SharedStore(objects, b"k" * 32, BLOCK_BYTES, MOST, SharedLimits(1 << 30, 3600.0))


STORES: dict[str, Callable[[Path], TierStore]] = {
    "host": lambda _: HostStore(MOST, BLOCK_BYTES),
    "disk": open_disk_store,
    "shared": lambda path: open_shared_store(FolderObjects(path)),
}
if not WHY_NONE:
    STORES["s3 server"] = lambda _: open_shared_store(new_objects())


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierStore]:
    opened = STORES[request.param](tmp_path)
    yield opened
    opened.close()


def address(number: int) -> bytes:
    return bytes([number]) * 32


def block(number: int) -> TierBlock:
    return TierBlock(SequenceHash(number), None, address(number), (number, number))


def put(store: TierStore, number: int, content: int | None = None) -> None:
    """Store one block, all of whose bytes are `content`; raise what the store returns."""

    def fill(_: TierBlock, payload: Payload) -> None:
        payload[:] = number if content is None else content

    [error] = store.store([block(number)], fill)
    if error is not None:
        raise error


def read(store: TierStore, number: int) -> bytes:
    got: list[bytes] = []
    store.load([address(number)], lambda payload: got.append(payload.tobytes()))
    return got[0]


def test_a_stored_block_is_found_and_loaded_whole(store: TierStore) -> None:
    assert not store.find(address(1))
    put(store, 1, 7)
    assert store.find(address(1))
    assert read(store, 1) == bytes([7]) * BLOCK_BYTES
    assert (store.block_bytes, store.max_blocks) == (BLOCK_BYTES, MOST)


def test_a_removed_block_is_not_served(store: TierStore) -> None:
    put(store, 1, 7)
    store.remove(address(1))
    store.remove(address(1))
    assert not store.find(address(1))
    with pytest.raises(TierError):
        read(store, 1)


def test_a_cleared_store_serves_nothing_and_takes_blocks(store: TierStore) -> None:
    for number in range(MOST):
        put(store, number)
    store.clear()
    assert not any(store.find(address(number)) for number in range(MOST))
    for number in range(MOST):
        put(store, number, number + 50)
    assert [read(store, number)[0] for number in range(MOST)] == [50, 51, 52, 53, 54]


def test_a_full_store_takes_a_block_when_another_has_gone(store: TierStore) -> None:
    for number in range(MOST):
        put(store, number)
    with pytest.raises(TierError):
        put(store, 9)
    assert not store.find(address(9))
    store.remove(address(2))
    put(store, 9)
    assert [read(store, number)[0] for number in (0, 1, 3, 4, 9)] == [0, 1, 3, 4, 9]


def test_a_block_that_could_not_be_written_is_not_there(store: TierStore) -> None:
    """The blocks before and after it are."""

    def breaks(block: TierBlock, payload: Payload) -> None:
        payload[:] = block.tokens[0]
        if block.tokens[0] == 1:
            raise OSError("half of it")

    for _ in range(MOST + 1):
        outcomes = store.store([block(number) for number in range(3)], breaks)
        assert [str(outcome) for outcome in outcomes] == ["None", "half of it", "None"]
        assert [store.find(address(number)) for number in range(3)] == [True, False, True]
        assert read(store, 2) == bytes([2]) * BLOCK_BYTES
        for number in range(3):
            store.remove(address(number))
    for number in range(MOST):  # no place was lost
        put(store, number)


def test_blocks_come_in_the_order_in_which_they_were_asked_for(store: TierStore) -> None:
    for number in range(MOST):
        put(store, number)
    got: list[int] = []
    store.load([address(number) for number in (3, 0, 1, 2, 4)], lambda payload: got.append(int(payload[0])))
    assert got == [3, 0, 1, 2, 4]


def test_a_load_ends_at_the_first_block_that_is_not_there(store: TierStore) -> None:
    for number in (0, 1, 3):
        put(store, number)
    got: list[int] = []
    with pytest.raises(TierError):
        store.load([address(number) for number in range(4)], lambda payload: got.append(int(payload[0])))
    assert got == [0, 1]


def test_what_takes_a_block_may_end_the_load(store: TierStore) -> None:
    for number in range(3):
        put(store, number)
    got: list[int] = []

    def take(payload: Payload) -> None:
        got.append(int(payload[0]))
        if len(got) == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        store.load([address(number) for number in range(3)], take)
    assert got == [0, 1]


def test_threads_store_and_load_at_once(store: TierStore) -> None:
    put(store, 0)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            put(store, number)
            got = np.frombuffer(read(store, number), np.uint8)
            wrong.extend(got[got != number].tolist())
            store.remove(address(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, MOST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert read(store, 0) == bytes(BLOCK_BYTES)


def test_a_closed_store_serves_nothing(store: TierStore) -> None:
    put(store, 1, 7)
    store.close()
    store.close()
    with pytest.raises(TierError):
        read(store, 1)
    with pytest.raises(TierError):
        put(store, 2)
