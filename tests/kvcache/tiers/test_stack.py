"""Blocks that leave the device are copied in time, and exactly those come back that were asked for."""

from collections.abc import Sequence

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.reuse import Reuse
from kvmesh.kvcache.tiers.stack import BlockSave, HitWindow, Offload, PlannedLoad, Prefix, TierLevel, TierStack
from kvmesh.protocol.hashing import sequence_hashes
from kvmesh.protocol.ids import SequenceHash
from kvmesh.protocol.tiers import Tier

BLOCK = 2


class Stack:
    """A stack over a small device, whose copies end when the test says so."""

    def __init__(self, device: int = 16, host: int = 64, offload: Offload = "ahead", max_in_flight: int = 64) -> None:
        self.pool = BlockPool(device, BLOCK)
        self.dropped: list[bytes] = []
        self.level = TierLevel(TierIndex(Tier.HOST, host, BLOCK, self.dropped.append), TierRates(1000))
        self.stack = TierStack(self.pool, [self.level], b"model", offload=offload, max_in_flight=max_in_flight)

    def run(self, tokens: Sequence[int]) -> list[int]:
        """Run a prompt through the device; return its table, released."""
        hashes = sequence_hashes(tokens, BLOCK)
        table = self.pool.match(hashes)
        table += self.pool.allocate(len(hashes) - len(table))
        for i, name in enumerate(hashes):
            table[i] = self.pool.commit(
                table[i], name, table[i - 1] if i else None, tokens[i * BLOCK : (i + 1) * BLOCK]
            )
        self.pool.release(table)
        return table

    def save(self) -> list[BlockSave]:
        """Make all copies that are planned."""
        made: list[BlockSave] = []
        while saves := self.stack.plan_saves():
            for save in saves:
                self.stack.saved(save, arrived=True)
            made += saves
        return made

    def prefix(self, tokens: Sequence[int], salt: str | None = None) -> Prefix:
        names = sequence_hashes(tokens, BLOCK)
        return Prefix(names, lambda number: tokens[number * BLOCK : (number + 1) * BLOCK], None, salt)

    def load(self, tokens: Sequence[int], first: int = 0) -> PlannedLoad | None:
        return self.stack.plan_load(self.prefix(tokens), first, 0)


def prompt(number: int, blocks: int) -> list[int]:
    return [number, *range(1, BLOCK * blocks)]


def test_a_device_that_is_not_full_copies_nothing() -> None:
    stack = Stack(device=64)
    for number in range(5):
        stack.run(prompt(100 + number, 8))
        assert stack.save() == []


def test_what_would_be_evicted_next_is_copied_with_all_before_it() -> None:
    """The window is an eighth, and room for two prompts like the largest: eight blocks here, of which four are free."""
    stack = Stack(device=64)
    for number in range(14):
        stack.run(prompt(100 + number, 4))
        assert stack.save() == []
    stack.run(prompt(114, 4))
    saves = stack.save()
    assert {save.block.tokens[0] for save in saves if save.block.parent is None} == {100}, "the oldest prompt alone"
    assert [save.block.parent for save in saves] == [None, *[save.block.name for save in saves[:-1]]]
    assert len(saves) == 4


def test_a_copied_prefix_is_found_from_any_block_on() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 6))
    assert len(stack.save()) == 6
    load = stack.load(prompt(100, 6), first=2)
    assert load is not None
    assert [piece.block.tokens for piece in load.pieces] == [(4, 5), (6, 7), (8, 9), (10, 11)]
    stack.stack.load_ended(load, 4, {Tier.HOST: 0.001})
    assert stack.level.rates.backlog_bytes == 0


def test_a_name_alone_is_no_hit() -> None:
    """Another prefix lies under the names of this prompt: a collision of 64 bits."""
    stack = Stack(offload="through")
    stack.run(prompt(100, 3))
    stack.save()
    block = stack.level.index.get(SequenceHash(sequence_hashes(prompt(100, 3), BLOCK)[0]))
    assert block is not None
    block.tokens = (9, 9)
    assert stack.load(prompt(100, 3)) is None
    assert stack.level.counts["collisions"] == 1


def test_an_equal_block_after_another_prefix_is_no_hit() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 3))
    stack.save()
    names = sequence_hashes(prompt(100, 3), BLOCK)
    tokens = [7, 7, *prompt(100, 3)[2:]]
    assert stack.stack.plan_load(Prefix(names, lambda n: tokens[2 * n : 2 * n + 2], None, None), 1, 0) is None


def test_a_salt_and_a_model_are_part_of_the_address() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 3))
    stack.save()
    assert stack.stack.plan_load(stack.prefix(prompt(100, 3), salt="other"), 0, 0) is None
    stack.stack.fingerprint = b"another model"
    assert stack.load(prompt(100, 3)) is None


