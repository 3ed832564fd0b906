"""Token ids of pieces of text that were tokenized before."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence

ENTRY_BYTES = 200  # what an entry costs besides its text and its ids: the key's tuple, two slots, a link


class PieceCache:
    """Piece of text -> its token ids (u32, little endian), the least recently used go first. Thread-safe.

    The piece itself is the key, so a hit is never a mistake. `salt` keeps tenants apart: with another salt the same
    piece is another entry, so nobody can tell from the time an answer takes what others have asked.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0  # pieces
        self.misses = 0
        self._ids: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, pieces: Sequence[str], salt: str) -> list[bytes | None]:
        """The ids of each piece, None where it is not known."""
        ids = self._ids
        found: list[bytes | None] = []
        hits = 0
        with self._lock:
            for piece in pieces:
                key = (salt, piece)
                known = ids.get(key)
                if known is not None:
                    ids.move_to_end(key)
                    hits += 1
                found.append(known)
            self.hits += hits
            self.misses += len(pieces) - hits
        return found

    def put(self, pieces: Sequence[str], ids: Sequence[bytes], salt: str) -> None:
        """Keep what fits; a piece that would take an eighth of the whole cache is not kept."""
        with self._lock:
            for piece, piece_ids in zip(pieces, ids, strict=True):
                self._put((salt, piece), piece_ids)
            while self.bytes > self.max_bytes:
                self.bytes -= _size_bytes(*self._ids.popitem(last=False))

    def _put(self, key: tuple[str, str], ids: bytes) -> None:
        size_bytes = _size_bytes(key, ids)
        if key in self._ids or size_bytes * 8 > self.max_bytes:
            return
        self._ids[key] = ids
        self.bytes += size_bytes


def _size_bytes(key: tuple[str, str], ids: bytes) -> int:
    return ENTRY_BYTES + sys.getsizeof(key[0]) + sys.getsizeof(key[1]) + sys.getsizeof(ids)
