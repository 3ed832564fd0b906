"""Request traces in Mooncake's format: when, how long, and which blocks.

One JSON object a line: `timestamp` (ms from the start), `input_length` and `output_length` (tokens), `hash_ids` (one
per block of the trace; equal ids mean equal prefix blocks). There is no text: an id is expanded into tokens of its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from protocol.errors import ConfigError

VOCABULARY = 1 << 24  # token ids of the expansion


class TraceRow(Struct, frozen=True, kw_only=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    hash_ids: list[Annotated[int, Meta(ge=0)]]
    output_length: Annotated[int, Meta(ge=0)] = 0


class TraceRequest(Struct, frozen=True, kw_only=True):
    """`tokens`: u32 [isl_tokens], little endian."""

    arrival_s: float
    isl_tokens: int
    osl_tokens: int
    tokens: bytes


_rows = msgspec.json.Decoder(TraceRow)


def read_rows(path: Path, limit: int = 0) -> list[TraceRow]:
    """In order of time; `limit` 0: all. Raises ConfigError for what cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"no trace at {path}: {error.strerror}", hint="give a JSON lines file by --trace") from error
    rows: list[TraceRow] = []
    for number, line in enumerate(lines[: limit or None], start=1):
        if not line.strip():
            continue
        try:
            rows.append(_rows.decode(line))
        except msgspec.DecodeError as error:
            hint = "a row has timestamp, input_length, hash_ids and output_length"
            raise ConfigError(f"line {number} of {path} cannot be read: {error}", hint=hint) from error
    if not rows:
        raise ConfigError(f"the trace {path} holds no request", hint="give a JSON lines file by --trace")
    return sorted(rows, key=lambda row: row.timestamp)


def expand(rows: list[TraceRow], block_size: int) -> Iterator[TraceRequest]:
    """Give every block id `block_size` tokens of its own; ids beyond a prompt's length are of no use to it."""
    for row in rows:
        blocks = b"".join(_tokens_of(block_id, block_size) for block_id in row.hash_ids)
        missing = 4 * row.input_length - len(blocks)
        if missing > 0:  # a trace may leave the partial block out: nobody shares it
            blocks += b"\xff" * missing
        yield TraceRequest(
            arrival_s=row.timestamp / 1e3,
            isl_tokens=row.input_length,
            osl_tokens=row.output_length,
            tokens=blocks[: 4 * row.input_length],
        )


def _tokens_of(block_id: int, block_size: int) -> bytes:
    first = block_id * block_size
    return (np.arange(first, first + block_size) % VOCABULARY).astype("<u4").tobytes()
