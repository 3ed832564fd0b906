"""The index tracks the workers' caches. Every test runs with both implementations."""

import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvmesh.kvcache.pool import BlockPool, PoolExhaustedError
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, Digest, Removed, Stored
from kvmesh.protocol.hashing import digest_term, hash_seed, pack_hashes, sequence_hashes, token_bytes
from kvmesh.protocol.ids import EngineHash, SequenceHash, WorkerId
from kvmesh.protocol.tiers import Tier, tier_of
from kvmesh.router import index as index_module
from kvmesh.router.index import Holder, PlainIndex
from tests.support.implementations import INDEXES

NewIndex = Callable[..., PlainIndex]

BLOCK = 4
A, A1, B, C = (Holder(WorkerId(w), rank) for w, rank in [("a", 0), ("a", 1), ("b", 0), ("c", 0)])
TOKENS = tuple(range(100, 120))  # 5 blocks
CHAIN = sequence_hashes(TOKENS, BLOCK)
PROMPT = pack_hashes(CHAIN)

both = pytest.mark.parametrize("new_index", INDEXES)


def stored(first: int, last: int, names: int = 0, parent: int | None = None, **fields: str) -> Stored:
    """Blocks [first, last) of TOKENS; the engine calls block i `names + i`."""
    if parent is None and first:
        parent = names + first - 1
    return Stored(
        hashes=tuple(EngineHash(names + i) for i in range(first, last)),
        parent=None if parent is None else EngineHash(parent),
        token_ids=TOKENS[first * BLOCK : last * BLOCK],
        block_size=BLOCK,
        **fields,
    )


def removed(*names: int, medium: str = "GPU") -> Removed:
    return Removed(tuple(EngineHash(n) for n in names), medium)


def one_block(index: PlainIndex, holder: Holder, name: int, parent: int | None, token: int) -> None:
    index.store(holder, array("Q", [name]), parent, array("I", [token]), 1)


def store_chain(index: PlainIndex, holder: Holder, tokens: Sequence[int], names: int = 0) -> None:
    """Blocks of one token, named `names`, `names + 1`, ..."""
    index.store(holder, array("Q", range(names, names + len(tokens))), None, array("I", tokens), 1)


def found(index: PlainIndex, tokens: Sequence[int], block_size: int = 1) -> dict[Holder, int]:
    """Leading blocks of a prompt per holder, in any tier."""
    matched = index.match(pack_hashes(sequence_hashes(tokens, block_size)))
    return {holder: depths[-1] for holder, depths in matched.items()}


# --- prefixes ---------------------------------------------------------------------------------------------


@both
def test_a_prompt_matches_as_far_as_a_worker_holds_it(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 3)])
    index.apply(B, [stored(0, 1)])
    assert index.match(PROMPT) == {A: (3, 3, 3, 3), B: (1, 1, 1, 1)}
    assert index.match(PROMPT[:16]) == {A: (2, 2, 2, 2), B: (1, 1, 1, 1)}
    assert index.match(b"") == {}
    assert found(index, TOKENS[BLOCK:], BLOCK) == {}, "the same blocks, but after another prefix"


@both
def test_blocks_may_come_one_by_one(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(i, i + 1) for i in range(5)])
    assert found(index, TOKENS, BLOCK) == {A: 5}


@both
def test_workers_may_call_equal_blocks_differently_and_other_blocks_equally(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 3)])
    index.apply(B, [stored(0, 2, names=500), Stored((EngineHash(1),), None, (9, 9, 9, 9), BLOCK)])
    assert found(index, TOKENS, BLOCK) == {A: 3, B: 2}
    index.apply(B, [removed(1)])
    assert found(index, TOKENS, BLOCK) == {A: 3, B: 2}


