"""A file of lines that never holds up the event loop and never grows beyond its limits."""

import asyncio
import logging
import os
from io import FileIO
from pathlib import Path

from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # for the lines that wait, when the file is closed
FLUSH_S = 0.5  # from the first line that waits until all that wait are written
MAX_WAITING_BYTES = 8 << 20
NEWLINE = 10


class LineFile:
    """Append lines to a file. A thread writes them, so a slow disk delays no request.

    A file that would exceed `max_bytes` is renamed to `<path>.1`, in place of the one before. While the disk cannot
    keep up, lines beyond MAX_WAITING_BYTES are left out and counted; so are those that a full disk has no room for, and
    whole lines follow as soon as it has. Use it on one event loop.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file. Raise ConfigError if it cannot be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._is_torn = False  # the last line is not whole
        self.lost = 0  # lines that were left out
        try:
            self._file = opened(path)
            self._size = self._file.tell()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", hint="choose a writable file") from error

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
                lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
                data = b"\n".join(lines) + b"\n"
                written, problem = await asyncio.to_thread(self._write, data)
                if problem is not None:
                    lost = len(lines) - data.count(b"\n", 0, written)
                    self.lost += lost
                    log.warning("%d lines for %s are lost: %s", lost, self._path, problem.strerror)
        finally:
            self._writing = None

    def _write(self, data: bytes) -> tuple[int, OSError | None]:
        """Return how many bytes are in the file, and what kept the others out: a full disk takes some of them."""
        written = 0
        try:
            self._make_room(len(data))
            if self._is_torn:
                self._size += self._file.write(b"\n")
                self._is_torn = False
            while written < len(data):
                count = self._file.write(data[written:])
                self._size += count
                written += count
        except OSError as error:
            self._is_torn = self._is_torn or (written > 0 and data[written - 1] != NEWLINE)
            return written, error
        return written, None

    def _make_room(self, num_bytes: int) -> None:
        """Begin a new file if this one would become too large. Raise OSError, and go on with this one then."""
        if not self._size or self._size + num_bytes <= self._max_bytes:
            return
        os.replace(self._path, f"{self._path}.1")
        new = opened(self._path)
        self._file.close()
        self._file, self._size, self._is_torn = new, 0, False

    async def flush(self) -> None:
        """Write the lines that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._begin()
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Write the lines that wait, and close the file. A disk that hangs keeps nobody for longer than CLOSE_S."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        except TimeoutError:
            log.warning("%s takes no more lines: %d bytes are left out", self._path, self._waiting_bytes)
        else:
            self._file.close()
        if self.lost:
            log.warning("%d lines for %s were left out", self.lost, self._path)


def opened(path: Path) -> FileIO:
    """Open a file to append to it. Raise OSError, also for a named pipe: a plain open would wait for its reader."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return FileIO(descriptor, "ab")
