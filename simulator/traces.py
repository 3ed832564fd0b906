"""Recognise what a file of recorded requests is: a trace in Mooncake's format, or a frontend's access log."""

from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.access_log import files_of

TraceKind = Literal["mooncake", "access-log"]

MOST_LINES = 10_000  # that are looked at: an access log may stand among other lines of a service
MAX_LINE_BYTES = 1 << 20


def kind_of(path: Path) -> TraceKind:
    """Return the format of the first line that has one. Raise ConfigError if none has, or there is no file."""
    for file in (file for files in files_of(path) for file in files):
        try:
            with file.open("rb") as opened:
                if (kind := _kind_of_file(opened)) is not None:
                    return kind
        except OSError as error:
            raise ConfigError(f"no trace at {path}: {error.strerror}", hint="name a file with --trace") from error
    raise ConfigError(
        f"{path} is neither a trace nor an access log",
        hint="a trace has timestamp, input_length and hash_ids in each line; a frontend writes an access log with "
        "--access-log-file",
    )


def _kind_of_file(opened: BinaryIO) -> TraceKind | None:
    for _ in range(MOST_LINES):
        line = opened.readline(MAX_LINE_BYTES)
        if not line or (kind := _kind_of_line(line)) is not None:
            return kind if line else None
    return None


def _kind_of_line(line: bytes) -> TraceKind | None:
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    if "timestamp" in fields and "input_length" in fields:
        return "mooncake"
    return "access-log" if "ts" in fields and "path" in fields and "status" in fields else None
