"""Write and check the objects of shared storage: blocks of one prefix that follow each other. Pure.

    magic [8] · version u32 · blocks u32 · bytes of all headers u64 · for each block: length u32, header · payloads

A header is that of `kvcache/tiers/slots.py` and proves its block. An object's name is the content address of its last
block and the number of its blocks, so equal blocks have equal names, whoever writes them.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvmesh.kvcache.tiers.index import TierBlock
from kvmesh.kvcache.tiers.slots import SlotBody, least_header_bytes, read_header
from kvmesh.kvcache.tiers.store import TierCorruptError

OBJECT_BYTES = 4 << 20  # of the payloads of one object, unless one block is larger
HEAD_BYTES = 64 << 10  # that are read first: most heads are shorter
MOST_HEAD_BYTES = 16 << 20
BUNDLE_VERSION = 1
_MAGIC = b"kvmeshKO"
_START = struct.Struct("<8sIIQ")
_LENGTH = struct.Struct("<I")


def bundle_name(blocks: Sequence[TierBlock]) -> str:
    """Return the name of the object of these blocks."""
    return f"{blocks[-1].address.hex()}-{len(blocks)}"


def chains(blocks: Sequence[TierBlock], block_bytes: int) -> list[Sequence[TierBlock]]:
    """Return the blocks in parts that make an object each: of one prefix, behind each other."""
    most, parts = max(1, OBJECT_BYTES // block_bytes), list[list[TierBlock]]()
    for block in blocks:
        last = parts[-1][-1] if parts else None
        if last is not None and block.parent == last.name and len(parts[-1]) < most:
            parts[-1].append(block)
        else:
            parts.append([block])
    return list[Sequence[TierBlock]](parts)


def pack_head(headers: Sequence[bytes]) -> bytes:
    """Return what an object with these headers begins with; its payloads follow."""
    packed = b"".join([_LENGTH.pack(len(header)) + header for header in headers])
    return _START.pack(_MAGIC, BUNDLE_VERSION, len(headers), len(packed)) + packed


def head_bytes(start: bytes) -> int:
    """Return how long the head of an object is that begins so. Raise TierCorruptError if it is none."""
    if len(start) < _START.size:
        raise TierCorruptError("no object of KV blocks")
    magic, version, count, length = _START.unpack_from(start)
    if magic != _MAGIC or version != BUNDLE_VERSION or not count or length > MOST_HEAD_BYTES:
        raise TierCorruptError("no object of KV blocks")
    return _START.size + int(length)


def read_head(name: str, head: bytes, fingerprint: bytes, epoch: bytes, block_bytes: int) -> list[SlotBody]:
    """Return what the headers of an object say. Raise TierCorruptError unless all are right and belong together."""
    bodies = [read_header(header, fingerprint, epoch) for header in _headers(head)]
    if bundle_name([body.block() for body in bodies]) != name:
        raise TierCorruptError("an object of KV blocks is not what its name says")
    if any(body.payload_bytes != block_bytes for body in bodies):
        raise TierCorruptError("the KV blocks of an object have another size")
    if any(body.parent != before.name for before, body in pairwise(bodies)):
        raise TierCorruptError("the KV blocks of an object do not follow each other")
    return bodies


def _headers(head: bytes) -> list[NDArray[np.uint8]]:
    """Return the headers of an object, at least one. Raise TierCorruptError."""
    end, offset, headers = head_bytes(head), _START.size, list[NDArray[np.uint8]]()
    while offset + _LENGTH.size <= min(end, len(head)):
        [length] = _LENGTH.unpack_from(head, offset)
        headers.append(np.frombuffer(head[offset + _LENGTH.size : offset + _LENGTH.size + length], np.uint8))
        offset += _LENGTH.size + length
    _, _, count, _ = _START.unpack_from(head)
    if offset != end or end != len(head) or len(headers) != count:
        raise TierCorruptError("the head of an object of KV blocks is cut off")
    if any(header.nbytes < least_header_bytes() for header in headers):
        raise TierCorruptError("no header of a KV block")
    return headers
