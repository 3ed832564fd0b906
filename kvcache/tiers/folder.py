"""Own a folder of a disk tier: one process at a time, and its content is of one model and one form of slots.

The path of the setting has numbered folders, `0`, `1`, ... Each worker, and each rank of one, takes the first that
nobody has and that was written for its model; else the first that is free. So a restarted worker finds its blocks.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.kvcache.tiers.address import ADDRESS_BYTES
from kvmesh.kvcache.tiers.regular import open_regular
from kvmesh.kvcache.tiers.store import TierError, TierIoError

MAX_FOLDERS = 1024
_HEX = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * ADDRESS_BYTES}}}$")]


class FolderForm(Struct, frozen=True, forbid_unknown_fields=True):
    """Describe what lies in a folder. `epoch` changes when all of it is forgotten."""

    fingerprint: _HEX  # of model, weights and layout
    header_bytes: int
    payload_bytes: int  # of the pages that a block takes
    per_segment: int  # slots in a file
    epoch: _HEX = ""

    def fits(self, other: "FolderForm") -> bool:
        """Return whether a folder of this form can be used as `other`."""
        return self.epoch != "" and msgspec.structs.replace(self, epoch="") == msgspec.structs.replace(other, epoch="")


class OwnedFolder:
    """A folder that this process has locked."""

    def __init__(self, path: Path, lock: int, form: FolderForm, *, is_new: bool) -> None:
        self.path = path
        self.form = form
        self._lock = lock
        if is_new:
            for segment in path.glob("segment-*"):
                segment.unlink()
            self.begin_epoch()

    @property
    def epoch(self) -> bytes:
        return bytes.fromhex(self.form.epoch)

    def segment(self, number: int) -> Path:
        return self.path / f"segment-{number:05d}"

    def segments(self) -> list[int]:
        """Return the numbers of the segments that are there."""
        numbers = [path.name.removeprefix("segment-") for path in self.path.glob("segment-*")]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def begin_epoch(self) -> None:
        """Forget for good what was written so far. Raise OSError if that cannot be written down."""
        form = msgspec.structs.replace(self.form, epoch=secrets.token_hex(ADDRESS_BYTES))
        draft = self.path / "form.new"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(form))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / "form.json")
        self.form = form

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def own_folder(path: Path, form: FolderForm) -> OwnedFolder:
    """Return the folder below `path` that this process has from now on. Raise TierError, and TierIoError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for is_mine in (True, False):
            for number in range(MAX_FOLDERS):
                if (owned := _try(path / str(number), form, is_mine=is_mine)) is not None:
                    return owned
                if is_mine and not (path / str(number)).exists():
                    break
    except OSError as error:
        raise TierIoError(f"{path} cannot hold KV: {error.strerror or error}") from error
    raise TierError(f"all {MAX_FOLDERS} folders in {path} belong to other processes")


def _try(folder: Path, form: FolderForm, *, is_mine: bool) -> OwnedFolder | None:
    """Return a folder if nobody has it and, with `is_mine`, it was written in this form."""
    if is_mine and not _fits(folder, form):
        return None
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = _form_of(folder)  # again: nobody else can change it now
        is_fit = found is not None and found.fits(form)
        if is_mine and not is_fit:
            os.close(lock)
            return None
        return OwnedFolder(folder, lock, found if found is not None and is_fit else form, is_new=not is_fit)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise


def _fits(folder: Path, form: FolderForm) -> bool:
    found = _form_of(folder)
    return found is not None and found.fits(form)


def _form_of(folder: Path) -> FolderForm | None:
    try:
        with os.fdopen(open_regular(folder / "form.json", os.O_RDONLY), "rb") as file:
            return msgspec.json.decode(file.read(), type=FolderForm)
    except (OSError, msgspec.DecodeError):
        return None
