"""Test the announcements for an engine that reports every copy that it stores and removes."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.mirror import CacheMirror
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term, hash_seed, sequence_hashes
from kvmesh.protocol.ids import EngineHash, SequenceHash, WorkerId
from kvmesh.protocol.tiers import MEDIA, Tier
from kvmesh.router.index import Holder, PlainIndex

BLOCK = 2


def key_of(tokens: Sequence[int], lora: str | None = None, salt: str | None = None) -> EngineHash:
    """Return the engine's hash of the block that ends these tokens, which differs from our names."""
    return EngineHash(random.Random(repr((tuple(tokens), lora, salt))).getrandbits(64))


def keys_of(tokens: Sequence[int], lora: str | None = None, salt: str | None = None) -> tuple[EngineHash, ...]:
    return tuple(key_of(tokens[:end], lora, salt) for end in range(BLOCK, len(tokens) + 1, BLOCK))


def stored(tokens: Sequence[int], start: int = 0, lora: str | None = None, salt: str | None = None) -> Stored:
    """The engine stores the blocks of `tokens` from block `start` on; like vLLM it says the salt in the first alone."""
    keys = keys_of(tokens, lora, salt)
    return Stored(
        hashes=keys[start:],
        parent=keys[start - 1] if start else None,
        token_ids=tuple(tokens[start * BLOCK : len(keys) * BLOCK]),
        block_size=BLOCK,
        lora=lora,
        salt=None if start else salt,
    )


def removed(tokens: Sequence[int], *blocks: int) -> Removed:
    keys = keys_of(tokens)
    return Removed(tuple(keys[block] for block in blocks))


def names(tokens: Sequence[int], lora: str | None = None, salt: str | None = None) -> tuple[EngineHash, ...]:
    return tuple(EngineHash(name) for name in sequence_hashes(tokens, BLOCK, hash_seed(lora, salt)))


class Follower:
    """Replays what is announced; every event must change something."""

    def __init__(self) -> None:
        self.held: set[EngineHash] = set()

    def replay(self, events: Sequence[KvEvent]) -> "Follower":
        for event in events:
            match event:
                case Stored():
                    assert event.parent is None or event.parent in self.held
                    assert len(event.token_ids) == BLOCK * len(event.hashes)
                    assert not self.held & set(event.hashes)
                    self.held |= set(event.hashes)
                case Removed():
                    assert self.held >= set(event.hashes)
                    self.held -= set(event.hashes)
                case Cleared():
                    self.held.clear()
        return self


def digest_of(held: set[EngineHash]) -> Digest:
    return Digest(len(held), sum(map(digest_term, held)) & 0xFFFF_FFFF_FFFF_FFFF)


TOKENS = [1, 2, 3, 4, 5, 6]


def test_blocks_are_announced_under_our_names() -> None:
    [event] = CacheMirror(BLOCK).apply([stored(TOKENS)])
    assert event == Stored(names(TOKENS), None, tuple(TOKENS), BLOCK)


def test_blocks_that_follow_known_ones_are_announced_as_their_children() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS[:4])])
    [event] = mirror.apply([stored(TOKENS, start=2)])
    assert event == Stored(names(TOKENS)[2:], names(TOKENS)[1], (5, 6), BLOCK)


def test_adapters_and_tenants_never_share_a_block_name() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS[:2], lora="poet", salt="tenant")])
    [event] = mirror.apply([stored(TOKENS, start=1, lora="poet", salt="tenant")])
    assert event == Stored(
        names(TOKENS, "poet", "tenant")[1:],
        names(TOKENS, "poet", "tenant")[0],
        tuple(TOKENS[2:]),
        BLOCK,
        "poet",
        "tenant",
    )


def test_a_second_copy_is_never_announced() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS)])
    assert mirror.apply([stored(TOKENS), removed(TOKENS, 0, 1, 2)]) == []
    assert mirror.digest == digest_of(set(names(TOKENS)))
    assert Follower().replay(mirror.apply([removed(TOKENS, 0, 1, 2)]) and []).held == set()
    assert mirror.digest == Digest(0, 0)


def test_a_removed_block_takes_its_followers_children_first() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS)])
    first, second, third = names(TOKENS)
    assert mirror.apply([removed(TOKENS, 0)]) == [Removed((third, second, first))]


