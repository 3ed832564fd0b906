"""Own the folder of a mesh on this host, and remove folders whose mesh was killed."""

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from kvmesh.mesh.short_folder import temporary_parents
from kvmesh.protocol.errors import ConfigError

PREFIX = "kvmesh-"
OWNER = ".owner"  # locked as long as the mesh runs; the system lets go of it when the process is killed
LOCK = ".lock"  # locked in the same way, in a folder that the user names; holds the pid of the mesh, and stays
LEFT_SUFFIX = ".left"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what a file system without locks answers
_held: dict[Path, TextIO] = {}  # an open file holds its lock


def claim(folder: Path) -> None:
    """Hold a temporary folder until `let_go`, so that no other mesh removes it. Raises OSError."""
    file = (folder / OWNER).open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    _held[folder] = file


def hold(folder: Path) -> None:
    """Lock a folder that the user has named until `let_go`. Raise ConfigError if a mesh runs there, and OSError.

    Two meshes in one folder would find each other's workers, and the second would take the first's control socket.
    """
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.seek(0)
            holder = file.read(32).strip()
            file.close()
            raise ConfigError(
                f"a mesh runs in {folder} already, as process {holder or '(not known)'}",
                hint="stop it, or give another --run-dir",
            ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _held[folder] = file


def let_go(folder: Path, *, keep: bool) -> None:
    """Remove a temporary folder at the end of its mesh, or leave it on purpose, such as for the logs of a failure.

    A folder that the user has named stays.
    """
    file = _held.pop(folder, None)
    is_named = file is not None and file.name == str(folder / LOCK)
    if keep and not is_named:
        with suppress(OSError):
            (folder / OWNER).unlink()
    elif not is_named:
        shutil.rmtree(folder, ignore_errors=True)
    if file is not None:
        file.close()


def _remove_whole(folder: Path) -> None:
    """Remove a folder although processes of its mesh may still drain and write to it: they do not find it again.

    A file that is made while a folder is emptied would keep the folder.
    """
    aside = folder.rename(folder.with_name(folder.name + LEFT_SUFFIX))
    shutil.rmtree(aside, ignore_errors=True)


def remove_left_folders(parent: Path | None = None) -> list[Path]:
    """Remove our temporary folders whose mesh was killed, and return them."""
    removed = []
    parents = temporary_parents() if parent is None else [parent]
    for path in (path for one in parents for path in one.glob(f"{PREFIX}*/{OWNER}")):
        with suppress(OSError), path.open("r+") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its mesh runs
            _remove_whole(path.parent)
            removed.append(path.parent)
    return removed
