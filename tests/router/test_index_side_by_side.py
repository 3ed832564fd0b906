"""The native index does what the plain one does, whatever it is told."""

import random
from array import array
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.protocol.hashing import pack_hashes, sequence_hashes
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.tiers import Tier
from kvmesh.router import index as index_module
from kvmesh.router.index import Holder, PlainIndex
from tests.support.budget import examples
from tests.support.implementations import needs_native

HOLDERS = [Holder(WorkerId(worker), rank) for worker in "abc" for rank in range(2)]

holders = st.sampled_from(HOLDERS)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.SHARED])
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)
limits = st.sampled_from([3, 12, 40, 1000])


def assert_equal(plain: PlainIndex, native: "index_module.NativeIndex", prompts: Sequence[Sequence[int]]) -> None:
    assert native.stats == plain.stats
    assert native.holders == plain.holders
    assert native.num_blocks == plain.num_blocks
    assert native.num_entries == plain.num_entries
    for holder in HOLDERS:
        assert native.digest(holder) == plain.digest(holder)
        assert native.blocks_of(holder) == plain.blocks_of(holder)
        assert native.content(holder) == plain.content(holder)
        assert native._gaps(holder) == gaps(plain, holder)
    for prompt in prompts:
        hashes = pack_hashes(sequence_hashes(prompt, 1))
        assert native.match(hashes) == plain.match(hashes)


def gaps(index: PlainIndex, holder: Holder) -> tuple[int, ...]:
    """Per tier: prefixes there or faster whose parent is not."""
    fastest: dict[int | None, int] = {None: 0}
    for prefix, tier in index.content(holder):
        fastest[prefix] = min(tier, fastest.get(prefix, tier))
    parents = [(tier, fastest.get(index._nodes[p].parent, len(Tier))) for p, tier in fastest.items() if p is not None]
    return tuple(sum(mine <= tier < parent for mine, parent in parents) for tier in Tier)


class SideBySide(RuleBasedStateMachine):
    """Blocks of one token, so that few prompts make many shared prefixes.

    An engine mostly names a prefix by its content: here by its sequence hash plus a shift, a second shift being a
    second name for the same; sometimes by a small number that may mean anything.
    """

    told = Bundle("told")

    @initialize(max_entries=limits, max_per_holder=limits)
    def make(self, max_entries: int, max_per_holder: int) -> None:
        self.prompts: list[list[int]] = [[0, 1, 2]]
        self.max_entries = max_entries
        self.plain = PlainIndex(max_entries, max_per_holder)
        self.native = index_module.NativeIndex(max_entries, max_per_holder)

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
        """Return an event. `odd` is one of its blocks, and the number that names it."""
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
        assert self.native.num_entries <= self.max_entries
        assert_equal(self.plain, self.native, self.prompts)

    def teardown(self) -> None:
        again = PlainIndex()
        again.load(self.native.dump())
        for holder in HOLDERS:
            assert again.content(holder) == self.plain.content(holder)
            for index in (self.plain, self.native):
                index.drop(holder)
        assert (self.plain.num_blocks, self.native.num_blocks) == (0, 0)


SideBySide.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=50)
TestSideBySide = needs_native(SideBySide.TestCase)


# --- longer than hypothesis would go ----------------------------------------------------------------------