def test_a_block_that_changed_while_it_was_copied_is_dropped() -> None:
    stack = Stack(device=4, offload="through")
    stack.run(prompt(100, 3))
    saves = stack.stack.plan_saves()
    stack.run(prompt(200, 4))
    for save in saves:
        stack.stack.saved(save, arrived=True)
    assert stack.level.counts["dropped_overtaken"] == 3
    assert stack.level.index.used_blocks == 0


def test_copies_in_flight_are_bounded_and_the_rest_is_counted() -> None:
    stack = Stack(offload="through", max_in_flight=3)
    stack.run(prompt(100, 8))
    assert len(stack.stack.plan_saves()) == 3
    assert stack.level.counts["dropped_busy"] == 5


def test_what_leaves_without_a_copy_is_counted() -> None:
    stack = Stack(device=8)
    stack.run(prompt(100, 6))
    stack.run(prompt(200, 6))
    stack.stack.plan_saves()
    assert stack.level.counts["dropped_too_late"] == 4


def test_an_unreadable_block_goes_with_all_that_follow_it() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 4))
    stack.save()
    load = stack.load(prompt(100, 4))
    assert load is not None
    stack.stack.load_ended(load, 1, {Tier.HOST: 0.001}, is_broken=True)
    assert len(stack.level.index) == 1
    again = stack.load(prompt(100, 4))
    assert again is not None
    assert len(again.pieces) == 1


def test_a_slow_tier_is_not_read() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 4))
    stack.save()
    stack.stack.compute.note_step(100, 0, 0.1)
    first = stack.load(prompt(100, 4))
    assert first is not None
    stack.stack.load_ended(first, 4, {Tier.HOST: 10.0})
    assert stack.load(prompt(100, 4)) is None
    assert stack.level.counts["refused"] == 1


def test_a_load_that_brought_nothing_in_time_counts_as_slow() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 4))
    stack.save()
    stack.stack.compute.note_step(100, 0, 0.1)
    first = stack.load(prompt(100, 4))
    assert first is not None
    stack.stack.load_ended(first, 0, {Tier.HOST: 5.0})
    assert stack.load(prompt(100, 4)) is None


def test_a_clear_reaches_copies_in_flight() -> None:
    stack = Stack(offload="through")
    stack.run(prompt(100, 4))
    saves = stack.stack.plan_saves()
    stack.pool.clear()
    stack.stack.clear(tuple(Tier))
    for save in saves:
        stack.stack.saved(save, arrived=True)
    assert (len(stack.level.index), stack.level.index.used_blocks) == (0, 0)
    stack.run(prompt(100, 4))
    assert len(stack.save()) == 4, "and the same blocks can be copied again"


def test_traffic_without_reuse_stops_to_be_copied() -> None:
    stack = Stack(device=16, host=32)
    for number in range(40):
        stack.run(prompt(100 + number, 4))
        stack.save()
    saved = stack.level.counts["saved"]
    assert saved < 16 + 16, "about as much as the device holds"
    assert stack.level.counts["dropped_no_reuse"] > 60
    stack.load(prompt(130, 4))
    stack.run(prompt(300, 4))
    stack.run(prompt(301, 4))
    assert stack.save(), "one prefix came back, so copying pays again"


def test_reuse_remembers_as_many_names_as_the_tier_has_blocks() -> None:
    reuse = Reuse(3, 3)
    reuse.lost([SequenceHash(number) for number in range(5)])
    assert not reuse.missed(SequenceHash(1))
    assert reuse.missed(SequenceHash(2))


def test_copying_goes_on_while_what_comes_back_is_missed() -> None:
    """Ask for the first copy after more blocks than the patience is."""
    stack = Stack(device=16, host=64)
    names = [prompt(100 + number, 4) for number in range(12)]
    for tokens in [*names, *names, *names]:
        if (load := stack.load(tokens)) is not None:
            stack.stack.load_ended(load, len(load.pieces), {Tier.HOST: 0.001})
        stack.run(tokens)
        stack.save()
    assert stack.level.counts["loaded"] >= 40, "of 48 blocks that were asked for a third time"


def test_the_hit_rate_is_that_of_the_latest_requests() -> None:
    window = HitWindow()
    assert window.shares() == (0.0, 0.0)
    for _ in range(2000):
        window.note(10, 2, 5)
    window.note(10, 2, 5)
    assert window.shares() == (0.2, 0.5)
    assert window.seen == 2001


def test_a_tier_block_is_no_other_block() -> None:
    first, second = (TierBlock(SequenceHash(1), None, b"a", (1,)) for _ in range(2))
    assert first != second
