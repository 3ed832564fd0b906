"""Names for prefixes: XXH3 hashes of blocks and of chains of blocks.

The values equal those of the field's other KV routers, so indices can be compared entry by entry:
only full blocks; tokens as little-endian u32; `seed = 1337`, plus xxh3(lora, 0) and xxh3(salt, 1) where given;
`sequence[0] = block[0]`, `sequence[i] = xxh3(LE64(sequence[i-1]) + LE64(block[i]), 1337)`.
"""

from array import array
from collections.abc import Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

from protocol.ids import BlockHash, SequenceHash

CHAIN_SEED = 1337
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_PAIR = Struct("<QQ")


def hash_seed(lora: str | None = None, salt: str | None = None) -> int:
    """The seed that keeps prefixes of different adapters and tenants apart (u64)."""
    seed = CHAIN_SEED
    if lora:
        seed += xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode(), 1)
    return seed & _U64


def token_bytes(tokens: Sequence[int]) -> bytes:
    """`tokens` as little-endian u32 [len(tokens) * 4 bytes]. Raises OverflowError outside u32."""
    packed = array("I", tokens)
    if packed.itemsize != 4:  # pragma: no cover - no such platform is supported
        raise RuntimeError("array('I') is not 32 bit here")
    return packed.tobytes()


def block_hashes(tokens: Sequence[int], block_size: int, seed: int = CHAIN_SEED) -> list[BlockHash]:
    """Hash each full block of `block_size` tokens by itself; a trailing partial block has no hash."""
    data = memoryview(token_bytes(tokens))
    stride = 4 * block_size
    full_bytes = len(data) - len(data) % stride
    return [BlockHash(xxh3_64_intdigest(data[start : start + stride], seed)) for start in range(0, full_bytes, stride)]


def extend_chain(parent: SequenceHash | None, blocks: Sequence[BlockHash]) -> list[SequenceHash]:
    """Sequence hashes of `blocks` that follow `parent` (None: they start a sequence)."""
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
    """Sequence hash of every full block of `tokens`, in order."""
    return extend_chain(None, block_hashes(tokens, block_size, seed))
