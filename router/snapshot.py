"""The bytes of an index: what `dump` writes and `load` reads, in either implementation. Pure.

A snapshot names each prefix once, parents before children, and then lists the names of each holder with the places of
their prefixes. It ends with a checksum.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError

from xxhash import xxh3_64_intdigest

from kvmesh.protocol.errors import WireError

NO_PARENT = 0xFFFF_FFFF
_MAGIC = b"kvprefix"
_VERSION = 1
_HEADER = Struct("<8sIIQ")  # magic, version, holders, prefixes
_HOLDER = Struct("<HIQ")  # bytes of the worker id, dp rank, names


@dataclass(frozen=True, slots=True)
class HolderNames:
    """The blocks of one holder: `names` (u64), the `places` of their prefixes, and the `tiers` of each as a bit set."""

    worker_id: str
    dp_rank: int
    names: Sequence[int]
    places: Sequence[int]
    tiers: bytes


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
    """The content of an index. prefixes: u64 [n]; parents: the place of each prefix's parent, or NO_PARENT."""

    prefixes: Sequence[int]
    parents: Sequence[int]
    holders: Sequence[HolderNames]


def write(snapshot: IndexSnapshot) -> bytes:
    """Return the bytes of a snapshot."""
    parts = [
        _HEADER.pack(_MAGIC, _VERSION, len(snapshot.holders), len(snapshot.prefixes)),
        array("Q", snapshot.prefixes).tobytes(),
        array("I", snapshot.parents).tobytes(),
    ]
    for held in snapshot.holders:
        worker = held.worker_id.encode()
        parts += [_HOLDER.pack(len(worker), held.dp_rank, len(held.names)), worker]
        parts += [array("Q", held.names).tobytes(), array("I", held.places).tobytes(), held.tiers]
    body = b"".join(parts)
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def read(data: bytes, max_names: int) -> IndexSnapshot:
    """Return the snapshot that these bytes are. No holder may have more than `max_names`. Raises ValueError."""
    body = data[:-8]
    try:
        magic, version, num_holders, num_prefixes = _HEADER.unpack_from(body)
    except StructError as error:
        raise ValueError(str(error)) from error
    if (magic, version) != (_MAGIC, _VERSION) or xxh3_64_intdigest(body).to_bytes(8, "little") != data[-8:]:
        raise ValueError(f"{len(data)} bytes without the mark of version {_VERSION}, or damaged")
    source = _Source(body, _HEADER.size)
    prefixes, parents = source.integers("Q", num_prefixes), source.integers("I", num_prefixes)
    for place, parent in enumerate(parents):
        if parent != NO_PARENT and parent >= place:
            raise ValueError(f"prefix {place} follows prefix {parent}")
    holders = [_read_holder(source, num_prefixes, max_names) for _ in range(num_holders)]
    if source.remaining:
        raise ValueError(f"{source.remaining} bytes after the last holder")
    return IndexSnapshot(prefixes, parents, holders)


def unreadable(error: Exception) -> WireError:
    return WireError(f"no snapshot of an index: {error}", hint="take another from a running router")


def _read_holder(source: "_Source", num_prefixes: int, max_names: int) -> HolderNames:
    id_bytes, dp_rank, num_names = _HOLDER.unpack(source.take(_HOLDER.size))
    worker_id = source.take(id_bytes).decode()
    names, places = source.integers("Q", num_names), source.integers("I", num_names)
    tiers = source.take(num_names)
    if not 0 < num_names <= max_names or len(set(names)) != num_names:
        raise ValueError(f"{num_names} names of {worker_id} rank {dp_rank}, or names that come twice")
    if max(places) >= num_prefixes:
        raise ValueError(f"a prefix of {worker_id} rank {dp_rank} is none of {num_prefixes}")
    return HolderNames(worker_id, dp_rank, names, places, tiers)


class _Source:
    """Reads a snapshot from front to back. Raises ValueError where it ends too early."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._offset = offset

    @property
    def remaining(self) -> int:
        return len(self._data) - self._offset

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.remaining:
            raise ValueError(f"{self.remaining} bytes where {num_bytes} must follow")
        self._offset += num_bytes
        return self._data[self._offset - num_bytes : self._offset]

    def integers(self, code: str, count: int) -> "array[int]":
        numbers = array(code)
        numbers.frombytes(self.take(count * numbers.itemsize))
        return numbers
