"""One tier holds whole prefixes, evicts leaves only and says what it holds."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.protocol.events import Digest
from kvmesh.protocol.hashing import block_hashes, extend_chain
from kvmesh.protocol.ids import SequenceHash, WorkerId
from kvmesh.protocol.tiers import Tier
from kvmesh.router.index import Holder, PlainIndex
from tests.support.budget import examples

BLOCK = 2
HOLDER = Holder(WorkerId("w"), 0)


def chain(*numbers: int) -> list[TierBlock]:
    """Return the blocks of a prompt, each of two equal tokens."""
    tokens = [number for number in numbers for _ in range(BLOCK)]
    names = extend_chain(None, block_hashes(tokens, BLOCK))
    parents = [None, *names]
    return [
        TierBlock(name, parents[i], bytes(numbers[: i + 1]).ljust(32), (numbers[i],) * BLOCK)
        for i, name in enumerate(names)
    ]


class Fresh:
    """An index, and the addresses that it has dropped."""

    def __init__(self, max_blocks: int) -> None:
        self.dropped: list[bytes] = []
        self.index = TierIndex(Tier.HOST, max_blocks, BLOCK, self.dropped.append)

    def put(self, blocks: Sequence[TierBlock]) -> None:
        for block in blocks:
            if block.name not in self.index:
                assert self.index.admit(block)
                assert self.index.arrived(block)

    def has(self, *numbers: int) -> bool:
        return self.index.get(chain(*numbers)[-1].name) is not None


def test_the_least_recently_used_leaf_goes_first() -> None:
    tier = Fresh(3)
    tier.put(chain(1, 2))
    tier.put(chain(5))
    tier.index.touch(chain(1, 2)[-1].name)
    tier.put(chain(6))
    assert (tier.has(5), tier.has(1, 2), tier.has(6)) == (False, True, True)
    assert tier.dropped == [chain(5)[0].address]


def test_a_prefix_that_fills_the_tier_keeps_its_beginning() -> None:
    tier = Fresh(3)
    blocks = chain(1, 2, 3, 4)
    tier.put(blocks[:3])
    assert not tier.index.admit(blocks[3])
    assert len(tier.index) == tier.index.used_blocks == 3


def test_a_block_without_its_parent_is_not_taken() -> None:
    tier = Fresh(3)
    assert not tier.index.admit(chain(1, 2)[1])


def test_a_block_on_its_way_is_not_read_and_keeps_its_parent() -> None:
    tier = Fresh(2)
    one, two = chain(1, 2)
    tier.put([one])
    assert tier.index.admit(two)
    assert not tier.has(1, 2)
    assert not tier.index.admit(chain(9)[0]), "nothing can go"
    tier.index.lost(two)
    assert tier.index.admit(chain(9)[0]), "now its parent can"


def test_a_pinned_block_is_read_to_its_end() -> None:
    tier = Fresh(2)
    [one] = blocks = chain(1)
    tier.put(blocks)
    tier.index.pin(blocks)
    tier.put(chain(2))
    assert tier.has(1)
    tier.index.drop(one)
    assert not tier.has(1)
    assert tier.dropped == []
    assert tier.index.used_blocks == 2, "its place is not free yet"
    tier.index.unpin(blocks)
    assert (tier.dropped, tier.index.used_blocks) == ([one.address], 1)


def test_what_follows_a_dropped_block_goes_with_it() -> None:
    tier = Fresh(5)
    blocks = chain(1, 2, 3)
    tier.put(blocks)
    tier.put(chain(1, 7))
    tier.index.drop(blocks[1])
    assert (tier.has(1), tier.has(1, 2), tier.has(1, 2, 3), tier.has(1, 7)) == (True, False, False, True)


def test_a_block_whose_parent_has_gone_meanwhile_is_of_no_use() -> None:
    tier = Fresh(5)
    one, two = chain(1, 2)
    tier.put([one])
    tier.index.admit(two)
    tier.index.drop(one)
    assert not tier.index.arrived(two)
    assert (len(tier.index), tier.index.used_blocks) == (0, 0)
    assert sorted(tier.dropped) == sorted([one.address, two.address])


class TierMachine(RuleBasedStateMachine):
    """Random prompts come, arrive, are read, lost and cleared; an index that only hears the events agrees."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[bytes] = set()
        self.tier = TierIndex(Tier.HOST, 6, BLOCK, self.held.discard)
        self.index = PlainIndex()
        self.coming: list[TierBlock] = []
        self.pinned: list[TierBlock] = []

    @rule(numbers=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def come(self, numbers: list[int]) -> None:
        for block in chain(*numbers):
            if block.name in self.tier or block.address in self.held:
                continue
            if not self.tier.admit(block):
                break
            self.held.add(block.address)
            self.coming.append(block)

    @precondition(lambda self: self.coming)
    @rule(arrives=st.booleans(), data=st.data())
    def end(self, arrives: bool, data: st.DataObject) -> None:
        block = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        if arrives:
            self.tier.arrived(block)
        else:
            self.tier.lost(block)

    @rule(numbers=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def read(self, numbers: list[int]) -> None:
        found = [held for block in chain(*numbers) if (held := self.tier.get(block.name)) is not None]
        self.tier.pin(found)
        self.pinned += found

    @precondition(lambda self: self.pinned)
    @rule()
    def let_go(self) -> None:
        self.tier.unpin(self.pinned)
        self.pinned = []

    @rule(numbers=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def drop(self, numbers: list[int]) -> None:
        if (block := self.tier.get(chain(*numbers)[-1].name)) is not None:
            self.tier.drop(block)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.index.drop(HOLDER)

    @invariant()
    def events_and_snapshot_give_the_content(self) -> None:
        self.index.apply(HOLDER, self.tier.take_events())
        assert self.index.digest(HOLDER) == self.tier.digest
        assert self.index.stats.orphan_blocks == self.index.stats.malformed_blocks == 0
        rebuilt = PlainIndex()
        rebuilt.apply(HOLDER, self.tier.snapshot())
        assert rebuilt.content(HOLDER) == self.index.content(HOLDER)

    @invariant()
    def it_is_within_its_limit(self) -> None:
        assert len(self.tier) <= self.tier.used_blocks <= self.tier.max_blocks
        assert self.tier.used_blocks == len(self.held)

    @invariant()
    def ready_blocks_are_whole_prefixes(self) -> None:
        names = {name for name, _ in self.index.content(HOLDER)}
        for name in names:
            block = self.tier.get(SequenceHash(name))
            assert block is not None
            assert block.parent is None or block.parent in names


TestTierIndex = TierMachine.TestCase
TestTierIndex.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_an_empty_tier_has_an_empty_digest() -> None:
    assert Fresh(3).index.digest == Digest(0, 0)