@both
def test_ranks_of_a_worker_are_caches_of_their_own(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 2)])
    index.apply(A1, [stored(0, 4)])
    index.apply(B, [stored(0, 1)])
    assert found(index, TOKENS, BLOCK) == {A: 2, A1: 4, B: 1}
    assert index.holders == (A, A1, B)
    index.drop_worker(WorkerId("a"))
    assert found(index, TOKENS, BLOCK) == {B: 1}
    assert (index.num_blocks, index.num_entries, index.holders) == (1, 1, (B,))


@both
def test_adapters_and_tenants_have_prefixes_of_their_own(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 3, salt="tenant")])
    index.apply(B, [stored(0, 2, lora="adapter")])
    assert found(index, TOKENS, BLOCK) == {}
    for salt, lora, holder, blocks in (("tenant", None, A, 3), (None, "adapter", B, 2)):
        prompt = sequence_hashes(TOKENS, BLOCK, hash_seed(lora, salt))
        assert index.match(pack_hashes(prompt)) == {holder: (blocks,) * 4}


@both
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 64, 100, 257])
def test_of_many_holders_each_is_found_with_its_own_length(new_index: NewIndex, num_blocks: int) -> None:
    index = new_index()
    holders = [Holder(WorkerId(f"w{i}"), 0) for i in range(40)]
    tokens = range(num_blocks)
    want = {holder: 1 + i * 31 % num_blocks for i, holder in enumerate(holders)}
    for holder, blocks in want.items():
        store_chain(index, holder, tokens[:blocks])
    assert found(index, tokens) == want
    assert found(index, [*tokens[: num_blocks // 2], 999]) == {
        holder: min(blocks, num_blocks // 2) for holder, blocks in want.items() if num_blocks > 1
    }


# --- removal ----------------------------------------------------------------------------------------------


@both
def test_a_removed_block_ends_the_prefix_until_it_returns(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 5), removed(2)])
    assert found(index, TOKENS, BLOCK) == {A: 2}
    index.apply(A, [stored(2, 3)])
    assert found(index, TOKENS, BLOCK) == {A: 5}, "blocks 3 and 4 were never removed"


@both
def test_blocks_after_a_missing_one_are_kept_and_removable(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 5), removed(0, 1, 2)])
    assert found(index, TOKENS, BLOCK) == {}
    assert (index.num_blocks, index.blocks_of(A)) == (2, 2)
    index.apply(B, [stored(0, 4)])
    assert found(index, TOKENS, BLOCK) == {B: 4}
    index.apply(A, [stored(0, 3)])
    assert found(index, TOKENS, BLOCK) == {A: 5, B: 4}
    index.apply(A, [removed(1), removed(4, 3, 2, 0)])
    index.drop(B)
    assert (index.num_blocks, index.num_entries, index.holders) == (0, 0, ())


@both
@pytest.mark.parametrize("num_children", [1, 2, 3, 5, 40])
def test_gaps_above_a_fork_open_and_close(new_index: NewIndex, num_children: int) -> None:
    index = new_index()
    for holder in (A, B):
        one_block(index, holder, 1, None, 7)
        for i in range(num_children):
            one_block(index, holder, 100 + i, 1, i)
    index.remove(A, array("Q", [1]))
    for i in range(num_children):
        assert found(index, [7, i]) == {B: 2}
    index.remove(A, array("Q", [100]))
    one_block(index, A, 2, None, 7)
    assert found(index, [7, 0]) == {A: 1, B: 2}
    assert found(index, [7, num_children - 1]) == {A: 2 if num_children > 1 else 1, B: 2}
    for i in range(num_children):
        index.remove(B, array("Q", [100 + i]))
        assert found(index, [7, i])[B] == 1
    index.drop(A)
    index.drop(B)
    assert index.num_blocks == 0


@both
def test_what_is_not_known_cannot_be_removed_nor_continued(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [removed(7), stored(3, 5)])
    assert (index.stats.unknown_removals, index.stats.orphan_blocks) == (1, 2)
    index.apply(A, [stored(0, 2), removed(0, 0), removed(1, medium="CPU")])
    assert index.stats.unknown_removals == 3
    assert index.content(A) == {(CHAIN[1], Tier.DEVICE)}


