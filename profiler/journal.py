"""Write each measured point to disk at once, so that a second run continues where the first one ended.

Each line is a JSON object: first the subject of the run, then its points.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.profiler.grid import DecodePoint, Point, PrefillPoint
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

MAX_JOURNAL_BYTES = 16 << 20


class Subject(Struct, frozen=True, kw_only=True, tag="subject"):
    """The subject of a run. A run continues with the points of another only if both subjects are equal."""

    model: str
    engine: str
    mapping: str
    target: str  # URL, or the engine's settings
    settings: str  # of the measurement: grid, repeats, seed


_decoder: msgspec.json.Decoder[Subject | PrefillPoint | DecodePoint] = msgspec.json.Decoder(
    Subject | PrefillPoint | DecodePoint
)


class Journal:
    """The points of one run, a context manager."""

    def __init__(self, path: Path, subject: Subject, *, fresh: bool = False) -> None:
        """Raise ConfigError if the file has another subject. `fresh` removes the file first."""
        if fresh:
            path.unlink(missing_ok=True)
        self.points: list[Point] = _read(path, subject) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = b"".join(msgspec.json.encode(row) + b"\n" for row in [subject, *self.points])
        scratch = path.with_suffix(".new")  # a line that a crash cut off is removed
        scratch.write_bytes(whole)
        scratch.replace(path)
        self._file = path.open("ab")

    def add(self, point: Point) -> None:
        """Add a point; it is on disk when this returns."""
        self._file.write(msgspec.json.encode(point) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.points.append(point)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read(path: Path, subject: Subject) -> list[Point]:
    if (size := path.stat().st_size) > MAX_JOURNAL_BYTES:
        raise ConfigError(f"{path} has {size} bytes, at most {MAX_JOURNAL_BYTES} are read", hint="add --fresh")
    *lines, _cut_off = path.read_bytes().split(b"\n")
    try:
        rows = [_decoder.decode(line) for line in lines]
    except UNREADABLE as error:
        raise ConfigError(f"{path} holds no points: {error}", hint="--fresh throws it away") from error
    if not rows:
        return []
    if rows[0] != subject:
        raise ConfigError(
            f"the points in {path} are of another run: {_differences(rows[0], subject)}",
            hint="give that run's flags to go on with it, another --out-dir, or --fresh to throw them away",
        )
    return [row for row in rows[1:] if not isinstance(row, Subject)]


def _differences(found: object, expected: Subject) -> str:
    if not isinstance(found, Subject):
        return "its first line does not say of what"
    names = [name for name in expected.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    return ", ".join(f"{name} {getattr(found, name)!r} there, {getattr(expected, name)!r} here" for name in names)