def test_what_follows_comes_back_with_the_block_before_it() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS), removed(TOKENS, 1)])
    again = Stored((keys_of(TOKENS)[1],), keys_of(TOKENS)[0], (3, 4), BLOCK)
    assert mirror.apply([again]) == [Stored(names(TOKENS)[1:], names(TOKENS)[0], (3, 4, 5, 6), BLOCK)]


def test_a_block_that_cannot_be_reached_leaves_without_a_word() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS), removed(TOKENS, 0)])
    assert mirror.apply([removed(TOKENS, 2), removed(TOKENS, 1)]) == []
    assert mirror.stats == {}
    assert mirror.apply([stored(TOKENS[:2])]) == [Stored(names(TOKENS)[:1], None, (1, 2), BLOCK)]


def test_two_engine_hashes_of_one_prefix_become_one_name() -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS[:2])])
    twin = Stored((EngineHash(7),), None, (1, 2), BLOCK)
    assert mirror.apply([twin, removed(TOKENS, 0)]) == []
    assert mirror.snapshot() == [Stored(names(TOKENS)[:1], None, (1, 2), BLOCK)]


def test_blocks_after_an_unknown_one_and_unknown_removals_are_counted() -> None:
    mirror = CacheMirror(BLOCK)
    assert mirror.apply([stored(TOKENS, start=1), removed(TOKENS, 0)]) == []
    assert mirror.stats == {"unknown_parents": 2, "unknown_removals": 1}


HOST = "CPU"


def in_memory(tokens: Sequence[int], *, named_only: bool = False) -> Stored:
    """Return the event of blocks that were offloaded; most offloading connectors tell the names alone."""
    if named_only:
        return Stored(keys_of(tokens), None, (), 0, medium=HOST)
    return Stored(keys_of(tokens), None, tuple(tokens), BLOCK, medium=HOST)


@pytest.mark.parametrize("named_only", [False, True])
def test_offloaded_blocks_are_announced_in_their_tier_and_outlive_the_device(named_only: bool) -> None:
    mirror = CacheMirror(BLOCK)
    mirror.apply([stored(TOKENS)])
    assert mirror.apply([in_memory(TOKENS, named_only=named_only)]) == [
        Stored(names(TOKENS), None, tuple(TOKENS), BLOCK, medium=HOST)
    ]
    assert mirror.apply([removed(TOKENS, 0, 1, 2)]) == [Removed(names(TOKENS))]
    assert mirror.snapshot() == [Stored(names(TOKENS), None, tuple(TOKENS), BLOCK, medium=HOST)]
    assert mirror.apply([Removed(keys_of(TOKENS), medium=HOST)]) == [Removed(names(TOKENS)[::-1], HOST)]
    assert (mirror.digest, mirror._blocks) == (Digest(0, 0), {})


def test_a_block_of_the_device_follows_one_that_is_offloaded() -> None:
    """The engine loads what was offloaded, and has the rest: the prefix is whole."""
    mirror, index, holder = CacheMirror(BLOCK), PlainIndex(), Holder(WorkerId("w"), 0)
    index.apply(holder, mirror.apply([stored(TOKENS), in_memory(TOKENS[:4]), removed(TOKENS, 0, 1)]))
    assert {tier for _, tier in index.content(holder)} == {Tier.DEVICE, Tier.HOST}
    assert index.digest(holder) == mirror.digest
    rebuilt = PlainIndex()
    rebuilt.apply(holder, mirror.snapshot())
    assert rebuilt.content(holder) == index.content(holder)


def test_offloaded_blocks_without_tokens_that_nobody_knows_are_counted() -> None:
    mirror = CacheMirror(BLOCK)
    assert mirror.apply([in_memory(TOKENS, named_only=True)]) == []
    assert mirror.apply([Stored((EngineHash(1),), None, (1, 2, 3, 4), 4, medium=HOST)]) == []
    assert mirror.stats == {"without_tokens": 3, "other_sizes": 1}


def test_clearing_forgets_all_that_was_said() -> None:
    mirror = CacheMirror(BLOCK)
    assert mirror.apply([stored(TOKENS), Cleared()]) == [Cleared()]
    assert (mirror.digest, mirror.snapshot()) == (Digest(0, 0), [])


