"""Keep what was read from files, and read it again once the files have changed."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 2.0  # between looks whether files have changed
Stamp = tuple[tuple[int, int, int], ...]  # of files: changes with what is in them
T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Keeps what was read from files, and reads them again once they have changed."""

    def __init__(self, look: Callable[[], Stamp], read: Callable[[], T], name: str, clock: Callable[[], float]) -> None:
        """Read the files; `name` says what they hold, for the log. Raise ConfigError."""
        self._look = look
        self._read_files = read
        self._name = name
        self._clock = clock
        self._stamp = look()
        self._content = read()
        self._next_look = clock() + LOOK_S

    def read(self) -> T:
        """Return the content. If the files cannot be used any more, it stays: they may be half written."""
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + LOOK_S
            try:
                self._read_changes()
            except (ConfigError, OSError) as error:
                log.error("the %s stay as they were: %s", self._name, error)
        return self._content

    def _read_changes(self) -> None:
        stamp = self._look()
        if stamp != self._stamp:
            self._content, self._stamp = self._read_files(), stamp
            log.info("the %s were read again", self._name)


def stamp_of(paths: Sequence[str]) -> Stamp:
    """Raises OSError."""
    found = [Path(path).stat() for path in paths]
    return tuple((file.st_mtime_ns, file.st_ino, file.st_size) for file in found)
