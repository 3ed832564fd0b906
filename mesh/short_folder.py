"""Make folders for Unix sockets: the system takes short paths only, and TMPDIR may be long, as under Slurm."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvmesh.protocol.errors import ConfigError

MAX_PATH_BYTES = 100  # of a socket; the kernel takes 107
_RANDOM = "/12345678"  # what tempfile adds to a prefix
_ALWAYS_SHORT = ("/tmp", "/dev/shm")


def fits(path: Path) -> bool:
    """Return whether a socket can have this path."""
    return len(os.fsencode(path)) <= MAX_PATH_BYTES


def temporary_parents() -> Iterator[Path]:
    """Yield the folders of temporary files, that of TMPDIR first, each once."""
    yield from dict.fromkeys(
        Path(name) for name in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), *_ALWAYS_SHORT) if name
    )


def short_folder(prefix: str, socket: str) -> Path:
    """Make a folder of our own in which a socket can have the path `socket`. Raise ConfigError, OSError."""
    for parent in temporary_parents():
        if fits(parent / (prefix + _RANDOM) / socket) and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    raise ConfigError("no folder of temporary files has a short path", hint="set TMPDIR to a short one, such as /tmp")
