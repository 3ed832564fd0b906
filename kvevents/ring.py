"""Keep the latest published batches for followers that missed some. Pure; bounded by batches and bytes."""

from collections import deque
from collections.abc import Iterator
from itertools import islice


class ReplayRing:
    """The payloads of consecutive numbers. The oldest is dropped first, the newest is always kept."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self.num_bytes = 0
        self.next_seq = 0

    @property
    def first_seq(self) -> int:
        """The number of the oldest batch kept; `next_seq` if there is none."""
        return self.next_seq - len(self._payloads)

    def append(self, payload: bytes) -> int:
        """Keep `payload` under the next number, and return the number."""
        self._payloads.append(payload)
        self.num_bytes += len(payload)
        while len(self._payloads) > 1 and self._is_too_large():
            self.num_bytes -= len(self._payloads.popleft())
        self.next_seq += 1
        return self.next_seq - 1

    def since(self, seq: int, limit: int) -> Iterator[tuple[int, bytes]]:
        """Return at most `limit` kept batches from `seq` on."""
        start = min(max(seq - self.first_seq, 0), len(self._payloads))
        first = self.first_seq + start
        return enumerate(islice(self._payloads, start, start + limit), first)

    def _is_too_large(self) -> bool:
        return len(self._payloads) > self._max_batches or self.num_bytes > self._max_bytes
