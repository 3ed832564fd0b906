"""Read request traces in Mooncake's format, and turn their rows into requests of the simulator.

One JSON object a line: `timestamp` (ms from the start), `input_length` and `output_length` (tokens), `hash_ids` (one
per block of the trace; equal ids mean equal prefix blocks). There is no text.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.requests import SimRequest, thread_names

MOST_DISORDER = 4096  # rows that a row may be late by


class TraceRow(Struct, frozen=True, kw_only=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    hash_ids: list[Annotated[int, Meta(ge=0, lt=1 << 48)]]
    output_length: Annotated[int, Meta(ge=0)] = 0


_rows = msgspec.json.Decoder(TraceRow)


def stream_rows(path: Path, limit: int = 0) -> Iterator[TraceRow]:
    """Return the rows in order of time, without holding the file. `limit` counts lines; 0: all.

    Raises ConfigError for what cannot be read, while it is read.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"no trace at {path}: {error.strerror}", hint="give a JSON lines file by --trace") from error
    with file:
        pending: list[tuple[float, int, TraceRow]] = []
        last_ms = -1.0
        is_empty = True
        for number, line in enumerate(file, start=1):
            if limit and number > limit:
                break
            if not line.strip():
                continue
            is_empty = False
            row = _read_row(line, number, path)
            if row.timestamp < last_ms:
                found = f"line {number} of {path} is earlier than one {MOST_DISORDER} lines before it"
                raise ConfigError(found, hint="sort the trace by timestamp")
            heapq.heappush(pending, (row.timestamp, number, row))
            if len(pending) > MOST_DISORDER:
                last_ms, _, earliest = heapq.heappop(pending)
                yield earliest
        while pending:
            yield heapq.heappop(pending)[2]
    if is_empty:
        raise ConfigError(f"the trace {path} holds no request", hint="give a JSON lines file by --trace")


def _read_row(line: bytes, number: int, path: Path) -> TraceRow:
    try:
        return _rows.decode(line)
    except msgspec.DecodeError as error:
        hint = "a row has timestamp, input_length, hash_ids and output_length"
        raise ConfigError(f"line {number} of {path} cannot be read: {error}", hint=hint) from error


def from_rows(rows: Iterable[TraceRow], block_size: int, trace_block_size: int = 512) -> Iterator[SimRequest]:
    """Return the requests of `rows`, which come in order of time. A block id stands for `trace_block_size` tokens.

    Blocks that a row has no id for, and its answer, are shared with nobody. Raises ConfigError if the sizes do not fit.
    """
    if trace_block_size % block_size:
        found = f"blocks of {block_size} tokens do not fit into the trace's blocks of {trace_block_size}"
        raise ConfigError(found, hint="set --block-size to a divisor of --trace-block-size")
    parts = trace_block_size // block_size
    for thread, row in enumerate(rows):
        num_blocks = row.input_length // block_size
        if parts == 1:
            named = row.hash_ids[:num_blocks]
        else:
            ids = row.hash_ids[: -(-num_blocks // parts)]
            named = [i * parts + part for i in ids for part in range(parts)][:num_blocks]
        names = array("Q", named).tobytes()
        if len(named) < num_blocks:
            names += thread_names(thread, len(named), num_blocks)
        yield SimRequest(
            arrival_s=row.timestamp / 1e3,
            isl_tokens=row.input_length,
            osl_tokens=max(1, row.output_length),
            names=names,
            thread=thread,
        )
