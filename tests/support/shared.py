"""Shared storage that fails as a test says, and what is put on it."""

import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.kvcache.tiers.collect import SharedLimits
from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.objects import FolderObjects, Objects, StoredObject
from kvmesh.kvcache.tiers.shared import SharedNews, SharedStore
from kvmesh.kvcache.tiers.store import TierIoError
from kvmesh.protocol.tiers import Tier
from kvmesh.workers.shared_tier import take_news
from tests.support.disk import BLOCK, BLOCK_BYTES, FINGERPRINT

LIMITS = SharedLimits(1 << 30, 3600.0)


class FailingObjects(FolderObjects):
    """A folder whose calls fail while `errors` has their names."""

    def __init__(self, path: Path) -> None:
        self.errors: set[str] = set()
        super().__init__(path)

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise TierIoError(f"{call} fails")

    def listing(self, folder: str) -> list[StoredObject]:
        self._fail("listing")
        return super().listing(folder)

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        self._fail("read")
        return super().read(name, offset, num_bytes)

    def put(self, name: str, parts: Sequence[bytes | memoryview], over: str | None) -> bool:
        self._fail("put")
        return super().put(name, parts, over)


class Member:
    """One worker's view of shared storage, without a worker."""

    def __init__(
        self,
        path: Path,
        limits: SharedLimits = LIMITS,
        fingerprint: bytes = FINGERPRINT,
        max_blocks: int = 200,
        bucket: Objects | None = None,
    ) -> None:
        """Take a folder, or a bucket in place of it."""
        self.objects = FailingObjects(path)
        self.store = SharedStore(bucket or self.objects, fingerprint, BLOCK_BYTES, max_blocks, limits)
        self.index = TierIndex(Tier.SHARED, max_blocks, BLOCK, self.store.remove)
        self.refresh()

    def refresh(self) -> SharedNews:
        news = self.store.refresh(time.monotonic() + 60.0)
        take_news(self.index, self.store, news, FINGERPRINT, BLOCK)
        return news

    def knows(self, blocks: list[TierBlock]) -> list[bool]:
        return [self.index.get(block.name) is not None and self.store.find(block.address) for block in blocks]


def objects_in(path: Path) -> list[Path]:
    """Return the files of objects."""
    return sorted(file for file in path.glob("*/*/*") if file.is_file())
