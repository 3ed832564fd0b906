"""Discovery through a directory on one host or one shared volume, without a server.

Each key is a file, whose mtime is the lease. A file is written beside its place and renamed, so that nobody reads half
of it. Its owner touches it from an OS thread, which an overloaded event loop cannot hold up. Every process that sees a
file whose lease has passed removes the file.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from stat import S_ISREG
from urllib.parse import quote, unquote

from mesh.discovery.board import Board, Change
from mesh.discovery.store import Registration
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

LEASE_S = 5.0
POLL_S = 0.1  # a stat of the directory; its mtime changes when a key comes, changes or goes
RESCAN_S = 1.0  # a lease that passes does not change the directory's mtime
_KEY_SUFFIX, _NEW_SUFFIX = ".key", ".new"  # only files with these are ours to read or to remove


_Cache = dict[str, tuple[tuple[int, int], bytes]]  # file name -> (inode, mtime), content


class FileDiscovery:
    def __init__(self, directory: str, lease_s: float = LEASE_S) -> None:
        self._directory = Path(directory)
        self._lease_s = lease_s
        self._own: dict[str, bytes] = {}
        self._lock = threading.Lock()  # guards _own and our files between the loop and the thread
        self._board = Board()
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
        async for change in self._board.watch(prefix):
            yield change

    async def _withdraw(self, key: str) -> None:
        await asyncio.to_thread(self._remove, key)

    async def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        for key in list(self._own):
            self._remove(key)
        self._board.close()

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

    def _write(self, key: str, value: bytes) -> None:
        with self._lock:
            self._write_file(key, value)
            self._own[key] = value

    def _write_file(self, key: str, value: bytes) -> None:
        beside = self._directory / f"{secrets.token_hex(8)}{_NEW_SUFFIX}"
        beside.write_bytes(value)
        beside.replace(self._path(key))

    def _remove(self, key: str) -> None:
        with self._lock:
            if self._own.pop(key, None) is not None:
                with contextlib.suppress(OSError):  # its lease ends soon anyway
                    self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._directory / (quote(key, safe="") + _KEY_SUFFIX)

    def _run(self) -> None:
        """Run the thread: renew our leases, and show the present keys to the loop."""
        renew_at = scan_at = 0.0
        directory_mtime = -1
        shown: dict[str, bytes] | None = None
        cache: _Cache = {}
        complaint = ""
        while not self._stop.wait(POLL_S):
            now = time.monotonic()
            try:
                if now >= renew_at:
                    self._renew()
                    renew_at = now + self._lease_s / 3
                mtime = os.stat(self._directory).st_mtime_ns
                if mtime == directory_mtime and now < scan_at:
                    continue
                directory_mtime, scan_at = mtime, now + RESCAN_S
                present = self._scan(cache)
            except OSError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("the discovery directory %s cannot be used: %s", self._directory, error)
                with contextlib.suppress(OSError):
                    self._directory.mkdir(parents=True, exist_ok=True)
                continue
            complaint = ""
            if present != shown:
                shown = present
                self._show(present)

    def _show(self, present: dict[str, bytes]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._board.show, present)

    def _renew(self) -> None:
        with self._lock:
            for key, value in self._own.items():
                try:
                    os.utime(self._path(key))
                except FileNotFoundError:  # this process was suspended for longer than the lease
                    self._write_file(key, value)

    def _scan(self, cache: _Cache) -> dict[str, bytes]:
        """Read the directory and remove expired files. `cache` saves reading files that have not changed."""
        present: dict[str, bytes] = {}
        oldest = time.time() - self._lease_s
        kept: _Cache = {}
        with os.scandir(self._directory) as entries:
            ours = sorted(e.name for e in entries if e.name.endswith((_KEY_SUFFIX, _NEW_SUFFIX)))
        for name in ours:
            path = self._directory / name
            try:
                status = path.stat()
                if not S_ISREG(status.st_mode):  # reading a pipe could block
                    continue
                if status.st_mtime < oldest:
                    path.unlink()
                elif name.endswith(_KEY_SUFFIX):
                    version = (status.st_ino, status.st_mtime_ns)
                    known, value = cache.get(name, ((0, 0), b""))
                    kept[name] = (version, value if known == version else path.read_bytes())
                    present[unquote(name.removesuffix(_KEY_SUFFIX))] = kept[name][1]
            except OSError as error:  # the file went meanwhile, or is not ours
                log.debug("discovery skips %s: %s", path, error)
        cache.clear()
        cache.update(kept)
        return present
