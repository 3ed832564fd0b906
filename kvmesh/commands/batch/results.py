"""Keep the results of a batch: each is on disk as soon as it is there, and the output has the order of the input.

While a batch runs its results are appended to `<output>.part`, in the order in which they come. At the end they are
written to the output in the order of the input, and the part file goes. A run that was killed leaves the part file, and
the next run continues from it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvmesh.commands.batch.lines import BatchEntry, ResultLine, read_result
from kvmesh.protocol.errors import ConfigError, MeshError


class Results:
    """Hold where each result stands in the part file, by the id of its request."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._part = output.with_name(output.name + ".part")
        self._offsets: dict[str, int] = {}
        self._file = self._open()

    def _open(self) -> BinaryIO:
        if self._output.exists() and not self._output.is_file():
            raise ConfigError(f"{self._output} is no file", hint="name another --output; it is replaced at the end")
        try:
            file = self._part.open("a+b")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another batch writes {self._output}", hint="name another with --output") from error
        except OSError as error:
            raise ConfigError(f"cannot write {self._part}: {error.strerror}", hint="name another --output") from error
        return file

    def keep(self, entries: Sequence[BatchEntry]) -> int:
        """Take over the successful results of earlier runs for these requests; return how many there are."""
        wanted = {entry.id for entry in entries}
        self._keep_part(wanted)
        if self._output.is_file():
            with self._output.open("rb") as file:
                for line in file:
                    if (result_id := success_in(line)) in wanted and result_id not in self._offsets:
                        self._append(result_id, line)
        return len(self._offsets)

    def _keep_part(self, wanted: set[str]) -> None:
        """Find what the part file has. A last line that a killed run did not complete is cut off."""
        offset = 0
        self._file.seek(0)
        while (line := self._file.readline()).endswith(b"\n"):
            if (result_id := success_in(line)) in wanted:
                self._offsets[result_id] = offset
            offset += len(line)
        self._file.truncate(offset)

    def add(self, result: ResultLine) -> None:
        """Raises MeshError if the disk does not take it."""
        self._append(result.id, msgspec.json.encode(result) + b"\n")

    def _append(self, result_id: str, line: bytes) -> None:
        try:
            self._offsets[result_id] = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            hint = "make room; the same command continues then"
            raise MeshError(f"cannot write {self._part}: {error.strerror}", hint=hint) from error

    def __contains__(self, result_id: str) -> bool:
        return result_id in self._offsets

    def finish(self, entries: Iterable[BatchEntry]) -> None:
        """Write the output: a line for each request, in their order. Raises MeshError if the disk does not take it."""
        whole = self._output.with_name(self._output.name + ".tmp")
        try:
            with whole.open("wb") as file:
                for entry in entries:
                    self._file.seek(self._offsets[entry.id])
                    file.write(self._file.readline())
                file.flush()
                os.fsync(file.fileno())
            whole.replace(self._output)
            self._part.unlink()
        except OSError as error:
            hint = "make room; the same command continues then"
            raise MeshError(f"cannot write {self._output}: {error.strerror}", hint=hint) from error

    def close(self) -> None:
        """Let another run have the files; a part file without a result goes."""
        if not self._offsets:
            with contextlib.suppress(OSError):
                self._part.unlink()
        with contextlib.suppress(OSError):  # a full disk was told of when a result was added
            self._file.close()


def success_in(line: bytes) -> str:
    """Return the id of the result in a line, or nothing if the line is no result or no success."""
    try:
        result = read_result(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return result.id if result.is_success else ""