class Engine:
    """Return events that one holder might send, mostly sound ones, from a seed."""

    def __init__(self, rng: random.Random, holder: Holder, tiers: Sequence[Tier], num_names: int) -> None:
        self.holder = holder
        self._rng = rng
        self._tiers = tiers
        self._num_names = num_names
        self._names: dict[tuple[int, ...], int] = {}
        self._told: list[int] = []

    def act(self, indexes: Sequence[PlainIndex], prompt: list[int]) -> None:
        tier = self._rng.choice(self._tiers)
        what = self._rng.random()
        if what < 0.55:
            first, end = sorted((self._rng.randint(0, len(prompt)), self._rng.randint(0, len(prompt))))
            first = self._rng.choice([0, first])
            names = [self._name(prompt[: i + 1]) for i in range(first, end)]
            self._told += names
            parent = self._name(prompt[:first]) if first else None
            tokens = prompt[first:end] if self._rng.random() < 0.9 else []
            for index in indexes:
                index.store(self.holder, array("Q", names), parent, array("I", tokens), 1, tier=tier)
        elif what < 0.97 and self._told:
            chosen = [self._rng.randrange(len(self._told)) for _ in range(self._rng.randint(1, 6))]
            names = [self._told.pop(i % len(self._told)) for i in chosen if self._told]
            for index in indexes:
                index.remove(self.holder, array("Q", names), tier)
        elif self._rng.random() < 0.3:
            for index in indexes:
                index.clear(self.holder)

    def _name(self, prefix: list[int]) -> int:
        if self._rng.random() < 0.03:
            return self._rng.randrange(self._num_names)
        return self._names.setdefault(tuple(prefix), self._rng.randrange(self._num_names))


@needs_native
@pytest.mark.parametrize("seed", range(24))
def test_long_runs_end_alike(seed: int) -> None:
    rng = random.Random(seed)
    limits = rng.choice([5, 30, 200, 10_000]), rng.choice([5, 30, 200, 10_000])
    plain, native = PlainIndex(*limits), index_module.NativeIndex(*limits)
    tiers = rng.choice([[Tier.DEVICE], [Tier.DEVICE, Tier.HOST], list(Tier)])
    num_names = rng.choice([30, 2**64])
    engines = [Engine(rng, holder, tiers, num_names) for holder in HOLDERS[: rng.randint(1, len(HOLDERS))]]
    width = rng.choice([1, 2, 5])
    prompts = [[rng.randrange(width) for _ in range(rng.randint(1, 14))] for _ in range(12)]
    for step in range(400):
        rng.choice(engines).act((plain, native), rng.choice(prompts))
        if step % 20 == 0:
            assert_equal(plain, native, prompts)
        if step % 90 == 89:
            native.load(native.dump())
    assert_equal(plain, native, prompts)


@needs_native
def test_many_blocks_come_and_go_alike() -> None:
    """Enough for the tables to grow, to fill up with what was removed and to be cleaned."""
    rng = random.Random(0)
    plain, native = PlainIndex(), index_module.NativeIndex()
    live: dict[Holder, list[int]] = {holder: [] for holder in HOLDERS[:2]}
    for round_number in range(60):
        for holder, names in live.items():
            fresh = [rng.getrandbits(64) for _ in range(300)]
            tokens = [round_number, *range(299)] if rng.random() < 0.5 else [rng.getrandbits(32) for _ in range(300)]
            rng.shuffle(names)
            gone, names[:] = names[: len(names) // 4], names[len(names) // 4 :] + fresh
            for index in (plain, native):
                index.store(holder, array("Q", fresh), None, array("I", tokens), 1)
                index.remove(holder, array("Q", gone))
    assert_equal(plain, native, [[n, *range(299)] for n in range(60)])
    for holder, names in live.items():
        for index in (plain, native):
            index.remove(holder, array("Q", names[5:]))
    assert_equal(plain, native, [[n, *range(299)] for n in range(60)])


@needs_native
def test_colliding_names_are_kept_apart() -> None:
    """There are so many blocks that the part of a hash that a table keeps is often the same."""
    rng = random.Random(0)
    names = [rng.getrandbits(64) for _ in range(60_000)]
    plain, native = PlainIndex(), index_module.NativeIndex()
    for index in (plain, native):
        index.store(HOLDERS[0], array("Q", names), None, array("I", range(len(names))), 1)
        index.remove(HOLDERS[0], array("Q", names[::2]))
        index.remove(HOLDERS[0], array("Q", [name ^ 1 for name in names]))
        index.store(HOLDERS[0], array("Q", names[:1]), None, array("I", [0]), 1)
    assert_equal(plain, native, [range(100)])
    assert native.stats.unknown_removals == len(names)
