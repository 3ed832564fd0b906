"""Open files of a folder that other programs can write to."""

import errno
import os
from pathlib import Path
from stat import S_ISREG


def open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file, with `flags` and O_CLOEXEC. Raise OSError for anything else.

    To open a FIFO without O_NONBLOCK waits for its other end, for ever. On a regular file the flag changes nothing.
    """
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.ENXIO, "no regular file", str(path))
