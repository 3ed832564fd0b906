"""The seam of a tier's bytes: every store keeps these rules."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvcache.tiers.host import HostStore
from kvcache.tiers.store import Payload, TierError, TierStore

BLOCK_BYTES, MOST = 48, 5


@pytest.fixture(params=["host"])
def store(request: pytest.FixtureRequest) -> Iterator[TierStore]:
    opened = {"host": HostStore(MOST, BLOCK_BYTES)}[request.param]
    yield opened
    opened.close()


def address(number: int) -> bytes:
    return bytes([number]) * 32


def of(number: int) -> Callable[[Payload], object]:
    """Return what writes the bytes of a block."""

    def fill(payload: Payload) -> None:
        payload[:] = number

    return fill


def read(store: TierStore, number: int) -> bytes:
    got: list[bytes] = []
    store.load(address(number), lambda payload: got.append(payload.tobytes()))
    return got[0]


def test_a_stored_block_is_found_and_loaded_whole(store: TierStore) -> None:
    assert not store.find(address(1))
    store.store(address(1), of(7))
    assert store.find(address(1))
    assert read(store, 1) == bytes([7]) * BLOCK_BYTES
    assert (store.block_bytes, store.max_blocks) == (BLOCK_BYTES, MOST)


def test_a_removed_block_is_not_served(store: TierStore) -> None:
    store.store(address(1), of(7))
    store.remove(address(1))
    store.remove(address(1))
    assert not store.find(address(1))
    with pytest.raises(TierError):
        read(store, 1)


def test_a_full_store_takes_a_block_when_another_has_gone(store: TierStore) -> None:
    for number in range(MOST):
        store.store(address(number), of(number))
    with pytest.raises(TierError):
        store.store(address(9), of(9))
    assert not store.find(address(9))
    store.remove(address(2))
    store.store(address(9), of(9))
    assert [read(store, number)[0] for number in (0, 1, 3, 4, 9)] == [0, 1, 3, 4, 9]


def test_a_block_that_could_not_be_written_is_not_there(store: TierStore) -> None:
    def breaks(payload: Payload) -> None:
        payload[:10] = 1
        raise OSError("half of it")

    for _ in range(MOST + 1):
        with pytest.raises(OSError, match="half of it"):
            store.store(address(1), breaks)
    assert not store.find(address(1))
    for number in range(MOST):  # no place was lost
        store.store(address(number), of(number))


def test_threads_store_and_load_at_once(store: TierStore) -> None:
    store.store(address(0), of(0))
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            store.store(address(number), of(number))
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
    store.store(address(1), of(7))
    store.close()
    store.close()
    with pytest.raises(TierError):
        read(store, 1)
    with pytest.raises(TierError):
        store.store(address(2), of(2))