def test_an_adapter_is_forgotten_with_all_its_blocks_and_no_others() -> None:
    mirror, tokens = CacheMirror(BLOCK), [1, 2, 3, 4, 5, 6]
    gone = Removed((keys_of(tokens, "poet")[1],))
    follower = Follower().replay(mirror.apply([*(stored(tokens, lora=lora) for lora in (None, "poet", "cook")), gone]))
    follower.replay(mirror.forget_adapter("poet"))
    assert follower.held == {*names(tokens), *names(tokens, "cook")}
    assert follower.held == Follower().replay(mirror.snapshot()).held
    assert mirror.digest == Digest(6, sum(map(digest_term, follower.held)) & (1 << 64) - 1)
    late = [Removed(keys_of(tokens, "poet")), stored(tokens, 1, lora="poet")]
    assert mirror.apply(late) == []
    follower.replay(mirror.apply([stored(tokens, lora="poet")]))
    assert len(follower.held) == 9


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(WireError, match="blocks of 4 tokens, it began with 2"):
        CacheMirror(BLOCK).apply([Stored((EngineHash(1),), None, (1, 2, 3, 4), 4)])


def test_no_more_blocks_are_kept_than_allowed() -> None:
    mirror = CacheMirror(BLOCK, max_blocks=2)
    assert mirror.apply([stored(TOKENS)]) == [Stored(names(TOKENS)[:2], None, (1, 2, 3, 4), BLOCK)]
    assert mirror.stats == {"over_limit": 1}


# --- against a model that works everything out from scratch -----------------------------------------------


@dataclass(frozen=True)
class Act:
    tokens: tuple[int, ...]
    start: int
    kind: str  # "store", "remove" or "clear"
    tier: Tier = Tier.DEVICE


@st.composite
def histories(draw: st.DrawFn) -> list[Act]:
    prompt = st.lists(st.sampled_from([(0, 0), (0, 1)]), min_size=1, max_size=4).map(lambda p: sum(p, ()))
    kinds = st.sampled_from(["store"] * 10 + ["remove"] * 9 + ["clear"])
    act = st.builds(Act, prompt, st.integers(0, 2), kinds, st.sampled_from([Tier.DEVICE, Tier.HOST]))
    return draw(st.lists(act, max_size=60))


@given(histories())
def test_what_is_announced_is_what_can_be_reached(history: list[Act]) -> None:
    mirror, index, holder = CacheMirror(BLOCK), PlainIndex(), Holder(WorkerId("w"), 0)
    copies: Counter[tuple[tuple[int, ...], Tier]] = Counter()

    def is_there(tokens: tuple[int, ...]) -> bool:
        return any(copies[tokens, tier] for tier in Tier)

    for act in history:
        blocks = [act.tokens[:end] for end in range(BLOCK, len(act.tokens) + 1, BLOCK)]
        match act.kind:
            case "clear":
                copies.clear()
                index.apply(holder, mirror.apply([Cleared()]))
            case "remove":
                index.apply(holder, mirror.apply([Removed((key_of(act.tokens),), MEDIA[act.tier])]))
                copies[act.tokens, act.tier] -= copies[act.tokens, act.tier] > 0
            case _:
                start = min(act.start, len(blocks) - 1)
                if start and not is_there(blocks[start - 1]):
                    continue  # an engine stores after a block only while that is there
                index.apply(holder, mirror.apply([replace(stored(act.tokens, start), medium=MEDIA[act.tier])]))
                copies.update((block, act.tier) for block in blocks[start:])
        reachable = {
            (SequenceHash(names(tokens)[-1]), tier)
            for (tokens, tier), count in copies.items()
            if count and all(is_there(tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK))
        }
        assert index.content(holder) == reachable
        assert (index.stats.orphan_blocks, index.stats.unknown_removals, index.stats.duplicate_blocks) == (0, 0, 0)
        rebuilt = PlainIndex()
        rebuilt.apply(holder, mirror.snapshot())
        assert rebuilt.content(holder) == reachable
        assert rebuilt.stats.orphan_blocks == 0
        assert mirror.digest == index.digest(holder)
    everything = [
        Removed((key_of(tokens),), MEDIA[tier]) for (tokens, tier), count in copies.items() for _ in range(count)
    ]
    index.apply(holder, mirror.apply(everything))
    assert (index.content(holder), mirror._blocks, mirror._roots) == (frozenset(), {}, {})
