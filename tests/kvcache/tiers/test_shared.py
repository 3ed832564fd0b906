"""Workers find what others have stored, and get those bytes or nothing."""

import os
import random
import time
from pathlib import Path

import pytest

from kvmesh.kvcache.tiers.bundle import chains
from kvmesh.kvcache.tiers.collect import GRACE_S, LEASE_S, SharedLimits, lease_to_write, to_collect
from kvmesh.kvcache.tiers.objects import StoredObject
from kvmesh.kvcache.tiers.store import TierCorruptError, TierError, TierIoError
from tests.support.disk import BLOCK_BYTES, chain, payload_of, put, read
from tests.support.shared import LIMITS, Member, objects_in


def test_another_worker_finds_and_reads_the_blocks(tmp_path: Path) -> None:
    one, other = Member(tmp_path), Member(tmp_path)
    blocks = chain(1, 5)
    put(one.store, blocks)
    assert other.knows(blocks) == [False] * 5
    other.refresh()
    assert other.knows(blocks) == [True] * 5
    assert [read(other.store, block) for block in blocks] == [payload_of(block) for block in blocks]
    assert other.index.digest == Member(tmp_path).index.digest, "and so does one that starts later"


def test_blocks_of_one_prefix_are_one_object_for_this_user_alone(tmp_path: Path) -> None:
    put(Member(tmp_path).store, chain(1, 5) + chain(2, 3))
    files = objects_in(tmp_path)
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_objects_have_a_largest_size() -> None:
    assert [len(part) for part in chains(chain(1, 10), 1 << 20)] == [4, 4, 2]
    assert [len(part) for part in chains(chain(1, 3), 8 << 20)] == [1, 1, 1]


def test_equal_blocks_are_stored_once(tmp_path: Path) -> None:
    """The second worker reads what the first has written: sums of floats may differ in their last bits."""
    one, other = Member(tmp_path), Member(tmp_path)
    [block] = chain(1, 1)
    put(one.store, [block])
    [again] = chain(1, 1)
    other.store.store([again], lambda _, payload: payload.fill(7))
    assert len(objects_in(tmp_path)) == 1
    assert read(other.store, again) == payload_of(block)


def test_a_later_part_of_a_prefix_is_found_too(tmp_path: Path) -> None:
    one, other = Member(tmp_path), Member(tmp_path)
    blocks = chain(1, 6)
    put(one.store, blocks[:2])
    other.refresh()
    put(one.store, blocks[2:])
    other.refresh()
    assert other.knows(blocks) == [True] * 6


def test_blocks_of_other_models_are_not_found(tmp_path: Path) -> None:
    put(Member(tmp_path).store, chain(1, 5))
    assert len(Member(tmp_path, fingerprint=b"\x01" * 32).index) == 0


def test_a_removed_object_is_forgotten_by_all(tmp_path: Path) -> None:
    one, other = Member(tmp_path), Member(tmp_path)
    blocks = chain(1, 3)
    put(one.store, blocks)
    other.refresh()
    [file] = objects_in(tmp_path)
    file.unlink()
    with pytest.raises(TierError, match="does not hold"):
        read(other.store, blocks[0])
    other.refresh()
    assert (len(other.index), other.knows(blocks)) == (0, [False] * 3)


def test_a_reset_makes_all_workers_forget(tmp_path: Path) -> None:
    one, other = Member(tmp_path), Member(tmp_path)
    blocks = chain(1, 3)
    put(one.store, blocks)
    other.refresh()
    one.store.clear()
    assert not one.store.find(blocks[0].address)
    assert other.refresh().is_cleared
    assert len(other.index) == 0
    assert len(Member(tmp_path).index) == 0
    put(one.store, chain(1, 2))
    other.refresh()
    assert len(other.index) == 2


def test_a_worker_that_missed_a_reset_stores_nothing_that_others_see(tmp_path: Path) -> None:
    one, other = Member(tmp_path), Member(tmp_path)
    one.store.clear()
    put(other.store, chain(1, 3))
    other.refresh()
    assert len(other.index) == 0
    one.refresh()
    assert len(one.index) == 0