@both
def test_cleared_forgets_one_cache(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 3), stored(0, 3, names=50)])
    index.apply(A1, [stored(0, 3)])
    index.apply(A, [Cleared(), Cleared()])
    assert found(index, TOKENS, BLOCK) == {A1: 3}
    assert (index.blocks_of(A), index.stats.cleared_blocks) == (0, 3)
    index.apply(A, [stored(0, 1)])
    assert found(index, TOKENS, BLOCK) == {A: 1, A1: 3}


# --- names ------------------------------------------------------------------------------------------------


@both
def test_a_prefix_with_two_names_needs_both_removed(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 2), stored(0, 2, names=50)])
    assert (index.blocks_of(A), index.num_entries) == (2, 4)
    index.apply(A, [removed(0, 1)])
    assert found(index, TOKENS, BLOCK) == {A: 2}
    index.apply(A, [removed(50, 51)])
    assert found(index, TOKENS, BLOCK) == {}
    assert index.num_blocks == 0


@both
def test_a_renamed_block_leaves_its_old_prefix(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 1), stored(0, 1, medium="CPU")])
    index.apply(A, [Stored((EngineHash(0),), None, (1, 2, 3, 4), BLOCK)])
    assert index.content(A) == {(SequenceHash(sequence_hashes((1, 2, 3, 4), BLOCK)[0]), Tier.DEVICE)}
    assert (index.num_blocks, index.stats.renamed_blocks) == (1, 1)


@both
def test_a_name_may_come_to_mean_the_block_before_it(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 2), removed(0)])
    index.store(A, array("Q", [1]), None, array("I", TOKENS[:BLOCK]), BLOCK)
    assert found(index, TOKENS, BLOCK) == {A: 1}
    assert (index.num_blocks, index.stats.renamed_blocks) == (1, 1)


@both
def test_a_block_stored_again_changes_nothing(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 3)])
    before = index.dump()
    index.apply(A, [stored(0, 3), stored(1, 2)])
    assert index.dump() == before
    assert (index.stats.stored_blocks, index.stats.duplicate_blocks) == (3, 4)


@both
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(Stored((EngineHash(5), EngineHash(6)), None, TOKENS[:BLOCK], BLOCK), id="too few tokens"),
        pytest.param(Stored((EngineHash(5),), None, TOKENS[: 2 * BLOCK], BLOCK), id="too many tokens"),
        pytest.param(Stored((EngineHash(5),), None, TOKENS[:BLOCK], 0), id="blocks of nothing"),
        pytest.param(Stored((EngineHash(5),), None, TOKENS[:BLOCK], -4), id="blocks of less"),
        pytest.param(Stored((EngineHash(5), EngineHash(5)), None, TOKENS[: 2 * BLOCK], BLOCK), id="a name twice"),
        pytest.param(Stored((EngineHash(9), EngineHash(0)), EngineHash(0), TOKENS[: 2 * BLOCK], BLOCK), id="its own"),
    ],
)
def test_an_event_that_contradicts_itself_is_dropped_whole(new_index: NewIndex, event: Stored) -> None:
    index = new_index()
    index.apply(A, [stored(0, 1)])
    before = index.dump()
    index.apply(A, [event])
    assert index.dump() == before
    assert index.stats.malformed_blocks == len(event.hashes)


@both
def test_a_repeated_name_is_found_in_a_long_event(new_index: NewIndex) -> None:
    for count in (200, 3000):
        index = new_index()
        names = array("Q", range(count))
        names[count - 1] = 7
        index.store(A, names, None, array("I", range(count)), 1)
        assert (index.num_entries, index.stats.malformed_blocks) == (0, count)


@both
def test_the_extra_token_of_a_speculating_engine_is_ignored(new_index: NewIndex) -> None:
    index = new_index()
    index.store(A, array("Q", [0, 1]), None, array("I", TOKENS[: 2 * BLOCK + 1]), BLOCK)
    assert found(index, TOKENS, BLOCK) == {A: 2}


