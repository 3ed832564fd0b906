"""Write and check the headers of blocks that outlive a process: each has all that finds its block again. Pure.

    magic [8] · version u32 · length of the body u32 · checksum of the body [16] · body · zeros, to whole pages

Integers are little endian, checksums XXH3-128, the body is msgpack of `SlotBody`. A header counts only if all of it is
right, and it has the checksum of its block: what was written half, changed, or comes from another model is found out.
"""

import struct
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from kvmesh.kvcache.tiers.address import ADDRESS_BYTES, content_address, root_address
from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.store import Payload, TierCorruptError, TierError
from kvmesh.protocol.hashing import hash_seed, sequence_hash_bytes, token_bytes, unpack_hashes
from kvmesh.protocol.ids import SequenceHash

PAGE_BYTES = 4096  # what direct I/O is aligned to
SLOT_VERSION = 1
_MAGIC = b"kvmeshKV"
_PREFIX = struct.Struct("<8sII16s")
_OTHER_BYTES = 1024  # of a body beside its tokens: names of adapter and tenant have limits
_CHECKSUM = Annotated[bytes, Meta(min_length=16, max_length=16)]
_ADDRESS = Annotated[bytes, Meta(min_length=ADDRESS_BYTES, max_length=ADDRESS_BYTES)]
_U64 = Annotated[int, Meta(ge=0)]


class SlotBody(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describe the block of a header."""

    fingerprint: _ADDRESS  # of model, weights and layout
    epoch: _ADDRESS  # of the store: a reset begins another one
    address: _ADDRESS
    name: _U64
    parent: _U64 | None
    tokens: bytes  # u32
    lora: str | None
    salt: str | None
    stamp: _U64  # when it was written, in ns: orders what a restart finds
    payload_bytes: _U64
    payload_checksum: _CHECKSUM

    def block(self) -> TierBlock:
        """Return the block that the header describes."""
        tokens = tuple(memoryview(self.tokens).cast("I"))
        parent = None if self.parent is None else SequenceHash(self.parent)
        return TierBlock(SequenceHash(self.name), parent, self.address, tokens, self.lora, self.salt)


_decoder = msgspec.msgpack.Decoder(SlotBody)


def pages(num_bytes: int) -> int:
    """Return the bytes of the pages that so many bytes need."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def least_header_bytes() -> int:
    """Return the bytes that every header has."""
    return _PREFIX.size


def header_bytes(block_size: int) -> int:
    """Return the bytes of a header for blocks of so many tokens."""
    return pages(_PREFIX.size + _OTHER_BYTES + 4 * block_size)


def checksum(data: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def write_header(
    into: Payload, block: TierBlock, fingerprint: bytes, epoch: bytes, stamp: int, payload: Payload
) -> bytes:
    """Write the header of a block into `into`, which is as long as a header; return the checksum of the payload.

    Raise TierError if the header is too long.
    """
    header, payload_checksum = pack_header(block, fingerprint, epoch, stamp, payload)
    if len(header) > into.nbytes:
        raise TierError(f"the header of a KV block has {len(header)} bytes, a slot has room for {into.nbytes}")
    into.data[:] = header.ljust(into.nbytes, b"\0")
    return payload_checksum


def pack_header(
    block: TierBlock, fingerprint: bytes, epoch: bytes, stamp: int, payload: Payload
) -> tuple[bytes, bytes]:
    """Return the header of a block, without the zeros at its end, and the checksum of the payload."""
    payload_checksum = checksum(payload.data)
    body = msgspec.msgpack.encode(
        SlotBody(
            fingerprint,
            epoch,
            block.address,
            int(block.name),
            None if block.parent is None else int(block.parent),
            token_bytes(block.tokens),
            block.lora,
            block.salt,
            stamp,
            payload.nbytes,
            payload_checksum,
        )
    )
    return _PREFIX.pack(_MAGIC, SLOT_VERSION, len(body), checksum(body)) + body, payload_checksum


def read_header(header: Payload, fingerprint: bytes, epoch: bytes) -> SlotBody:
    """Return what a header says. Raise TierCorruptError if it is damaged, or not of this model, layout and epoch."""
    magic, version, length, expected = _PREFIX.unpack_from(header.data)
    if magic != _MAGIC or version != SLOT_VERSION or length > header.nbytes - _PREFIX.size:
        raise TierCorruptError("no header of a KV block")
    body = header[_PREFIX.size : _PREFIX.size + length].tobytes()
    if checksum(body) != expected:
        raise TierCorruptError("the header of a KV block is damaged")
    read = _decode(body)
    if read.fingerprint != fingerprint:
        raise TierCorruptError("the KV block is of another model or layout")
    if read.epoch != epoch:
        raise TierCorruptError("the KV block was forgotten by a reset")
    if not read.tokens or len(read.tokens) % 4:
        raise TierCorruptError("the header of a KV block has no whole tokens")
    return read


def _decode(body: bytes) -> SlotBody:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise TierCorruptError(f"unreadable header of a KV block: {error}") from error


def follows(block: TierBlock, parent: TierBlock | None, fingerprint: bytes) -> bool:
    """Return whether name and address of a block are those of its tokens after its parent, or after the root."""
    before = root_address(fingerprint, block.lora, block.salt) if parent is None else parent.address
    if content_address(before, block.tokens) != block.address:
        return False
    if parent is not None and (parent.lora, parent.salt) != (block.lora, block.salt):
        return False
    above = None if parent is None else parent.name
    packed = token_bytes(block.tokens)
    [name] = unpack_hashes(sequence_hash_bytes(packed, len(block.tokens), hash_seed(block.lora, block.salt), above))
    return name == int(block.name)
