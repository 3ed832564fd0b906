"""Discovery through a directory on one host or one shared volume, without a server.

Each key is a file. Its owner sets the file's time again and again, from an OS thread, which an overloaded event loop
cannot hold up. A reader lets a key lapse when it has not seen that time change for a whole lease of its own clock: no
two clocks need to agree. A file is written beside its place and renamed, so that nobody reads half of it. To withdraw
a key its owner empties the file and removes it a moment later.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from urllib.parse import quote, unquote

from kvmesh.mesh.discovery.board import Board, Change
from kvmesh.mesh.discovery.place import Contact, SearchPlace
from kvmesh.mesh.discovery.store import Registration
from kvmesh.mesh.discovery.view import KeyView
from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)

LEASE_S = 5.0
POLL_S = 0.1  # a stat of the directory; its mtime changes when a key comes, changes or goes
SUSPENDED_S = 2.0  # nobody has looked for so long: this process did not run
CHECKS_AFTER_CHANGE = 2  # of all times: a file may have got the inode of the one that it replaced, so it is read again
WITHDRAWN_S = 0.3  # an empty file stays so long: watchers poll more often
LITTER_S = 600.0  # a file that nobody has renewed for so long is removed by whoever has watched it
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})  # it passes: no reason for a process to end
_KEY_SUFFIX, _NEW_SUFFIX = ".key", ".new"  # only files with these are ours to read or to remove


@dataclass(slots=True)
class _Found:
    """A file as it was last seen."""

    key: str  # "": a file that is not in place yet
    inode: int  # as the directory says
    mtime_ns: int
    since_s: float  # when this time was first seen, by our clock
    value: bytes


@contextlib.contextmanager
def leaving_no_folder(discovery_url: str) -> Iterator[None]:
    """Remove the folders of a discovery directory that appear while the block runs, if they are empty at its end.

    A frontend that uses the directory has its card there, so it keeps the directory.
    """
    scheme, _, name = discovery_url.partition(":")
    path = Path(name).absolute()
    new = [folder for folder in (path, *path.parents) if not folder.exists()] if scheme == "file" else []
    try:
        yield
    finally:
        for folder in new:  # the deepest first
            with contextlib.suppress(OSError):
                folder.rmdir()


class FileDiscovery:
    def __init__(self, directory: str, lease_s: float = LEASE_S) -> None:
        self._directory = Path(directory)
        self._own: dict[str, bytes] = {}
        self._unwritten: set[str] = set()  # of our keys, those that are written when the disk has room
        self._withdrawn: dict[str, float] = {}  # our keys -> when their empty files are to go
        self._lock = threading.Lock()  # guards our files between the loop and the thread
        self._lease_s = lease_s
        self._cards = _CardFiles(self._directory, lease_s)
        self._contact = Contact(f"file:{self._directory.absolute()}")
        self._board = Board()
        self._is_watched = False  # most processes, such as workers, only register: they need not read the directory
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def put(self, key: str, value: bytes) -> Registration:
        self._ensure_thread()
        try:
            await asyncio.to_thread(self._write, key, value)
        except OSError as error:
            raise self._unusable("written to", error) from error
        return Registration(key, self._withdraw)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        self._ensure_thread()
        self._is_watched = True
        async for change in self._board.watch(prefix):
            yield change

    async def _withdraw(self, key: str) -> None:
        await asyncio.to_thread(self._empty, key)

    def where(self) -> SearchPlace:
        return self._contact.place

    async def close(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._finish)
        self._board.close()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        for key in list(self._own):
            self._empty(key)
        if self._withdrawn:
            time.sleep(max(0.0, max(self._withdrawn.values()) - time.monotonic()))
            self._remove_withdrawn(time.monotonic())

    def _ensure_thread(self) -> None:
        if self._thread is not None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            os.listdir(self._directory)
        except OSError as error:
            raise self._unusable("read", error) from error
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    def _unusable(self, what_for: str, error: OSError) -> ConfigError:
        return ConfigError(
            f"the discovery directory {self._directory} cannot be {what_for}: {error.strerror}",
            hint="give this user access to it, or set --discovery file:<another directory>",
        )

    # --- our own keys ---------------------------------------------------------------------------------

    def _write(self, key: str, value: bytes) -> None:
        with self._lock:
            try:
                self._write_file(key, value)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                log.warning("%s is written when there is room: %s", key, error)
                self._unwritten.add(key)
            self._own[key] = value
            self._withdrawn.pop(key, None)

    def _write_file(self, key: str, value: bytes) -> None:
        beside = self._directory / f"{secrets.token_hex(8)}{_NEW_SUFFIX}"
        try:
            beside.write_bytes(value)
            beside.replace(self._path(key))
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self._unwritten.discard(key)

    def _empty(self, key: str) -> None:
        with self._lock:
            self._unwritten.discard(key)
            if self._own.pop(key, None) is not None:
                with contextlib.suppress(OSError):  # its lease ends soon anyway
                    self._write_file(key, b"")
                    self._withdrawn[key] = time.monotonic() + WITHDRAWN_S

    def _remove_withdrawn(self, now_s: float) -> None:
        with self._lock:
            for key in [key for key, at_s in self._withdrawn.items() if at_s <= now_s]:
                del self._withdrawn[key]
                with contextlib.suppress(OSError):
                    self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._directory / (quote(key, safe="") + _KEY_SUFFIX)

    def _renew(self) -> None:
        """Renew all our keys. Raise OSError, if one of them cannot be renewed, after the others are."""
        problem: OSError | None = None
        with self._lock:
            for key, value in self._own.items():
                try:
                    self._renew_file(key, value)
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem

    def _renew_file(self, key: str, value: bytes) -> None:
        if key in self._unwritten:
            self._write_file(key, value)
            return
        try:
            os.utime(self._path(key))
        except FileNotFoundError:  # somebody has removed it
            self._write_file(key, value)

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Renew our keys, and show the present ones to the loop if somebody watches."""
        renew_s = 0.0
        complaint = ""
        while not self._stop.wait(POLL_S):
            now_s = time.monotonic()
            try:
                if now_s >= renew_s:
                    self._renew()
                    renew_s = now_s + self._lease_s / 3
                self._remove_withdrawn(now_s)
                if self._is_watched and self._cards.look(now_s):
                    self._show()
                self._contact.on_read()
            except OSError as error:
                self._contact.on_failure(time.time())
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("the discovery directory %s cannot be used: %s", self._directory, error)
                with contextlib.suppress(
                    OSError
                ):  # without the parents: the folder of a killed mesh must not come back
                    self._directory.mkdir(exist_ok=True)
                continue
            complaint = ""

    def _show(self) -> None:
        assert self._loop is not None
        view = self._cards.view
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._board.show, view.present(), view.lapsed())


