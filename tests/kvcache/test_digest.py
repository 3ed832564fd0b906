"""Digests of many prefixes at once are those of one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.pool import digest_terms
from kvmesh.protocol.hashing import digest_term


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=60))
def test_many_at_once_come_to_the_same(hashes: list[int]) -> None:
    assert digest_terms(hashes) % (1 << 64) == sum(map(digest_term, hashes)) % (1 << 64)