@pytest.mark.parametrize("seed", range(40))
def test_a_bit_that_changed_is_never_served(tmp_path: Path, seed: int) -> None:
    """Whoever finds a damaged object removes it, so that it can be stored again."""
    one, other = Member(tmp_path), Member(tmp_path)
    blocks = chain(1, 3)
    put(one.store, blocks)
    rng = random.Random(seed)
    if is_known := seed % 2 == 0:
        other.refresh()
    [file] = objects_in(tmp_path)
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data) - 3 * BLOCK_BYTES if seed % 4 else len(data))
    data[place] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    if not is_known:
        other.refresh()
    is_head = place < len(data) - 3 * BLOCK_BYTES
    assert len(other.index) == (0 if is_head and not is_known else 3)
    for block in blocks if len(other.index) else ():
        try:
            assert read(other.store, block) == payload_of(block)
        except TierError:
            assert not is_head
    fresh = Member(tmp_path)
    put(fresh.store, blocks)
    assert [read(fresh.store, block) for block in blocks] == [payload_of(block) for block in blocks]


def test_an_object_that_was_cut_off_is_not_served(tmp_path: Path) -> None:
    one = Member(tmp_path)
    blocks = chain(1, 3)
    put(one.store, blocks)
    [file] = objects_in(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - BLOCK_BYTES - 1])
    assert read(one.store, blocks[0]) == payload_of(blocks[0])
    with pytest.raises(TierCorruptError):
        read(one.store, blocks[1])
    file.write_bytes(data[:100])
    assert len(Member(tmp_path).index) == 0


def test_an_object_under_the_name_of_another_is_not_served(tmp_path: Path) -> None:
    one = Member(tmp_path)
    put(one.store, chain(1, 3))
    put(one.store, chain(2, 3))
    first, second = objects_in(tmp_path)
    first.write_bytes(second.read_bytes())
    late = Member(tmp_path)
    assert len(late.index) == 3


@pytest.mark.parametrize("call", ["listing", "read", "put"])
def test_storage_that_fails_says_so(tmp_path: Path, call: str) -> None:
    one, other = Member(tmp_path), Member(tmp_path)
    blocks = chain(1, 3)
    put(other.store, blocks)
    one.refresh()
    one.objects.errors = {call}
    work = {
        "listing": one.refresh,
        "read": lambda: read(one.store, blocks[0]),
        "put": lambda: put(one.store, chain(2, 1)),
    }[call]
    with pytest.raises(TierIoError):
        work()
    one.objects.errors = set()
    one.refresh()
    assert one.knows(blocks) == [True] * 3


def test_full_storage_takes_blocks_again_after_a_collection(tmp_path: Path) -> None:
    size = 5 << 20
    limits = SharedLimits(size, 3600.0)
    one = Member(tmp_path, limits, max_blocks=2000)
    prompts = [chain(number, 200) for number in range(1, 6)]
    for prompt in prompts:
        put(one.store, prompt)
    for age_s, file in enumerate(sorted(objects_in(tmp_path), key=lambda each: each.stat().st_mtime_ns)):
        os.utime(file, (time.time() - 100 + age_s,) * 2)
    with pytest.raises(TierError, match="full"):
        put(one.store, chain(9, 200))
    assert one.refresh().collected_bytes > 4 << 20
    put(one.store, chain(9, 200))
    assert sum(file.stat().st_size for file in objects_in(tmp_path)) <= size
    assert one.knows(prompts[0]) == [False] * 200


def test_an_object_that_was_stored_again_meanwhile_is_not_removed(tmp_path: Path) -> None:
    """A worker that knows the checksums of the object before forgets it, and learns the new one."""
    one, other = Member(tmp_path), Member(tmp_path)
    [block] = chain(1, 1)
    put(one.store, [block])
    other.refresh()
    for file in objects_in(tmp_path):
        file.unlink()
    again = Member(tmp_path)
    again.store.store(chain(1, 1), lambda _, payload: payload.fill(7))
    with pytest.raises(TierCorruptError):
        read(other.store, block)
    assert len(objects_in(tmp_path)) == 1
    other.refresh()
    assert read(other.store, block) == bytes([7]) * BLOCK_BYTES


