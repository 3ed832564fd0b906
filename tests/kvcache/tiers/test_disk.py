"""A disk gives back what it was given, or nothing: never other bytes."""

import errno
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvmesh.kvcache.tiers.disk import DiskStore
from kvmesh.kvcache.tiers.folder import own_folder
from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.restore import restore
from kvmesh.kvcache.tiers.store import Payload, TierCorruptError, TierError, TierIoError
from kvmesh.protocol.tiers import Tier
from tests.support.disk import (
    BLOCK,
    BLOCK_BYTES,
    FINGERPRINT,
    FailingIo,
    RawSlot,
    SlowWrites,
    chain,
    form,
    open_store,
    payload_of,
    put,
    read,
)


def found_again(path: Path, max_blocks: int = 200) -> TierIndex:
    """Return the index of a store that is opened anew, and close the store."""
    store = open_store(path, max_blocks)
    index = TierIndex(Tier.DISK, max_blocks, BLOCK, store.remove)
    restore(index, store.found, FINGERPRINT, BLOCK)
    store.close()
    return index


def test_blocks_are_found_after_the_process_ended_without_notice(tmp_path: Path) -> None:
    """No method is called at the end: nothing that is kept until then would be there after kill -9."""
    store = open_store(tmp_path)
    blocks = chain(1, 5)
    put(store, blocks)
    os.close(store._folder._lock)  # as the kernel does
    store._folder._lock = -1
    again = open_store(tmp_path)
    assert {block.address for block, _ in again.found} == {block.address for block in blocks}
    assert [read(again, block) for block in blocks] == [payload_of(block) for block in blocks]
    assert [(block.tokens, block.parent) for block, _ in sorted(again.found, key=lambda each: each[1])] == [
        (block.tokens, block.parent) for block in blocks
    ]


def test_the_index_is_rebuilt_with_events_for_routers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, chain(1, 5) + chain(2, 3))
    store.close()
    index = found_again(tmp_path)
    assert len(index) == 8
    assert sum(len(event.hashes) for event in index.take_events()) == 8  # type: ignore[union-attr]


def test_what_follows_a_lost_block_is_not_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = chain(1, 5)
    put(store, [*blocks[:2], *blocks[3:]])
    store.close()
    index = found_again(tmp_path)
    assert [index.get(block.name) is not None for block in blocks] == [True, True, False, False, False]


def test_the_block_that_was_written_last_is_evicted_last(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, chain(1, 1) + chain(2, 1) + chain(3, 1))
    store.close()
    index = found_again(tmp_path)
    index.max_blocks = 3
    assert index.admit(chain(9, 1)[0])
    assert [index.get(chain(number, 1)[0].name) is not None for number in (1, 2, 3)] == [False, True, True]


def test_damaged_bytes_are_never_served(tmp_path: Path) -> None:
    """One bit of each block is turned over."""
    rng = random.Random(7)
    store = open_store(tmp_path)
    blocks = [chain(number, 1)[0] for number in range(150)]
    put(store, blocks)
    for slot in range(150):
        RawSlot(tmp_path, slot, is_header=False).flip(rng.randrange(BLOCK_BYTES), rng.randrange(8))
    caught = 0
    for block in blocks:
        with pytest.raises(TierCorruptError):
            read(store, block)
        caught += 1
    assert caught == 150
    store.close()


def test_damaged_headers_are_not_found(tmp_path: Path) -> None:
    rng = random.Random(9)
    store = open_store(tmp_path)
    put(store, [chain(number, 1)[0] for number in range(150)])
    store.close()
    for slot in range(149):
        header = RawSlot(tmp_path, slot, is_header=True)
        used = len(header.read().rstrip(b"\0"))
        header.flip(rng.randrange(used), rng.randrange(8))
    index = found_again(tmp_path)
    assert index.get(chain(149, 1)[0].name) is not None
    assert len(index) == 1


def test_a_payload_without_its_header_is_no_block(tmp_path: Path) -> None:
    """The process ended after the payload was written, over the slot of an older block."""
    store = open_store(tmp_path)
    [old], [new] = chain(1, 1), chain(2, 1)
    put(store, [old])
    RawSlot(tmp_path, 0, is_header=False).write(payload_of(new))
    store.close()
    again = open_store(tmp_path)
    assert [block.address for block, _ in again.found] == [old.address]
    with pytest.raises(TierCorruptError):
        read(again, old)
    again.close()


def test_the_payload_is_written_before_its_header(tmp_path: Path) -> None:
    io = FailingIo()
    store = open_store(tmp_path, io=io)
    put(store, chain(1, 3))
    header_bytes = form().per_segment * form().header_bytes
    assert [offset >= header_bytes for offset in io.written] == [True, False]
    store.close()


