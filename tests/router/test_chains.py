"""Prompts in flight, counted per holder. All of it holds for both implementations."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.protocol.hashing import sequence_hash_bytes
from kvmesh.protocol.ids import WorkerId
from kvmesh.router.chains import PlainChainCounts
from kvmesh.router.index import Holder
from tests.support.implementations import CHAINS

NewCounts = Callable[[], PlainChainCounts]

A, B = Holder(WorkerId("a"), 0), Holder(WorkerId("b"), 0)

both = pytest.mark.parametrize("new_counts", CHAINS)


def chain(*tokens: int) -> bytes:
    """Blocks of one token."""
    return sequence_hash_bytes(array("I", tokens), 1)


@both
def test_a_prefix_is_in_use_until_its_last_chain_goes(new_counts: NewCounts) -> None:
    counts = new_counts()
    counts.add(A, chain(1, 2, 3))
    counts.add(A, chain(1, 2, 4))
    counts.add(B, chain(1))
    assert counts.match(chain(1, 2, 3, 5)) == {A: 3, B: 1}
    assert (counts.blocks_of(A), counts.blocks_of(B), counts.num_blocks) == (4, 1, 4)
    counts.discard(A, chain(1, 2, 3))
    assert counts.match(chain(1, 2, 3)) == {A: 2, B: 1}
    counts.discard(A, chain(1, 2, 4))
    assert counts.match(chain(1, 2, 3)) == {B: 1}
    counts.discard(B, chain(1))
    assert (counts.match(chain(1)), counts.num_blocks, counts.blocks_of(A)) == ({}, 0, 0)


@both
def test_equal_chains_are_counted(new_counts: NewCounts) -> None:
    counts = new_counts()
    for _ in range(3):
        counts.add(A, chain(1, 2))
    for _ in range(2):
        counts.discard(A, chain(1, 2))
    assert counts.match(chain(1, 2)) == {A: 2}
    assert counts.blocks_of(A) == 2


@both
def test_what_was_not_added_cannot_be_discarded(new_counts: NewCounts) -> None:
    counts = new_counts()
    counts.add(A, chain(1, 2, 3))
    counts.discard(A, chain(1, 2))
    counts.discard(A, chain(7))
    counts.discard(B, chain(1, 2, 3))
    counts.discard(A, b"")
    assert counts.match(chain(1, 2, 3)) == {A: 3}
    counts.add(A, chain(1, 2))
    counts.discard(A, chain(1, 2))
    counts.discard(A, chain(1, 2))
    assert counts.match(chain(1, 2, 3)) == {A: 3}
    counts.drop(A)
    counts.drop(A)
    counts.discard(A, chain(1, 2, 3))
    assert (counts.match(chain(1, 2, 3)), counts.num_blocks) == ({}, 0)


@both
def test_an_empty_prompt_uses_nothing(new_counts: NewCounts) -> None:
    counts = new_counts()
    counts.add(A, b"")
    assert (counts.match(b""), counts.match(chain(1)), counts.blocks_of(A)) == ({}, {}, 0)


@both
def test_other_buffers_are_refused(new_counts: NewCounts) -> None:
    counts = new_counts()
    for use in (lambda hashes: counts.add(A, hashes), lambda hashes: counts.discard(A, hashes), counts.match):
        with pytest.raises(ValueError, match="integers of 8 bytes"):
            use(array("I", [1, 2]))
    assert counts.num_blocks == 0


holders = st.integers(0, 12).map(lambda number: Holder(WorkerId("w"), number))
prompts = st.lists(st.integers(0, 1), max_size=40).map(lambda tokens: chain(*tokens))
steps = st.lists(st.tuples(st.sampled_from("aaaddx"), holders, st.integers(0, 7)), max_size=60)


@both
@given(st.lists(prompts, min_size=8, max_size=8), steps)
def test_it_counts_like_a_list_of_chains(
    new_counts: NewCounts, prompts: list[bytes], steps: list[tuple[str, Holder, int]]
) -> None:
    counts, live = new_counts(), dict[Holder, list[bytes]]()
    for what, holder, number in steps:
        prompt = prompts[number]
        if what == "a" and prompt:
            live.setdefault(holder, []).append(prompt)
        elif what == "d" and prompt in live.get(holder, []):
            live[holder].remove(prompt)
        elif what == "x":
            live.pop(holder, None)
        {"a": counts.add, "d": counts.discard, "x": lambda who, _: counts.drop(who)}[what](holder, prompt)
    for prompt in prompts:
        want = {holder: max((shared(prompt, other) for other in chains), default=0) for holder, chains in live.items()}
        assert counts.match(prompt) == {holder: depth for holder, depth in want.items() if depth}
    for holder, chains in live.items():
        assert counts.blocks_of(holder) == len(prefixes(chains))
    assert counts.num_blocks == len(prefixes([prompt for chains in live.values() for prompt in chains]))
    for holder, chains in live.items():
        for prompt in chains:
            counts.discard(holder, prompt)
    assert counts.num_blocks == 0


def prefixes(chains: list[bytes]) -> set[bytes]:
    return {prompt[:end] for prompt in chains for end in range(8, len(prompt) + 1, 8)}


def shared(a: bytes, b: bytes) -> int:
    """Leading blocks in common."""
    return next((i for i in range(len(a) // 8) if a[8 * i : 8 * i + 8] != b[8 * i : 8 * i + 8]), len(a) // 8)