class _CardFiles:
    """Read the directory. Times are those of this process's monotonic clock.

    A file is replaced, never changed in place. So inodes and times say which files have to be read: a file may have the
    inode of the one before the last, if it was replaced twice between two looks. The files are listed when the
    directory has another time, and three times per lease.
    """

    def __init__(self, directory: Path, lease_s: float) -> None:
        self.view = KeyView(lease_s)
        self._directory = directory
        self._lease_s = lease_s
        self._files: dict[str, _Found] = {}
        self._directory_mtime = -1
        self._is_settling = False
        self._check_s = 0.0  # when to look at the times of all files
        self._changed_for = 0  # so many of these checks read what has another time
        self._looked_s = 0.0
        self._shown: dict[str, bytes] | None = None

    def look(self, now_s: float) -> bool:
        """Return whether the present keys have changed. Raises OSError if the directory cannot be read."""
        self._forgive(now_s)
        mtime = os.stat(self._directory).st_mtime_ns
        is_changed, self._directory_mtime = mtime != self._directory_mtime, mtime
        # the next change may bear the same time: the directory is listed once more after it seems to rest
        is_listed, self._is_settling = is_changed or self._is_settling, is_changed
        if is_listed:
            self._changed_for = CHECKS_AFTER_CHANGE
        if not is_listed and now_s < self._check_s:
            return False
        self._scan(now_s)
        self._sort(now_s)
        self.view.on_time(now_s)
        present = self.view.present()
        is_new, self._shown = present != self._shown, present
        return is_new

    def _forgive(self, now_s: float) -> None:
        """Exempt from all leases the time in which nobody looked, such as that of a suspended process."""
        gap_s = now_s - self._looked_s
        if gap_s > max(self._lease_s / 2, SUSPENDED_S):
            for found in self._files.values():
                found.since_s += gap_s
        self._looked_s = now_s

    def _scan(self, now_s: float) -> None:
        """Read the files that are new, and those that have another time."""
        is_check = now_s >= self._check_s
        before, self._files = self._files, {}
        with os.scandir(self._directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_key = entry.name.endswith((_KEY_SUFFIX, _NEW_SUFFIX))
                if is_key and (found := self._seen(entry, before.get(entry.name), now_s)) is not None:
                    self._files[entry.name] = found
        newest_ns = max((found.mtime_ns for found in self._files.values()), default=0)
        for name in self._files.keys() - before.keys():
            found = self._files[name]  # a file of a dead process may be old: the others show what time it is
            found.since_s -= min((newest_ns - found.mtime_ns) / 1e9, self._lease_s)
        if is_check:
            self._check_s = now_s + self._lease_s / 3
            self._changed_for = max(0, self._changed_for - 1)

    def _seen(self, entry: os.DirEntry[str], found: _Found | None, now_s: float) -> _Found | None:
        """Return what a file says now; None: it is none of ours, or went meanwhile."""
        try:
            status = entry.stat()
            if not S_ISREG(status.st_mode):  # reading a pipe could block
                return None
            if found is not None and found.inode == entry.inode():
                if found.mtime_ns == status.st_mtime_ns:
                    return found
                if not self._changed_for:  # its owner has renewed it
                    found.mtime_ns, found.since_s = status.st_mtime_ns, now_s
                    return found
            is_key = entry.name.endswith(_KEY_SUFFIX)
            key = unquote(entry.name.removesuffix(_KEY_SUFFIX)) if is_key else ""
            value = (self._directory / entry.name).read_bytes() if is_key else b""
        except OSError as error:
            log.debug("discovery skips %s: %s", entry.name, error)
            return None
        return _Found(key, entry.inode(), status.st_mtime_ns, now_s, value)

    def _sort(self, now_s: float) -> None:
        """Put the files among the listed keys, or let their keys lapse."""
        listed: dict[str, bytes] = {}
        lapsed: list[str] = []
        for name, found in self._files.items():
            ends_s = found.since_s + self._lease_s
            if now_s - found.since_s >= LITTER_S:
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()
            elif found.key and (ends_s > now_s or not found.value):
                listed[found.key] = found.value
                if found.value:
                    self._check_s = min(self._check_s, ends_s)  # its time is looked at again before it lapses
            elif found.key:
                lapsed.append(found.key)
        for key in lapsed:
            self.view.on_lapse(key)
        self.view.on_list(listed, now_s)