# --- tiers ------------------------------------------------------------------------------------------------


@both
def test_depths_count_each_tier_and_all_faster_ones(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 1), stored(1, 3, medium="CPU"), stored(3, 4, medium="DISK"), stored(4, 5, medium="S3")])
    index.apply(B, [stored(0, 4, medium="CPU"), stored(0, 2)])
    assert index.match(PROMPT) == {A: (1, 3, 4, 5), B: (2, 4, 4, 4)}
    index.apply(A, [removed(1, medium="CPU")])
    assert index.match(PROMPT) == {A: (1, 1, 1, 1), B: (2, 4, 4, 4)}
    index.apply(B, [removed(0)])
    assert index.match(PROMPT)[B] == (0, 4, 4, 4), "block 1 is on the device, but not what precedes it"
    index.apply(B, [stored(0, 1)])
    assert index.match(PROMPT)[B] == (2, 4, 4, 4)


@both
def test_a_gap_in_one_tier_ends_the_prefix_there_only(new_index: NewIndex) -> None:
    index = new_index()
    index.store(A, array("Q", range(9)), None, array("I", range(9)), 1)
    index.store(A, array("Q", range(9)), None, array("I", range(9)), 1, tier=Tier.DISK)
    index.remove(A, array("Q", [2]))
    prompt = pack_hashes(sequence_hashes(range(9), 1))
    assert index.match(prompt) == {A: (2, 2, 9, 9)}
    index.store(A, array("Q", [2]), None, b"", 1, tier=Tier.HOST)
    assert index.match(prompt) == {A: (2, 9, 9, 9)}
    index.store(A, array("Q", [2]), None, b"", 1)
    assert index.match(prompt) == {A: (9, 9, 9, 9)}


@both
def test_a_block_in_two_tiers_must_leave_both(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 2), stored(0, 2, medium="CPU")])
    assert (index.blocks_of(A), index.num_entries, index.digest(A).blocks) == (2, 2, 4)
    index.apply(A, [removed(1)])
    assert index.match(PROMPT) == {A: (1, 2, 2, 2)}
    index.apply(A, [removed(0, 1, medium="CPU")])
    assert index.content(A) == {(CHAIN[0], Tier.DEVICE)}


@both
def test_known_blocks_come_to_another_tier_without_their_tokens(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 3)])
    index.store(A, array("Q", [0, 2, 99]), 55, b"", BLOCK, tier=Tier.HOST)
    index.store(A, array("Q", [0]), None, b"", BLOCK, tier=Tier.HOST)
    assert index.content(A) == {(prefix, Tier.DEVICE) for prefix in CHAIN[:3]} | {
        (prefix, Tier.HOST) for prefix in (CHAIN[0], CHAIN[2])
    }
    assert (index.stats.orphan_blocks, index.stats.duplicate_blocks) == (1, 1)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("", Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("cpu", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("disk", Tier.DISK),
        ("NVMe", Tier.DISK),
        ("S3", Tier.SHARED),
        ("whatever", Tier.SHARED),
    ],
)
def test_the_engines_words_for_tiers(medium: str | None, tier: Tier) -> None:
    assert tier_of(medium) is tier


# --- limits -----------------------------------------------------------------------------------------------


@both
def test_one_worker_cannot_fill_the_memory(new_index: NewIndex) -> None:
    index = new_index(max_entries_per_holder=3)
    store_chain(index, A, [1, 2, 3, 4])
    assert (index.num_entries, index.stats.refused_blocks) == (0, 4)
    store_chain(index, A, [1, 2], names=10)
    store_chain(index, A, [5, 6], names=20)
    assert found(index, [5, 6]) == {A: 2}
    assert found(index, [1, 2]) == {A: 1}, "the oldest branch was cut, at its end"
    assert index.stats.evicted_blocks == 1
    store_chain(index, B, [1, 2, 3])
    assert index.blocks_of(B) == 3, "the limit is each worker's own"


