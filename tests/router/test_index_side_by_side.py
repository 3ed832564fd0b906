"""The native index does what the plain one does, whatever it is told."""

from array import array

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from protocol.hashing import pack_hashes, sequence_hashes
from protocol.ids import WorkerId
from router import index as index_module
from router.index import Holder, PlainIndex, Tier
from tests.support.implementations import needs_native

HOLDERS = [Holder(WorkerId(worker), rank) for worker in "abc" for rank in range(2)]

holders = st.sampled_from(HOLDERS)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.OBJECT])
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)
limits = st.sampled_from([3, 12, 40, 1000])


class SideBySide(RuleBasedStateMachine):
    """Blocks of one token, so that few prompts make many shared prefixes.

    An engine mostly names a prefix by its content: here by its sequence hash plus a shift, a second shift being a
    second name for the same; sometimes by a small number that may mean anything.
    """

    told = Bundle("told")

    def __init__(self) -> None:
        super().__init__()
        self.make(1000, 1000)
        self.prompts: list[list[int]] = [[0, 1, 2]]

    def make(self, max_entries: int, max_per_holder: int) -> None:
        self.max_entries = max_entries
        self.plain = PlainIndex(max_entries, max_per_holder)
        self.native = index_module.NativeIndex(max_entries, max_per_holder)

    @rule(max_entries=limits, max_per_holder=limits)
    def begin_anew(self, max_entries: int, max_per_holder: int) -> None:
        if not self.plain.stats.stored_blocks:
            self.make(max_entries, max_per_holder)

    @rule(
        target=told,
        holder=holders,
        prompt=prompts,
        part=st.tuples(st.integers(0, 10), st.integers(0, 10)),
        shift=st.integers(0, 1),
        tier=tiers,
        odd=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 5)),
    )
    def store(
        self,
        holder: Holder,
        prompt: list[int],
        part: tuple[int, int],
        shift: int,
        tier: Tier,
        odd: tuple[int, int] | None,
    ) -> tuple[Holder, list[int]]:
        """`odd`: one block of the event, and the number it is named by."""
        first, end = sorted(min(bound, len(prompt)) for bound in part)
        names = [(prefix + shift) % 2**64 for prefix in sequence_hashes(prompt, 1)]
        parent = names[first - 1] if first else None
        event = names[first:end]
        if odd and event:
            event[odd[0] % len(event)] = odd[1]
        self.prompts = [*self.prompts[-20:], prompt]
        for index in (self.plain, self.native):
            index.store(holder, array("Q", event), parent, array("I", prompt[first:end]), 1, tier=tier)
        return holder, event

    @rule(
        holder=holders, names=st.lists(st.integers(0, 5), max_size=4), tokens=st.integers(1, 3), size=st.integers(-1, 3)
    )
    def store_what_may_be_wrong(self, holder: Holder, names: list[int], tokens: int, size: int) -> None:
        for index in (self.plain, self.native):
            index.store(holder, array("Q", names), None, array("I", [1] * tokens), size)

    @rule(known=told, tier=tiers)
    def store_in_another_tier_by_name(self, known: tuple[Holder, list[int]], tier: Tier) -> None:
        for index in (self.plain, self.native):
            index.store(known[0], array("Q", known[1]), None, b"", 1, tier=tier)

    @rule(known=told, which=st.lists(st.integers(0, 9), max_size=6), tier=tiers)
    def remove(self, known: tuple[Holder, list[int]], which: list[int], tier: Tier) -> None:
        holder, names = known
        event = [names[i] for i in which if i < len(names)]
        for index in (self.plain, self.native):
            index.remove(holder, array("Q", event), tier)

    @rule(known=told, tier=tiers)
    def remove_all_from_the_end(self, known: tuple[Holder, list[int]], tier: Tier) -> None:
        for index in (self.plain, self.native):
            index.remove(known[0], array("Q", known[1][::-1]), tier)

    @rule(holder=holders, how=st.sampled_from(["clear", "drop", "drop_worker"]))
    def forget(self, holder: Holder, how: str) -> None:
        for index in (self.plain, self.native):
            getattr(index, how)(holder.worker_id if how == "drop_worker" else holder)

    @rule(is_swapped=st.booleans())
    def load_a_snapshot(self, is_swapped: bool) -> None:
        mine, other = self.plain.dump(), self.native.dump()
        self.plain.load(other if is_swapped else mine)
        self.native.load(mine if is_swapped else other)

    @invariant()
    def both_say_the_same(self) -> None:
        assert self.native.stats == self.plain.stats
        assert self.native.holders == self.plain.holders
        assert self.native.num_blocks == self.plain.num_blocks
        assert self.native.num_entries == self.plain.num_entries <= self.max_entries
        for holder in HOLDERS:
            assert self.native.digest(holder) == self.plain.digest(holder)
            assert self.native.blocks_of(holder) == self.plain.blocks_of(holder)
            assert self.native.content(holder) == self.plain.content(holder)
        for prompt in self.prompts:
            hashes = pack_hashes(sequence_hashes(prompt, 1))
            assert self.native.match(hashes) == self.plain.match(hashes)

    def teardown(self) -> None:
        again = PlainIndex()
        again.load(self.native.dump())
        for holder in HOLDERS:
            assert again.content(holder) == self.plain.content(holder)
            for index in (self.plain, self.native):
                index.drop(holder)
        assert (self.plain.num_blocks, self.native.num_blocks) == (0, 0)


SideBySide.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSideBySide = needs_native(SideBySide.TestCase)
