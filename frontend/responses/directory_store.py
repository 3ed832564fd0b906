"""Keep responses as files of one directory, which several frontends may share.

A file is written beside its place, synced and renamed, so that a reader never sees half of one. The time of a file says
when its response was last used; while a background response runs, its frontend renews that time again and again.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec

from kvmesh.frontend.responses import metrics
from kvmesh.frontend.responses.retention import Dropped, KeptEntry, Retention, StoreLimits
from kvmesh.frontend.responses.store import StorageError, StoredResponse, abandoned, name_of, walk_back
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

log = logging.getLogger(__name__)

LEASE_S = 10.0  # an unfinished response whose file is older has lost its frontend
THREADS = 4
MAX_WAITING = 256  # calls that are handed to the threads at a time; more wait in their own tasks
STALE_S = 600.0  # a file that was half written so long ago never gets its name
SUFFIX, CANCEL_SUFFIX, HALF_SUFFIX = ".response", ".cancel", ".half"

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredResponse)


class DirectoryStore:
    """Implements kvmesh.frontend.responses.store.ResponseStore. Files are read and written in threads."""

    def __init__(self, folder: Path, limits: StoreLimits, now_s: Callable[[], float] = time.time) -> None:
        """Open the directory, which is made if it is missing. Raise ConfigError if it cannot be used."""
        self._files = ResponseFiles(folder, limits, now_s)
        self._files.check()
        self._threads = ThreadPoolExecutor(THREADS, "responses")
        self._room = asyncio.Semaphore(MAX_WAITING)

    async def put(self, record: StoredResponse, *, is_update: bool = False) -> None:
        await self._in_thread(lambda: self._files.put(record, is_update))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return await self._in_thread(lambda: self._files.get(name_of(owner, response_id)))

    async def reuse(self, owner: str, response_id: str) -> StoredResponse | None:
        return await self._in_thread(lambda: self._files.reuse(name_of(owner, response_id)))

    async def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        return await self._in_thread(lambda: self._files.chain(owner, response_id))

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._in_thread(lambda: self._files.delete(name_of(owner, response_id)))

    async def ask_to_cancel(self, owner: str, response_id: str) -> None:
        await self._in_thread(lambda: self._files.mark(name_of(owner, response_id)))

    async def beat(self, running: Collection[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        return await self._in_thread(lambda: self._files.beat(running)) if running else ()

    async def sweep(self) -> None:
        await self._in_thread(self._files.sweep)

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._room:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
            except OSError as error:
                raise StorageError(f"the store of responses failed: {error.strerror}") from error


class ResponseFiles:
    """The files of a DirectoryStore. Methods block, and may be called by several threads."""

    def __init__(self, folder: Path, limits: StoreLimits, now_s: Callable[[], float]) -> None:
        self._folder = folder
        self._now_s = now_s
        self._lock = Lock()  # for the account
        self._retention = Retention(limits)

    def check(self) -> None:
        """Make the directory, see that it can be written, and take account of it. Raise ConfigError."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._half_written(b"")
            probe.unlink()
            self.sweep()
        except OSError as error:
            raise ConfigError(
                f"cannot keep responses in {self._folder}: {error.strerror}",
                hint="give --responses-store dir:PATH a directory that this user can write",
            ) from error

    def put(self, record: StoredResponse, is_update: bool) -> None:
        """Raise OSError, StorageError."""
        name, data = name_of(record.owner, record.id), _encoder.encode(record)
        if len(data) > self._retention.limits.max_bytes:
            raise StorageError(f"the response has {len(data)} bytes, more than the store holds")
        half = self._half_written(data)
        try:
            if is_update and not self._path(name).exists():  # another frontend has deleted it meanwhile
                half.unlink()
                return
            half.replace(self._path(name))
        except OSError:
            half.unlink(missing_ok=True)
            raise
        with self._lock:
            self._drop(self._retention.put(name, len(data), self._now_s()))

    def get(self, name: str) -> StoredResponse | None:
        path = self._path(name)
        try:
            used_s = path.stat().st_mtime
            record = _decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            log.error("the stored response %s cannot be read: %s", path, error)
            return None
        age_s = self._now_s() - used_s
        if self._retention.is_expired(used_s, self._now_s()):
            return None
        return abandoned(record) if record.is_unfinished and age_s > LEASE_S else record

    def reuse(self, name: str) -> StoredResponse | None:
        if (found := self.get(name)) is not None:
            self._use(name)
        return found

    def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Raise PreviousResponseError."""
        found = walk_back(lambda wanted: self.get(name_of(owner, wanted)), response_id)
        for record in found:
            self._use(name_of(owner, record.id))
        return found

    def delete(self, name: str) -> bool:
        with self._lock:
            self._retention.remove(name)
            self._count()
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def mark(self, name: str) -> None:
        self._path(name, CANCEL_SUFFIX).touch(mode=0o600)

    def beat(self, running: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        marked = []
        for owner, response_id in running:
            name = name_of(owner, response_id)
            self._use(name)
            with suppress(FileNotFoundError):
                self._path(name, CANCEL_SUFFIX).unlink()
                marked.append((owner, response_id))
        return marked

    def sweep(self) -> None:
        """Take account of all files, those of other frontends too, and remove what is too old or too much."""
        entries = list(self._scan())
        with self._lock:
            self._retention.replace_all(entries)
            self._drop(self._retention.drop_old(self._now_s()))

    def _scan(self) -> Iterator[KeptEntry]:
        with os.scandir(self._folder) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    found = file.stat(follow_symlinks=False)
                    stem, suffix = os.path.splitext(file.name)
                    if suffix == SUFFIX:
                        yield KeptEntry(stem, found.st_size, found.st_mtime)
                    elif suffix in (HALF_SUFFIX, CANCEL_SUFFIX) and self._now_s() - found.st_mtime > STALE_S:
                        os.unlink(file.path)

    def _use(self, name: str) -> None:
        now_s = self._now_s()
        with suppress(FileNotFoundError):
            os.utime(self._path(name), (now_s, now_s))
        with self._lock:
            self._retention.use(name, now_s)

    def _half_written(self, data: bytes) -> Path:
        """Return a new file with the data, which is on the disk. Raise OSError, and leave no file then."""
        path = self._path(secrets.token_hex(16), HALF_SUFFIX)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            now_s = self._now_s()
            os.utime(path, (now_s, now_s))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def _path(self, name: str, suffix: str = SUFFIX) -> Path:
        return self._folder / (name + suffix)

    def _drop(self, dropped: Dropped) -> None:
        for name in dropped.names:
            self._path(name).unlink(missing_ok=True)
        metrics.count_dropped(dropped)
        self._count()

    def _count(self) -> None:
        metrics.count_kept(len(self._retention), self._retention.total_bytes)
