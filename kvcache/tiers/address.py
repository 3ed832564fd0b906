"""Name a block below the device by all that its content depends on: 256 bits instead of the 64 of a sequence hash.

A 64-bit name finds a block fast, and two prefixes may share one. What leaves the device is therefore compared by its
content address and by its tokens before anybody gets it.
"""

from collections.abc import Sequence
from hashlib import blake2b

from kvmesh.protocol.hashing import token_bytes
from kvmesh.protocol.messages import KvLayout, encode

ADDRESS_BYTES = 32


def model_fingerprint(model: str, layout: KvLayout, weights: bytes = b"") -> bytes:
    """Return what all addresses of one model in one layout begin with: blocks of others are never equal.

    `weights` tells one model from another of the same name. Tiers that end with the process need it not.
    """
    return blake2b(encode((model, layout, weights)), digest_size=ADDRESS_BYTES).digest()


def root_address(fingerprint: bytes, lora: str | None, salt: str | None) -> bytes:
    """Return the address before the first block of the prompts of one adapter and one tenant."""
    return blake2b(encode((fingerprint, lora, salt)), digest_size=ADDRESS_BYTES).digest()


def content_address(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the address of the block with these tokens after the block, or the root, at `before`."""
    return blake2b(token_bytes(tokens), digest_size=ADDRESS_BYTES, key=before).digest()
