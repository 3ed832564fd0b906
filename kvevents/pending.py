"""Hold live batches that cannot be applied yet. Pure; bounded for each source, and for all sources together."""

from collections.abc import Iterator


class PendingBudget:
    """The payload bytes that all sources of a follower may hold back together."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0


class PendingBatches:
    """The batches of one source, by number. The oldest make room, but only for batches of their own source."""

    def __init__(self, max_batches: int, max_bytes: int, budget: PendingBudget) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._budget = budget
        self._payloads: dict[int, bytes] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._payloads)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._payloads))

    @property
    def highest(self) -> int | None:
        return max(self._payloads, default=None)

    def get(self, seq: int) -> bytes | None:
        return self._payloads.get(seq)

    def keep(self, seq: int, payload: bytes) -> list[int]:
        """Keep a batch; return the numbers that had to make room. `seq` itself may be among them."""
        self.forget(seq)
        self._payloads[seq] = payload
        self._count(len(payload))
        gone: list[int] = []
        while self._payloads and self._is_too_large():
            gone.append(next(iter(self._payloads)))
            self.forget(gone[-1])
        return gone

    def forget(self, seq: int) -> None:
        payload = self._payloads.pop(seq, None)
        if payload is not None:
            self._count(-len(payload))

    def clear(self) -> None:
        self._payloads.clear()
        self._count(-self._num_bytes)

    def latest_run(self) -> int | None:
        """Return the first number of the newest run of batches that follow each other."""
        first = self.highest
        while first is not None and first - 1 in self._payloads:
            first -= 1
        return first

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._budget.used_bytes += num_bytes

    def _is_too_large(self) -> bool:
        over = self._num_bytes > self._max_bytes or self._budget.used_bytes > self._budget.max_bytes
        return over or len(self._payloads) > self._max_batches
