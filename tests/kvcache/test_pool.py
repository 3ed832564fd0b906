"""Test which blocks are shared, kept and evicted, and what the pool announces."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.kvcache.pool import BlockPool, PoolExhaustedError, PoolJournal
from kvmesh.protocol.events import Cleared, Digest, Removed, Stored
from kvmesh.protocol.hashing import digest_term, sequence_hashes
from tests.support.budget import examples

BLOCK = 2


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Run a prompt through the pool as an engine does: match, allocate, commit."""
    hashes = sequence_hashes(tokens, pool.block_size)
    table = pool.match(hashes)
    try:
        table += pool.allocate(-(-len(tokens) // pool.block_size) - len(table))
    except PoolExhaustedError:
        pool.release(table)
        raise
    for i, name in enumerate(hashes):
        chunk = tokens[i * pool.block_size : (i + 1) * pool.block_size]
        table[i] = pool.commit(table[i], name, table[i - 1] if i else None, chunk)
    return table


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(8, BLOCK)
    first = fill(pool, [1, 2, 3, 4, 5])
    pool.release(first)
    assert pool.match(sequence_hashes([1, 2, 3, 4, 9, 9], BLOCK)) == first[:2]


def test_a_partly_filled_block_is_never_shared() -> None:
    pool = BlockPool(8, BLOCK)
    pool.release(fill(pool, [1, 2, 3]))
    assert (pool.cached_blocks, pool.available_blocks) == (1, 8)


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = BlockPool(4, BLOCK)
    pool.release(fill(pool, [1, 1, 2, 2]))  # parent and leaf
    pool.release(fill(pool, [5, 5]))
    pool.release(fill(pool, [1, 1, 2, 2]))  # used again: now younger than [5, 5]
    pool.release(pool.allocate(2))  # one is free, one must be evicted
    assert pool.peek(sequence_hashes([5, 5], BLOCK)) == 0
    assert pool.peek(sequence_hashes([1, 1, 2, 2], BLOCK)) == 2


def test_a_parent_outlives_its_child() -> None:
    pool = BlockPool(2, BLOCK)
    pool.release(fill(pool, [1, 1, 2, 2]))
    pool.release(pool.allocate(1))
    assert pool.peek(sequence_hashes([1, 1, 2, 2], BLOCK)) == 1


def test_the_same_prefix_computed_twice_is_kept_once() -> None:
    pool = BlockPool(4, BLOCK)
    a, b = pool.allocate(1), pool.allocate(1)
    [name] = sequence_hashes([7, 7], BLOCK)
    assert pool.commit(a[0], name, None, [7, 7]) == a[0]
    assert pool.commit(b[0], name, None, [7, 7]) == a[0]
    assert pool.held_blocks == 1


def test_more_than_there_is_takes_nothing() -> None:
    pool = BlockPool(3, BLOCK)
    held = pool.allocate(2)
    with pytest.raises(PoolExhaustedError, match="2 blocks wanted, 1 of 3 left"):
        pool.allocate(2)
    pool.release(held)
    assert pool.available_blocks == 3


def test_a_double_release_is_refused() -> None:
    pool = BlockPool(2, BLOCK)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(ValueError, match="more often"):
        pool.release(held)


def test_a_chain_is_one_event_and_is_evicted_leaf_first() -> None:
    pool = BlockPool(3, BLOCK)
    pool.release(fill(pool, [1, 1, 2, 2, 3, 3]))
    names = tuple(sequence_hashes([1, 1, 2, 2, 3, 3], BLOCK))
    assert pool.take_events() == [Stored(names, None, (1, 1, 2, 2, 3, 3), BLOCK)]
    pool.release(pool.allocate(2))
    assert pool.take_events() == [Removed((names[2], names[1]))]


def test_after_a_clear_in_mid_sequence_the_rest_stays_private() -> None:
    pool = BlockPool(4, BLOCK)
    table = fill(pool, [1, 1])
    pool.clear()
    table += pool.allocate(1)
    names = sequence_hashes([1, 1, 2, 2], BLOCK)
    assert pool.commit(table[1], names[1], table[0], [2, 2]) == table[1]
    assert pool.take_events()[-1] == Cleared()
    pool.release(table)
    assert (pool.cached_blocks, pool.available_blocks) == (0, 4)


def digest_of(names: Iterable[int]) -> Digest:
    terms = [digest_term(name) for name in names]
    return Digest(len(terms), sum(terms) % 2**64)


def test_the_digest_is_that_of_what_is_shared() -> None:
    pool = BlockPool(3, BLOCK)
    names = sequence_hashes([1, 1, 2, 2, 3, 3], BLOCK)
    assert pool.digest == Digest(0, 0)
    table = fill(pool, [1, 1, 2, 2, 3, 3])
    assert pool.digest == digest_of(names)
    pool.release(table)
    pool.release(pool.allocate(2))
    assert pool.digest == digest_of(names[:1])
    pool.clear()
    assert pool.digest == Digest(0, 0)


def test_the_digest_ignores_order_and_duplicates() -> None:
    one, other = BlockPool(8, BLOCK), BlockPool(8, BLOCK)
    for pool, prompts in ((one, ([1, 1, 2, 2], [3, 3])), (other, ([3, 3], [1, 1, 2, 2], [3, 3]))):
        for prompt in prompts:
            fill(pool, prompt)
    a = other.allocate(1)
    other.commit(a[0], sequence_hashes([3, 3], BLOCK)[0], None, [3, 3])
    assert one.digest == other.digest


def replay(events: list) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """A follower of the events, which keeps hash -> (parent, tokens)."""
    held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for event in events:
        match event:
            case Stored():
                parent = event.parent
                for i, name in enumerate(event.hashes):
                    assert parent is None or parent in held, "a child was announced before its parent"
                    held[name] = (parent, event.token_ids[i * BLOCK : (i + 1) * BLOCK])
                    parent = name
            case Removed():
                for name in event.hashes:
                    del held[name]
                    assert all(p != name for p, _ in held.values()), "a parent went before its child"
            case Cleared():
                held.clear()
    return held


class PoolMachine(RuleBasedStateMachine):
    """Random prompts come and go on a small pool; a follower of the events must always be right."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, BLOCK)
        self.tables: list[list[int]] = []
        self.events: list = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def prompt(self, tokens: list[int]) -> None:
        before = self.pool.available_blocks
        try:
            self.tables.append(fill(self.pool, tokens))
        except PoolExhaustedError:
            assert self.pool.available_blocks == before

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.acquire(table)
        self.tables.append(list(table))

    @rule()
    def take_all(self) -> None:
        """Check that `allocate` can give `available_blocks`."""
        self.pool.release(self.pool.allocate(self.pool.available_blocks))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def blocks_are_counted_right(self) -> None:
        assert self.pool.held_blocks == len({b for table in self.tables for b in table})

    @invariant()
    def events_equal_content(self) -> None:
        self.events += self.pool.take_events()
        followed = replay(self.events)
        assert followed == replay(self.pool.snapshot())
        assert all(self.pool.peek([name]) == 1 for name in followed)
        assert self.pool.digest == digest_of(followed)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)


@pytest.mark.parametrize("seed", range(20))
def test_the_next_victims_are_those_that_are_evicted_next(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(24, BLOCK)
    held = []
    for _ in range(40):
        try:
            table = fill(pool, [rng.randrange(2) for _ in range(BLOCK * rng.randrange(1, 7))])
        except PoolExhaustedError:
            continue
        if rng.random() < 0.15:
            held.append(table)
        else:
            pool.release(table)
        if held and rng.random() < 0.3:
            pool.release(held.pop())
    expected = [block for block_id in pool.next_victims(24) if (block := pool.committed(block_id))]
    assert len(expected) == pool.cached_blocks
    pool.take_events()
    pool.journal = PoolJournal()
    pool.allocate(pool.available_blocks)
    assert pool.journal.evicted == [block.name for block in expected]
