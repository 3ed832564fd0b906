"""Names of prefixes, packed: equal from native code and from plain Python, and equal to xxhash's."""

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvmesh.protocol import hashing
from kvmesh.protocol.hashing import (
    digest_term,
    mix64,
    pack_hashes,
    plain_sequence_hash_bytes,
    sequence_hash_bytes,
    sequence_hashes,
    token_bytes,
    unpack_hashes,
)

try:
    from kvmesh.protocol import _native as native
except ImportError:
    native = None

needs_native = pytest.mark.skipif(native is None, reason="the native code was not built here")
both = pytest.mark.parametrize(
    "hash_tokens",
    [
        pytest.param(plain_sequence_hash_bytes, id="plain"),
        pytest.param(getattr(native, "sequence_hash_bytes", None), id="native", marks=needs_native),
    ],
)

u64 = st.integers(0, 2**64 - 1)
# Around the lengths where the algorithm takes another way, and a stripe or a block more.
LENGTHS = [*range(260), *(n + d for n in (320, 512, 1024, 1088, 2048, 2112, 4096, 65_536) for d in (-1, 0, 1))]


@needs_native
@pytest.mark.parametrize("seed", [0, 1, 1337, 2**32, 2**63, 2**64 - 1])
def test_xxh3_is_xxhashs_for_every_way_through_it(seed: int) -> None:
    data = random.Random(seed).randbytes(max(LENGTHS))
    for length in LENGTHS:
        assert native.xxh3_64(data[:length], seed) == xxh3_64_intdigest(data[:length], seed), length


@needs_native
@given(st.binary(max_size=3000), u64)
def test_xxh3_is_xxhashs_for_any_bytes(data: bytes, seed: int) -> None:
    assert native.xxh3_64(data, seed) == xxh3_64_intdigest(data, seed)


@both
@given(st.lists(st.integers(0, 2**32 - 1), max_size=600), st.integers(1, 300), u64)
def test_packed_hashes_are_the_listed_ones(hash_tokens: object, tokens: list[int], block_size: int, seed: int) -> None:
    assert callable(hash_tokens)
    want = sequence_hashes(tokens, block_size, seed)
    assert list(unpack_hashes(hash_tokens(token_bytes(tokens), block_size, seed))) == want
    assert hash_tokens(array("I", tokens), block_size) == pack_hashes(sequence_hashes(tokens, block_size))
    for known in range(min(3, len(want))):
        rest = token_bytes(tokens[known * block_size :])
        assert hash_tokens(rest, block_size, seed, want[known - 1] if known else None) == pack_hashes(want[known:])


@both
def test_tokens_come_in_whatever_buffer_of_u32(hash_tokens: object) -> None:
    assert callable(hash_tokens)
    want = hash_tokens(token_bytes(range(40)), 16)
    assert len(want) == 2 * 8
    assert hash_tokens(np.arange(40, dtype=np.uint32), 16) == want
    assert hash_tokens(memoryview(b"x" + token_bytes(range(40)))[1:], 16) == want
    with pytest.raises(ValueError, match=r"16 bytes in items of 8 .*integers of 4 bytes; pass array\('I'\)"):
        hash_tokens(np.arange(2), 16)
    with pytest.raises(ValueError, match="5 bytes"):
        hash_tokens(b"12345", 16)
    with pytest.raises(TypeError):
        hash_tokens([1, 2], 16)
    for block_size in (0, -1):
        with pytest.raises(ValueError, match=f"block size {block_size}; it is at least 1"):
            hash_tokens(b"", block_size)


def test_the_packed_form_is_native_where_built_and_wanted() -> None:
    wanted = native is not None and hashing.native.WANTED
    assert sequence_hash_bytes is (native.sequence_hash_bytes if wanted else plain_sequence_hash_bytes)


@given(st.lists(u64, max_size=20))
def test_hashes_are_packed_and_unpacked(hashes: list[int]) -> None:
    assert list(unpack_hashes(pack_hashes(hashes))) == hashes


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    state = 1234567
    values = [mix64(state + (i + 1) * 0x9E3779B97F4A7C15) for i in range(3)]
    assert values == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(u64, u64)
def test_a_term_of_a_digest_tells_prefixes_and_tiers_apart(one: int, other: int) -> None:
    assert (digest_term(one) == digest_term(other)) == (one == other)
    assert len({digest_term(one, tier) for tier in range(4)}) == 4
