"""Several ranks' caches told as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.mirror import CacheMirror
from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import digest_term
from kvmesh.protocol.ids import EngineHash
from kvmesh.workers.engines.external.cache import EngineCache

RANKS = 3
# Chains over four tokens of blocks of one token: an engine names a block by all that is before it.
prefixes = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
steps = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.sampled_from(["store", "remove", "clear", "lose"]), prefixes), max_size=40
)


def engine_name(prefix: tuple[int, ...]) -> EngineHash:
    return EngineHash(int("1" + "".join(map(str, prefix))))


def event_of(kind: str, prefix: tuple[int, ...]) -> KvEvent:
    if kind == "store":
        names = tuple(engine_name(prefix[: n + 1]) for n in range(len(prefix)))
        return Stored(names, None, prefix, 1)
    return Removed((engine_name(prefix),)) if kind == "remove" else Cleared()


def follow(held: set[int], events: list[KvEvent]) -> None:
    """Strictly: what is told twice, or removed unseen, or stored before its parent, is an error."""
    for event in events:
        match event:
            case Stored():
                assert event.parent is None or event.parent in held
                assert not held & set(event.hashes)
                held |= set(event.hashes)
            case Removed():
                assert set(event.hashes) <= held
                held -= set(event.hashes)
            case Cleared():
                held.clear()


@given(steps)
def test_what_is_told_is_what_the_ranks_hold_together(script: list[tuple[int, str, tuple[int, ...]]]) -> None:
    cache = EngineCache(1, RANKS)
    told: set[int] = set()
    cache.listeners.append(lambda events: follow(told, list(events)))
    mirrors = [CacheMirror(1) for _ in range(RANKS)]
    for rank, kind, prefix in script:
        if kind == "lose":
            cache.clear(rank)
            mirrors[rank].clear()
        else:
            cache.apply(rank, [event_of(kind, prefix)])
            mirrors[rank].apply([event_of(kind, prefix)])
        held: set[int] = set()
        for mirror in mirrors:
            held |= {name for event in mirror.snapshot() if isinstance(event, Stored) for name in event.hashes}
        rebuilt: set[int] = set()
        follow(rebuilt, cache.snapshot())
        assert told == held == rebuilt
        assert cache.digest_now == Digest(len(held), sum(map(digest_term, held)) % 2**64)
        assert cache.num_blocks == len(held)


@pytest.mark.parametrize("rank", [-1, RANKS])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(WireError, match=f"rank {rank}"):
        EngineCache(1, RANKS).apply(rank, [])