@both
def test_the_largest_holder_makes_room_its_shared_prefix_last(new_index: NewIndex) -> None:
    index = new_index(max_entries=24)
    store_chain(index, B, range(100, 104), names=100)
    store_chain(index, A, [0, 1, 2, 3])
    for branch in range(4):
        index.store(A, array("Q", range(10 * branch + 10, 10 * branch + 14)), 1, array("I", [50 + branch] * 4), 1)
    assert index.num_entries == 24
    store_chain(index, C, [5], names=5)
    assert found(index, range(100, 104)) == {B: 4}
    assert found(index, [0, 1, 2, 3]) == {A: 2}, "the branch that has not grown for longest"
    for branch in range(4):
        assert found(index, [0, 1, *[50 + branch] * 4]) == {A: 6}
    assert (index.num_entries, index.stats.evicted_blocks) == (23, 2)


@both
def test_what_is_evicted_leaves_whole_prefixes(new_index: NewIndex) -> None:
    index = new_index(max_entries=50)
    for start in range(0, 300, 3):
        store_chain(index, A if start % 2 else B, [start % 7, start, start + 1], names=start)
        for holder in index.holders:
            prefixes = {prefix for prefix, _ in index.content(holder)}
            for first in range(0, start + 1, 3):
                chain = sequence_hashes([first % 7, first, first + 1], 1)
                held = [prefix in prefixes for prefix in chain]
                assert held == sorted(held, reverse=True)
        assert index.num_entries <= 50
    assert index.stats.evicted_blocks > 0


@both
def test_prefixes_kept_for_what_follows_them_count_for_the_limit(new_index: NewIndex) -> None:
    index = new_index(max_entries=10)
    store_chain(index, A, range(10))
    index.remove(A, array("Q", range(9)))
    assert (index.num_entries, index.num_blocks) == (1, 1)
    store_chain(index, B, [50, 51])
    assert (index.holders, index.num_entries) == ((B,), 2), "the last of the chain had to go, and nine with it"


@both
def test_a_chain_whose_parent_was_evicted_is_an_orphan(new_index: NewIndex) -> None:
    index = new_index(max_entries=4)
    store_chain(index, A, range(4))
    index.store(A, array("Q", [4, 5]), 3, array("I", [4, 5]), 1)
    assert index.stats.orphan_blocks == 2
    assert found(index, range(6)) == {A: 2}