def test_a_block_that_changed_while_it_was_copied_is_no_block_after_a_crash(tmp_path: Path) -> None:
    """Its payload is written with those beside it, but no header proves it."""
    store = open_store(tmp_path)
    put(store, chain(1, 1))
    store.remove(chain(1, 1)[0].address)
    blocks = chain(2, 3)

    def fill(block: TierBlock, payload: Payload) -> None:
        payload[:] = memoryview(payload_of(block))
        if block is blocks[0]:
            raise KeyError("overtaken")

    assert [error is None for error in store.store(blocks, fill)] == [False, True, True]
    store.close()
    again = open_store(tmp_path)
    assert {block.address for block, _ in again.found} == {block.address for block in blocks[1:]}
    again.close()


def test_a_slot_with_another_whole_block_is_not_served(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    [one], [other] = chain(1, 1), chain(2, 1)
    put(store, [one, other])
    for is_header in (True, False):
        RawSlot(tmp_path, 0, is_header=is_header).write(RawSlot(tmp_path, 1, is_header=is_header).read())
    with pytest.raises(TierCorruptError):
        read(store, one)
    assert read(store, other) == payload_of(other)
    store.close()
    again = open_store(tmp_path)
    assert [read(again, block) for block, _ in again.found] == [payload_of(other)]
    again.close()


def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    """Also if such a slot gets into the folder of this model."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    store, foreign = open_store(mine), open_store(theirs, fingerprint=b"\xcd" * 32)
    put(store, chain(1, 3))
    put(foreign, chain(2, 3))
    for is_header in (True, False):
        RawSlot(mine, 0, is_header=is_header).write(RawSlot(theirs, 0, is_header=is_header).read())
    with pytest.raises(TierCorruptError):
        read(store, chain(1, 1)[0])
    store.close()
    foreign.close()
    assert len(found_again(mine)) == 0
    other = open_store(mine, fingerprint=b"\xcd" * 32)
    assert other.found == [], "the folder begins anew"
    other.close()


def test_a_name_that_is_not_that_of_its_tokens_is_not_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    [block] = chain(1, 1)
    put(store, [TierBlock(block.name, None, block.address, (9, 9, 9, 9))])
    store.close()
    assert len(found_again(tmp_path)) == 0


def test_a_reset_holds_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, chain(1, 3))
    store.clear()
    put(store, chain(2, 2))
    store.close()
    assert len(found_again(tmp_path)) == 2


def test_files_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    put(store, chain(1, 1))
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    store.close()


def test_one_process_owns_a_folder(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    put(first, chain(1, 3))
    second = open_store(tmp_path)
    assert (first._folder.path.name, second._folder.path.name) == ("0", "1")
    assert second.found == []
    first.close()
    third = open_store(tmp_path)
    assert (third._folder.path.name, len(third.found)) == ("0", 3)
    second.close()
    third.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_failing_disk_says_so_and_serves_nothing(tmp_path: Path, number: int) -> None:
    io = FailingIo()
    store = open_store(tmp_path, io=io)
    [kept], [lost] = chain(1, 1), chain(2, 1)
    put(store, [kept])
    io.errors = {"write": number}
    with pytest.raises(TierIoError, match=os.strerror(number)):
        put(store, [lost])
    assert not store.find(lost.address)
    io.errors = {"read": number}
    with pytest.raises(TierIoError, match=os.strerror(number)):
        read(store, kept)
    io.errors = {}
    assert read(store, kept) == payload_of(kept)
    put(store, [lost])
    assert read(store, lost) == payload_of(lost)
    store.close()


def test_a_disk_without_space_for_a_segment_takes_nothing(tmp_path: Path) -> None:
    io = FailingIo()
    store = open_store(tmp_path, io=io)
    io.errors = {"allocate": errno.ENOSPC}
    for _ in range(3):
        with pytest.raises(TierIoError, match="No space left"):
            put(store, chain(1, 1))
    assert not list((tmp_path / "0").glob("segment-*"))
    io.errors = {}
    put(store, chain(1, 1))
    store.close()


def test_a_transfer_that_ends_early_is_an_error(tmp_path: Path) -> None:
    io = FailingIo()
    store = open_store(tmp_path, io=io)
    [block] = chain(1, 1)
    put(store, [block])
    io.short = True
    with pytest.raises(TierIoError, match="bytes of KV blocks were transferred"):
        read(store, block)
    with pytest.raises(TierIoError):
        put(store, chain(2, 1))
    store.close()


def test_a_file_system_without_direct_io_is_used_through_its_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = FailingIo()
    io.errors = {"direct": errno.EINVAL}
    store = open_store(tmp_path, io=io)
    [block] = chain(1, 1)
    put(store, [block])
    assert read(store, block) == payload_of(block)
    assert not store.is_direct
    assert set(store.ios) == {"buffered"}
    assert "takes no direct I/O" in caplog.text
    store.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(TierIoError, match="cannot hold KV"):
        open_store(tmp_path / "file")


def test_a_slow_scan_loses_blocks_and_serves_the_rest(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, chain(1, 3))
    store.close()
    again = DiskStore(own_folder(tmp_path, form()), 200, 5000, scan_s=-1.0)
    assert again.found == []
    put(again, chain(1, 3))
    assert read(again, chain(1, 3)[2]) == payload_of(chain(1, 3)[2])
    again.close()


def test_a_smaller_tier_gives_its_last_segments_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.kvcache.tiers.disk.SEGMENT_BYTES", 4 * (form().header_bytes + form().payload_bytes))
    store = open_store(tmp_path, max_blocks=12)
    put(store, [chain(number, 1)[0] for number in range(12)])
    assert len(list((tmp_path / "0").glob("segment-*"))) == 3
    with pytest.raises(TierError, match="all 12 slots"):
        put(store, chain(99, 1))
    store.close()
    smaller = open_store(tmp_path, max_blocks=6)
    assert len(smaller.found) == 6
    assert len(list((tmp_path / "0").glob("segment-*"))) == 2
    smaller.close()


def test_blocks_of_many_runs_come_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is read while the one before is taken: a load that ends early leaves nothing to the next."""
    monkeypatch.setattr("kvmesh.kvcache.tiers.disk.RUN_BYTES", 3 * form().payload_bytes)
    store = open_store(tmp_path)
    blocks = chain(1, 40)
    put(store, blocks)
    got: list[bytes] = []

    def take_seven(payload: Payload) -> None:
        got.append(payload.tobytes())
        if len(got) == 7:
            raise KeyError("enough")

    for _ in range(5):
        got.clear()
        with pytest.raises(KeyError):
            store.load([block.address for block in blocks], take_seven)
        assert got == [payload_of(block) for block in blocks[:7]]
        got.clear()
        store.load([block.address for block in blocks[20:]], lambda payload: got.append(payload.tobytes()))
        assert got == [payload_of(block) for block in blocks[20:]]
    RawSlot(tmp_path, 11, is_header=False).flip(40, 3)
    got.clear()
    with pytest.raises(TierCorruptError):
        store.load([block.address for block in blocks], lambda payload: got.append(payload.tobytes()))
    assert got == [payload_of(block) for block in blocks[:11]]
    store.close()


def test_a_load_does_not_wait_for_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes none of the runs that are written, and no more may be on their way."""
    monkeypatch.setattr("kvmesh.kvcache.tiers.disk.RUN_BYTES", 3 * form().payload_bytes)
    io = SlowWrites()
    store = open_store(tmp_path, io=io)
    kept, written = chain(1, 20), chain(2, 30)
    put(store, kept)
    io.may_write.clear()
    writing = threading.Thread(target=put, args=(store, written))
    writing.start()
    assert [read(store, block) for block in kept] == [payload_of(block) for block in kept]
    got: list[bytes] = []
    store.load([block.address for block in kept], lambda payload: got.append(payload.tobytes()))
    assert got == [payload_of(block) for block in kept]
    assert not store.find(written[0].address)
    io.may_write.set()
    writing.join()
    assert [read(store, block) for block in written] == [payload_of(block) for block in written]
    store.close()


def test_runs_beside_one_that_fails_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.kvcache.tiers.disk.RUN_BYTES", 2 * form().payload_bytes)
    io = FailingIo()
    store = open_store(tmp_path, io=io)
    blocks = chain(1, 10)
    write, begun = io.write, list[int]()

    def fail_once(file: int, data: Payload, offset: int) -> int:
        begun.append(offset)
        if len(begun) == 5:  # the payloads of the third run
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(file, data, offset)

    monkeypatch.setattr(io, "write", fail_once)
    outcomes = store.store(
        blocks, lambda block, payload: np.copyto(payload, np.frombuffer(payload_of(block), np.uint8))
    )
    assert [error is None for error in outcomes] == [True] * 4 + [False] * 2 + [True] * 4
    assert [store.find(block.address) for block in blocks] == [True] * 4 + [False] * 2 + [True] * 4
    put(store, blocks[4:6])
    assert [read(store, block) for block in blocks] == [payload_of(block) for block in blocks]
    store.close()
