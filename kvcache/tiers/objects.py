"""The seam to storage that several workers share, and a folder as such storage.

Objects have names with slashes, are written whole, and do not change once others can see them. Calls wait for the
storage, and are made in threads.
"""

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, Protocol, TypeVar

from kvmesh.kvcache.tiers.place import BucketPlace
from kvmesh.kvcache.tiers.regular import open_regular
from kvmesh.kvcache.tiers.store import TierError, TierIoError

T = TypeVar("T")

ABSENT = ""  # the version of an object that is not there
DRAFTS = "drafts"  # folder of files that are being written
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class StoredObject(NamedTuple):
    """One object of a listing."""

    name: str
    num_bytes: int
    used_s: float  # when it was last used or written, in seconds since 1970


class MissingObjectError(TierError):
    """There is no object of that name."""

    code = "kv_tier_missing"


class Objects(Protocol):
    """Storage of named objects. All methods raise TierIoError if the storage does not do what it is asked for.

    Both kinds of storage pass tests/contracts/test_objects.py.
    """

    label: str  # of the metric that counts reads and writes
    list_every_s: float  # at least, between two listings

    def listing(self, folder: str) -> list[StoredObject]:
        """Return the objects whose names begin with `folder`, which ends with a slash or is empty."""

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Return a part of an object, less where it ends. Raise MissingObjectError."""

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Return a whole small object and its version, None if there is none."""

    def put(self, name: str, parts: Sequence[bytes | memoryview], over: str | None) -> bool:
        """Write an object, for all to see at once. `over`: only if this is its version now; None: whatever is there.

        False: something else is there, and stays.
        """

    def remove(self, name: str) -> None:
        """Remove an object. An unknown name is no error."""

    def touch(self, name: str) -> None:
        """Count an object as used, where the storage can: then it is not collected soon."""

    def close(self) -> None:
        """Free everything. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class BucketStorage:
    """Storage in buckets. An extension gives one at the seam `store`."""

    open: Callable[[BucketPlace, str, float], Objects]
    """Gets the place, the endpoint of the server ("": that of the environment), and the limit of a call in seconds."""


class FolderObjects:
    """Objects are files below a folder, readable by this user alone. The folder may be on several hosts."""

    label = "buffered"
    list_every_s = 2.0

    def __init__(self, path: Path) -> None:
        """Raise TierIoError if the folder cannot be made."""
        self._path = path
        _asked(lambda: (path / DRAFTS).mkdir(mode=0o700, parents=True, exist_ok=True), "opened")

    def listing(self, folder: str) -> list[StoredObject]:
        found = list[StoredObject]()
        _asked(lambda: self._walk(folder.rstrip("/"), found), "listed")
        return found

    def _walk(self, folder: str, into: list[StoredObject]) -> None:
        try:
            with os.scandir(self._path / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        self._walk(name, into)
                        continue
                    with suppress(FileNotFoundError):  # it was removed just now
                        stat = entry.stat(follow_symlinks=False)
                        if not S_ISREG(stat.st_mode):
                            continue
                        into.append(StoredObject(name, stat.st_size, stat.st_mtime))
        except FileNotFoundError:
            return

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        def work() -> bytes:
            file = open_regular(self._path / name, os.O_RDONLY)
            try:
                return os.pread(file, num_bytes, offset)
            finally:
                os.close(file)

        return _asked(work, "read")

    def get(self, name: str) -> tuple[bytes, str] | None:
        try:
            return _asked(lambda: self._get(self._path / name), "read")
        except MissingObjectError:
            return None

    @staticmethod
    def _get(path: Path) -> tuple[bytes, str]:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            return file.read(), _version(os.fstat(file.fileno()))

    def put(self, name: str, parts: Sequence[bytes | memoryview], over: str | None) -> bool:
        return _asked(lambda: self._put(self._path / name, parts, over), "written")

    def _put(self, path: Path, parts: Sequence[bytes | memoryview], over: str | None) -> bool:
        draft = self._path / DRAFTS / secrets.token_hex(16)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.writelines(parts)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if over is None:
                draft.replace(path)
                return True
            if over != ABSENT and not self._take_away(path, over):
                return False
            return _link(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def _take_away(self, path: Path, version: str) -> bool:
        """Remove a file if this is its version. Another one that came in between is put back."""
        aside = self._path / DRAFTS / secrets.token_hex(16)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return False
        is_mine = _version(aside.stat()) == version
        if not is_mine:
            _link(aside, path)
        aside.unlink()
        return is_mine

    def remove(self, name: str) -> None:
        _asked(lambda: (self._path / name).unlink(missing_ok=True), "removed")

    def touch(self, name: str) -> None:
        with suppress(OSError):  # a folder that is read only is collected by others, who may
            os.utime(self._path / name)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _asked(work: Callable[[], T], what: str) -> T:
    try:
        return work()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and what == "read":
            raise MissingObjectError("shared storage does not hold the object any more") from error
        raise TierIoError(f"shared storage cannot be {what}: {error.strerror or error}") from error


def _link(draft: Path, path: Path) -> bool:
    """Give a file its name if nothing else has it. Return whether it has it now."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        draft.replace(path)  # two at the same time: the later one counts, and what the other had read becomes corrupt
    return True


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_mtime_ns}"