@both
def test_there_is_a_largest_number_of_holders(new_index: NewIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    if new_index is PlainIndex:
        monkeypatch.setattr(index_module, "MAX_HOLDERS", 100)  # so many sets would take seconds
    index = new_index()
    for number in range(index_module.MAX_HOLDERS):
        store_chain(index, Holder(WorkerId("w"), number), [1])
    store_chain(index, A, [1, 2])
    assert (index.blocks_of(A), index.stats.refused_blocks) == (0, 2)
    index.drop(Holder(WorkerId("w"), 7))
    store_chain(index, A, [1, 2])
    assert index.blocks_of(A) == 2


@both
@pytest.mark.parametrize("limits", [(-1, 5), (5, -1), (1 << 28, 5)])
def test_limits_that_cannot_be_kept_are_refused(new_index: NewIndex, limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"a limit of -?\d+ entries; from 0 to 268435448"):
        new_index(*limits)


# --- arguments --------------------------------------------------------------------------------------------


@both
def test_integers_come_in_whatever_buffer(new_index: NewIndex) -> None:
    names, tokens = [2**64 - 1, 7], [1, 2**32 - 1]
    prompt = sequence_hashes(tokens, 1)
    for u64, u32 in (
        (lambda numbers: array("Q", numbers), lambda numbers: array("I", numbers)),
        (lambda numbers: np.array(numbers, np.uint64), lambda numbers: np.array(numbers, np.uint32)),
        (pack_hashes, token_bytes),
        (lambda numbers: bytearray(pack_hashes(numbers)), lambda numbers: memoryview(token_bytes(numbers))),
        (lambda numbers: memoryview(b"1" + pack_hashes(numbers))[1:], lambda numbers: b"" + token_bytes(numbers)),
    ):
        index = new_index()
        index.store(A, u64(names), None, u32(tokens), 1)
        assert index.match(u64(prompt)) == {A: (2, 2, 2, 2)}
        index.remove(A, u64(names[1:]))
        assert index.match(u64(prompt)) == {A: (1, 1, 1, 1)}


@both
def test_what_is_no_such_integer_is_refused_and_nothing_happens(new_index: NewIndex) -> None:
    index = new_index()
    with pytest.raises(ValueError, match=r"12 bytes in items of 4 .*integers of 8 bytes; pass array\('Q'\)"):
        index.match(array("I", [1, 2, 3]))
    with pytest.raises(ValueError, match="integers of 4 bytes"):
        index.store(A, array("Q", [1]), None, np.array([1], np.int64), 1)
    with pytest.raises(ValueError, match="integers of 8 bytes"):
        index.remove(A, b"1234567")
    with pytest.raises(ValueError, match="contiguous"):
        index.match(np.arange(8, dtype=np.uint64)[::2])
    with pytest.raises(TypeError):
        index.match([1, 2])
    assert index.num_entries == 0


# --- digests ----------------------------------------------------------------------------------------------


@both
def test_equal_caches_have_equal_digests_however_they_came_about(new_index: NewIndex) -> None:
    index = new_index()
    index.apply(A, [stored(0, 5), removed(4, 3), stored(0, 2, medium="CPU")])
    index.apply(B, [stored(0, 2, names=70, medium="CPU"), stored(0, 3, names=7), stored(0, 3, names=20)])
    assert index.digest(A) == index.digest(B) != Digest(0, 0)
    terms = [digest_term(prefix) for prefix in CHAIN[:3]] + [digest_term(prefix, Tier.HOST) for prefix in CHAIN[:2]]
    assert index.digest(A) == Digest(5, sum(terms) % 2**64)
    index.apply(B, [removed(7), stored(0, 1, names=7), removed(70, medium="CPU")])
    assert index.digest(A) != index.digest(B)
    assert index.digest(C) == Digest(0, 0)


# --- snapshots --------------------------------------------------------------------------------------------


def filled(new_index: NewIndex) -> PlainIndex:
    index = new_index()
    index.apply(A, [stored(0, 5), stored(0, 2, names=50), stored(0, 1, medium="CPU"), removed(2)])
    index.apply(Holder(WorkerId("größer"), 3), [stored(0, 2, names=2**63)])
    index.apply(B, [stored(0, 3), removed(0, 1)])
    return index


@pytest.mark.parametrize("read", INDEXES)
@pytest.mark.parametrize("written", INDEXES)
def test_a_snapshot_brings_everything_back_in_either_implementation(written: NewIndex, read: NewIndex) -> None:
    source, index = filled(written), read()
    index.apply(C, [stored(0, 5)])
    index.load(source.dump())
    assert index.holders == source.holders
    assert index.match(PROMPT) == source.match(PROMPT)
    assert (index.num_blocks, index.num_entries) == (source.num_blocks, source.num_entries)
    for holder in source.holders:
        assert index.digest(holder) == source.digest(holder)
        assert index.content(holder) == source.content(holder)
    for same in (source, index):  # the names are there too
        same.apply(A, [removed(0, 1), stored(2, 3), stored(1, 2, names=700, parent=50)])
        same.apply(B, [stored(3, 5)])
    assert index.match(PROMPT) == source.match(PROMPT)
    index.load(written().dump())
    assert (index.num_blocks, index.holders) == (0, ())


def resealed(body: bytes) -> bytes:
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


@both
def test_what_is_no_snapshot_is_refused_and_nothing_changes(new_index: NewIndex) -> None:
    index = filled(new_index)
    before = index.dump()
    body = before[:-8]
    header, nodes, parents = body[:24], body[24:64], body[64:84]
    holders = body[84:]
    assert header[16:] == (5).to_bytes(8, "little"), "prefixes"
    for wrong in (
        b"",
        b"kvprefix",
        before[:-1],
        before + b"\0",
        bytes([before[0] ^ 1]) + before[1:],
        before[:60] + bytes([before[60] ^ 1]) + before[61:],
        resealed(body[:8] + b"\2" + body[9:]),
        resealed(body[:-1]),
        resealed(body + b"\0"),
        resealed(header + nodes + (3).to_bytes(4, "little") + parents[4:] + holders),
        resealed(header + nodes[:32] + nodes[:8] + parents + holders),
        resealed(header[:16] + (6).to_bytes(8, "little") + nodes + b"12345678" + parents + b"\xff" * 4 + holders),
        resealed(header[:12] + (6).to_bytes(4, "little") + header[16:] + nodes + parents + holders + holders),
    ):
        with pytest.raises(WireError, match="no snapshot of an index"):
            index.load(wrong)
        assert index.dump() == before


@both
@given(st.data())
def test_a_snapshot_that_was_tampered_with_is_refused_or_sound(new_index: NewIndex, data: st.DataObject) -> None:
    body = bytearray(filled(new_index).dump()[:-8])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    results = []
    for read in (new_index, PlainIndex):
        index = read()
        try:
            index.load(resealed(bytes(body)))
        except WireError:
            assert index.num_entries == 0
            results.append(None)
        else:
            results.append((index.num_blocks, [(holder, index.digest(holder)) for holder in index.holders]))
            for holder in index.holders:
                index.drop(holder)
            assert index.num_blocks == 0
    assert results[0] == results[1]


@both
def test_a_snapshot_over_the_limits_is_refused(new_index: NewIndex) -> None:
    data = filled(new_index).dump()
    new_index(max_entries=9, max_entries_per_holder=6).load(data)
    for limits in ((8, 100), (100, 5), (0, 0)):
        with pytest.raises(WireError, match="no snapshot"):
            new_index(*limits).load(data)


# --- with a pool ------------------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(lambda p: [t for n in p for t in (n, n)])


@both
@given(st.lists(prompts, max_size=30), st.integers(1, 12))
def test_following_a_pools_events_gives_what_the_pool_holds(
    new_index: NewIndex, wanted: list[list[int]], num_blocks: int
) -> None:
    """Through reuse, merging and eviction: for every prompt the index says what the pool would match."""
    pool, index, block_size = BlockPool(num_blocks, 2), new_index(), 2
    for prompt in wanted:
        names = sequence_hashes(prompt, block_size)
        table = pool.match(names)
        try:
            fresh = pool.allocate(len(names) - len(table))
        except PoolExhaustedError:
            pool.release(table)
            continue
        done = len(table)
        table += fresh
        for i in range(done, len(names)):
            tokens = prompt[i * block_size : (i + 1) * block_size]
            table[i] = pool.commit(table[i], names[i], table[i - 1] if i else None, tokens)
        pool.release(table)
        index.apply(A, pool.take_events())
        for other in wanted:
            chain = sequence_hashes(other, block_size)
            assert found(index, other, block_size).get(A, 0) == pool.peek(chain)
        assert index.digest(A) == pool.digest
    again = new_index()
    again.apply(A, pool.snapshot())
    assert again.content(A) == index.content(A)
    index.drop(A)
    assert (index.num_blocks, index.holders) == (0, ())


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_plain_python_can_be_asked_for(wanted: str) -> None:
    code = (
        "from kvmesh.router import chains, index; "
        "print(index.PrefixIndex.__name__, index.NATIVE, chains.ChainCounts.__name__)"
    )
    environment = {"KVMESH_NATIVE": wanted, "PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    native = wanted == "1" and find_spec("kvmesh.router._native") is not None
    assert out.split() == (
        ["NativeIndex", "True", "ChainCounts"] if native else ["PlainIndex", "False", "PlainChainCounts"]
    )
