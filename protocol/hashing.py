"""Name prefixes by XXH3 hashes of blocks and of chains of blocks.

The values equal those of the field's other KV routers, so indices can be compared entry by entry:
only full blocks; tokens as little-endian u32; `seed = 1337`, plus xxh3(lora, 0) and xxh3(salt, 1) where given;
`sequence[0] = block[0]`, `sequence[i] = xxh3(LE64(sequence[i-1]) + LE64(block[i]), 1337)`.

Long lists of hashes travel packed, as little-endian u64 bytes.
"""

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Literal, TypeAlias

from xxhash import xxh3_64_intdigest

from kvmesh.protocol import native
from kvmesh.protocol.ids import BlockHash, SequenceHash

CHAIN_SEED = 1337
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_PAIR = Struct("<QQ")
TIER_MARK = 0x9E37_79B9_7F4A_7C15  # odd, so that marks of different tiers differ

Buffer: TypeAlias = "bytes | bytearray | memoryview | array[int]"  # any buffer, a numpy array too


def hash_seed(lora: str | None = None, salt: str | None = None) -> int:
    """Return the seed (u64) that keeps prefixes of different adapters and tenants apart."""
    seed = CHAIN_SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode(), 1)
    return seed & _U64


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Pack `tokens` as little-endian u32 [len(tokens) * 4 bytes]. Raises OverflowError outside u32."""
    packed = array("I", tokens)
    if packed.itemsize != 4:  # pragma: no cover - no such platform is supported
        raise RuntimeError("array('I') is not 32 bit here")
    return packed.tobytes()


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Pack `hashes` as little-endian u64. Raises OverflowError outside u64."""
    return array("Q", hashes).tobytes()


def unpack_hashes(packed: Buffer) -> memoryview:
    """Return a view of packed u64 as integers. Raises ValueError if `packed` is not made of 8-byte integers."""
    return _integers(packed, 8, "Q")


def block_hashes(tokens: Sequence[int], block_size: int, seed: int = CHAIN_SEED) -> list[BlockHash]:
    """Hash each full block of `block_size` tokens by itself. A partial block at the end has no hash.

    `tokens` are integers, or the bytes that `token_bytes` makes of them.
    """
    data = memoryview(tokens if isinstance(tokens, bytes | bytearray | memoryview) else token_bytes(tokens)).cast("B")
    stride = 4 * block_size
    full_bytes = len(data) - len(data) % stride
    return [BlockHash(xxh3_64_intdigest(data[start : start + stride], seed)) for start in range(0, full_bytes, stride)]


def extend_chain(parent: SequenceHash | None, blocks: Sequence[BlockHash]) -> list[SequenceHash]:
    """Return the sequence hashes of `blocks` that follow `parent` (None: they start a sequence)."""
    chain: list[SequenceHash] = []
    for block in blocks:
        parent = (
            SequenceHash(block)
            if parent is None
            else SequenceHash(xxh3_64_intdigest(_PAIR.pack(parent, block), CHAIN_SEED))
        )
        chain.append(parent)
    return chain


def sequence_hashes(tokens: Sequence[int], block_size: int, seed: int = CHAIN_SEED) -> list[SequenceHash]:
    """Return the sequence hash of every full block of `tokens`, in order."""
    return extend_chain(None, block_hashes(tokens, block_size, seed))


def plain_sequence_hash_bytes(
    tokens: Buffer, block_size: int, seed: int = CHAIN_SEED, parent: SequenceHash | None = None
) -> bytes:
    """Return the packed sequence hashes of the blocks that follow `parent`.

    `tokens` are u32, or the bytes that `token_bytes` makes of them.

    Raises ValueError for other integers.
    """
    if block_size < 1:
        raise ValueError(f"block size {block_size}; it is at least 1")
    return pack_hashes(extend_chain(parent, block_hashes(u32_bytes(tokens), block_size, seed)))


if TYPE_CHECKING or not native.WANTED:
    sequence_hash_bytes = plain_sequence_hash_bytes
else:
    try:
        from kvmesh.protocol._native import sequence_hash_bytes
    except ImportError:
        sequence_hash_bytes = plain_sequence_hash_bytes


def u32_bytes(tokens: Buffer) -> memoryview:
    """Return the bytes of a buffer of u32. Raises ValueError if the buffer is not made of 4-byte integers."""
    return _integers(tokens, 4, "I").cast("B")


def mix64(value: int) -> int:
    """Mix all bits of a u64 (the finaliser of splitmix64)."""
    value &= _U64
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & _U64
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & _U64
    return value ^ (value >> 31)


def digest_term(sequence_hash: int, tier: int = 0) -> int:
    """Return the term that one prefix in one tier (0: the device) adds to the digest of a cache.

    A digest is the sum of its terms mod 2**64: the order does not matter, and to remove a prefix is to subtract.
    """
    return mix64((sequence_hash + (tier + 1) * TIER_MARK) & _U64)


def _integers(buffer: Buffer, size: int, code: Literal["I", "Q"]) -> memoryview:
    view = memoryview(buffer)
    if not view.nbytes:
        return memoryview(b"").cast(code)
    if view.itemsize not in (1, size) or view.nbytes % size or not view.c_contiguous:
        found = f"{view.nbytes} bytes in items of {view.itemsize}"
        raise ValueError(f"{found} are not contiguous integers of {size} bytes; pass array({code!r}) or packed bytes")
    return view.cast("B").cast(code)