def test_a_worker_knows_the_latest_blocks_that_it_has_memory_for(tmp_path: Path) -> None:
    one = Member(tmp_path)
    prompts = [chain(number, 10) for number in range(1, 4)]
    for age_s, prompt in zip((30, 20, 10), prompts, strict=True):
        put(one.store, prompt)
        [file] = [each for each in objects_in(tmp_path) if each.stat().st_mtime > time.time() - 5]
        os.utime(file, (time.time() - age_s,) * 2)
    small = Member(tmp_path, max_blocks=25)
    assert [small.knows(prompt)[0] for prompt in prompts] == [False, True, True]
    assert small.refresh().found == [], "what was passed over is not looked at again"
    put(one.store, chain(4, 10))
    assert len(small.refresh().found) == 10
    assert len(small.index) == 25


def test_a_load_counts_as_use(tmp_path: Path) -> None:
    one = Member(tmp_path)
    [block] = chain(1, 1)
    put(one.store, [block])
    [file] = objects_in(tmp_path)
    os.utime(file, (1000.0, 1000.0))
    read(one.store, block)
    assert file.stat().st_mtime > time.time() - 60


def objects(*sizes_and_ages: tuple[str, int, float]) -> list[StoredObject]:
    return [StoredObject(name, size, 10_000.0 - age_s) for name, size, age_s in sizes_and_ages]


def collected(limits: SharedLimits, found: list[StoredObject]) -> list[str]:
    return [one.name for one in to_collect(found, limits, 10_000.0, "m/now/")]


def test_old_objects_are_collected_of_all_models() -> None:
    found = objects(("m/now/a", 1, 3700), ("other/e/b", 1, 3700), ("m/now/c", 1, 10), ("m/epoch", 32, 9000))
    assert collected(LIMITS, found) == ["m/now/a", "other/e/b"]


def test_objects_from_before_a_reset_are_collected_soon() -> None:
    found = objects(("m/before/a", 1, GRACE_S + 1), ("m/before/b", 1, 1), ("other/before/c", 1, GRACE_S + 1))
    assert collected(LIMITS, found) == ["m/before/a"]


def test_each_model_has_its_own_limit() -> None:
    mib = 1 << 20
    found = objects(*[(f"m/now/{i}", 10 * mib, i) for i in range(5)], ("other/e/a", 30 * mib, 99))
    assert collected(SharedLimits(60 * mib, 3600), found) == []
    assert collected(SharedLimits(50 * mib, 3600), found) == ["m/now/4", "m/now/3"]
    assert collected(SharedLimits(30 * mib, 3600), found) == ["m/now/4", "m/now/3", "m/now/2", "other/e/a"]


def test_drafts_of_workers_that_were_killed_are_collected() -> None:
    assert collected(LIMITS, objects(("drafts/a", 1, GRACE_S + 1), ("drafts/b", 1, 1))) == ["drafts/a"]


def test_one_worker_at_a_time_collects() -> None:
    mine = lease_to_write(None, "me", 100.0)
    assert mine is not None
    assert lease_to_write(mine, "you", 101.0) is None
    assert lease_to_write(mine, "me", 101.0) is not None
    assert lease_to_write(mine, "you", 100.0 + LEASE_S) is not None, "it has run out"
    assert lease_to_write(mine, "you", -1000.0) is not None, "a clock that is far ahead holds nobody up for long"
    assert lease_to_write(b"broken", "you", 101.0) is not None


def test_blocks_of_another_size_are_no_blocks(tmp_path: Path) -> None:
    put(Member(tmp_path).store, chain(1, 2))
    other = Member(tmp_path)
    other.store.block_bytes = BLOCK_BYTES + 1
    other.store._catalog.begin(other.store._catalog.epoch)
    assert other.refresh().found == []


def test_the_first_worker_begins_the_epoch_for_all(tmp_path: Path) -> None:
    assert Member(tmp_path).store._catalog.epoch == Member(tmp_path).store._catalog.epoch
