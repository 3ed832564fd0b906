"""A file of lines that never holds up the event loop and never grows beyond its limits."""

import asyncio
import logging
import os
from pathlib import Path
from typing import BinaryIO

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

FLUSH_S = 0.5  # from the first line that waits until all that wait are written
MAX_WAITING_BYTES = 8 << 20


class LineFile:
    """Append lines to a file. A thread writes them, so a slow disk delays no request.

    A file that would exceed `max_bytes` is renamed to `<path>.1`, in place of the one before. While the disk cannot
    keep up, lines beyond MAX_WAITING_BYTES are left out and counted. Use it on one event loop.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file. Raise ConfigError if it cannot be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self.lost = 0  # lines that were left out
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", hint="choose a writable file") from error
        self._size = self._file.tell()

    def put(self, line: bytes) -> None:
        """Append a line, which has no line break."""
        if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.lost += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line) + 1
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self._write_waiting(), name=f"write {self._path.name}")

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                data, lines = b"\n".join(self._waiting) + b"\n", len(self._waiting)
                self._waiting, self._waiting_bytes = [], 0
                try:
                    await asyncio.to_thread(self._write, data)
                except OSError as error:
                    self.lost += lines
                    log.warning("%d lines for %s are lost: %s", lines, self._path, error)
        finally:
            self._writing = None

    def _write(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file, self._size = self._path.open("ab", buffering=0), 0
        self._size += self._file.write(data)

    async def close(self) -> None:
        """Write the lines that wait, and close the file."""
        if self._timer is not None:
            self._timer.cancel()
            self._begin()
        if self._writing is not None:
            await self._writing
        self._file.close()
        if self.lost:
            log.warning("%d lines for %s were left out", self.lost, self._path)
