"""What the router remembers of the workers' caches."""

from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool import BlockPool, PoolExhaustedError
from protocol.events import Cleared, Removed, Stored
from protocol.hashing import hash_seed, sequence_hashes
from protocol.ids import EngineHash, WorkerId
from router.index import Holder, PrefixIndex

BLOCK = 4
A, A1, B = Holder(WorkerId("a"), 0), Holder(WorkerId("a"), 1), Holder(WorkerId("b"), 0)
TOKENS = tuple(range(100, 120))  # 5 blocks
CHAIN = sequence_hashes(TOKENS, BLOCK)


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


def removed(*names: int) -> Removed:
    return Removed(tuple(EngineHash(n) for n in names))


def test_a_prompt_matches_as_far_as_a_worker_holds_it() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 3)])
    index.apply(B, [stored(0, 1)])
    assert index.match(CHAIN) == {A: 3, B: 1}
    assert index.match(CHAIN[:2]) == {A: 2, B: 1}
    assert index.match([]) == {}
    assert index.match(sequence_hashes(TOKENS[BLOCK:], BLOCK)) == {}, "the same blocks, but after another prefix"


def test_blocks_may_come_one_by_one() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(i, i + 1) for i in range(5)])
    assert index.match(CHAIN) == {A: 5}


def test_workers_may_call_equal_blocks_differently_and_other_blocks_equally() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 3)])
    index.apply(B, [stored(0, 2, names=500), Stored((EngineHash(1),), None, (9, 9, 9, 9), BLOCK)])
    assert index.match(CHAIN) == {A: 3, B: 2}
    index.apply(B, [removed(1)])
    assert index.match(CHAIN) == {A: 3, B: 2}


def test_ranks_of_a_worker_are_caches_of_their_own() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 2)])
    index.apply(A1, [stored(0, 4)])
    assert index.match(CHAIN) == {A: 2, A1: 4}
    index.drop_worker(WorkerId("a"))
    assert index.match(CHAIN) == {}
    assert index.num_blocks == 0


def test_a_removed_block_ends_the_prefix_there() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 5), removed(2)])
    assert index.match(CHAIN) == {A: 2}
    index.apply(A, [stored(2, 3)])
    assert index.match(CHAIN) == {A: 5}, "blocks 3 and 4 were never removed"


def test_what_is_not_known_cannot_be_removed_nor_continued() -> None:
    index = PrefixIndex()
    index.apply(A, [removed(7), stored(3, 5)])
    assert (index.stats.unknown_removals, index.stats.orphan_blocks) == (1, 2)
    assert index.num_blocks == 0


def test_cleared_forgets_one_cache() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 3)])
    index.apply(B, [stored(0, 3)])
    index.apply(A, [Cleared()])
    assert index.match(CHAIN) == {B: 3}
    assert index.blocks_of(A) == 0


def test_adapters_and_tenants_have_prefixes_of_their_own() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 3, salt="tenant")])
    index.apply(B, [stored(0, 2, lora="adapter")])
    assert index.match(CHAIN) == {}
    assert index.match(sequence_hashes(TOKENS, BLOCK, hash_seed(None, "tenant"))) == {A: 3}
    assert index.match(sequence_hashes(TOKENS, BLOCK, hash_seed("adapter", None))) == {B: 2}


def test_a_prefix_with_two_names_is_there_until_both_are_gone() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 2), stored(0, 2, names=50)])
    assert index.blocks_of(A) == 2
    index.apply(A, [removed(0, 1)])
    assert index.match(CHAIN) == {A: 2}
    index.apply(A, [removed(50, 51)])
    assert index.match(CHAIN) == {}
    assert index.num_blocks == 0


def test_a_name_that_comes_to_mean_another_block_leaves_the_old_one() -> None:
    index = PrefixIndex()
    index.apply(A, [stored(0, 1)])
    index.apply(A, [Stored((EngineHash(0),), None, (1, 2, 3, 4), BLOCK)])
    assert index.match(CHAIN) == {}
    assert index.match(sequence_hashes((1, 2, 3, 4), BLOCK)) == {A: 1}
    assert index.num_blocks == 1


def test_one_worker_cannot_fill_the_memory() -> None:
    index = PrefixIndex(max_blocks=3)
    index.apply(A, [stored(0, 2), stored(2, 5)])
    assert index.blocks_of(A) == 2
    assert index.stats.refused_blocks == 3
    index.apply(B, [stored(0, 3)])
    assert index.blocks_of(B) == 3, "the limit is each worker's own"


def test_an_event_with_fewer_tokens_than_blocks_counts_what_it_has() -> None:
    index = PrefixIndex()
    index.apply(A, [Stored((EngineHash(0), EngineHash(1)), None, TOKENS[:BLOCK], BLOCK)])
    assert index.match(CHAIN) == {A: 1}


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(lambda p: [t for n in p for t in (n, n)])


@given(st.lists(prompts, max_size=30), st.integers(1, 12))
def test_following_a_pools_events_gives_what_the_pool_holds(wanted: list[list[int]], num_blocks: int) -> None:
    """Through reuse, merging and eviction: for every prompt the index says what the pool would match."""
    pool, index, block_size = BlockPool(num_blocks, 2), PrefixIndex(), 2
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
            assert index.match(chain).get(A, 0) == pool.peek(chain)
    again = PrefixIndex()
    again.apply(A, pool.snapshot())
    assert again.content(A) == index.content(A)
    index.drop(A)
    assert (index.num_blocks, index._held) == (0, {})
