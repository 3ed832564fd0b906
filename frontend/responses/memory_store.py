"""Keep responses in the memory of this process."""

import time
from collections.abc import Callable, Collection, Sequence

from kvmesh.frontend.responses import metrics
from kvmesh.frontend.responses.retention import Dropped, Retention, StoreLimits
from kvmesh.frontend.responses.store import StorageError, StoredResponse, name_of, walk_back

ENTRY_BYTES = 1024  # of Python's objects for one response, roughly


class MemoryStore:
    """Implements kvmesh.frontend.responses.store.ResponseStore."""

    def __init__(self, limits: StoreLimits, now_s: Callable[[], float] = time.time) -> None:
        self._retention = Retention(limits)
        self._records: dict[str, StoredResponse] = {}
        self._now_s = now_s

    async def put(self, record: StoredResponse, *, is_update: bool = False) -> None:
        name = name_of(record.owner, record.id)
        if is_update and name not in self._records:
            return
        size_bytes = ENTRY_BYTES + len(record.response) + len(record.input) + len(record.events)
        if size_bytes > self._retention.limits.max_bytes:  # it must not crowd out the others first
            await self.delete(record.owner, record.id)
            raise StorageError(f"the response has {size_bytes} bytes, more than the store holds")
        self._records[name] = record
        self._drop(self._retention.put(name, size_bytes, self._now_s()))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop(self._retention.drop_old(self._now_s()))
        return self._records.get(name_of(owner, response_id))

    async def reuse(self, owner: str, response_id: str) -> StoredResponse | None:
        found = await self.get(owner, response_id)
        self._retention.use(name_of(owner, response_id), self._now_s())
        return found

    async def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        now_s = self._now_s()
        self._drop(self._retention.drop_old(now_s))
        found = walk_back(lambda wanted: self._records.get(name_of(owner, wanted)), response_id)
        for record in found:
            self._retention.use(name_of(owner, record.id), now_s)
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        name = name_of(owner, response_id)
        self._retention.remove(name)
        found = self._records.pop(name, None) is not None
        self._count()
        return found

    async def ask_to_cancel(self, owner: str, response_id: str) -> None:
        """Do nothing: what runs, runs in this process."""

    async def beat(self, running: Collection[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        for owner, response_id in running:
            self._retention.use(name_of(owner, response_id), self._now_s())
        return ()

    async def sweep(self) -> None:
        self._drop(self._retention.drop_old(self._now_s()))

    async def close(self) -> None:
        self._records.clear()

    def _drop(self, dropped: Dropped) -> None:
        for name in dropped.names:
            del self._records[name]
        metrics.count_dropped(dropped)
        self._count()

    def _count(self) -> None:
        metrics.count_kept(len(self._retention), self._retention.total_bytes)
