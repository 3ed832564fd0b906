"""A frontend's access log (`--access-log-file`) as requests of the simulator.

A line tells when a request ended, how long it took, how many tokens came in and went out, and the hashes of the
prompt's blocks: equal hashes are a prefix that prompts share. Lines of older releases have no hashes.
"""

import glob
import heapq
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from protocol.errors import ConfigError
from simulator.requests import SimRequest, thread_names

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LONGEST_S = 3600.0  # lines stand in the order of the requests' ends; a request that took longer would come too late
DEFAULT_ISL = 1000

_Ms = Annotated[float, Meta(ge=0)] | None


class AccessLine(Struct, frozen=True):
    """A line of the access log, as far as the simulator reads it."""

    path: str = ""
    status: int = 0
    duration_ms: Annotated[float, Meta(ge=0)] = 0.0
    ts: str = ""
    isl_tokens: Annotated[int, Meta(ge=0)] = 0  # 0: not known
    osl_tokens: Annotated[int, Meta(ge=0)] = 0
    block_size: Annotated[int, Meta(ge=0)] = 0
    blocks: str = ""  # base64 of u64 little endian: sequence hashes of the prompt's full blocks
    endpoint: str = ""  # "": the line of no request for answers, or of an older release
    outcome: str = ""
    model: str = ""
    answers: int = 1  # that were asked for
    worker: str = ""
    prefill_worker: str | None = None
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    ttft_ms: _Ms = None
    itl_ms: _Ms = None
    queue_ms: _Ms = None
    prefill_ms: _Ms = None
    pull_ms: _Ms = None


_lines = msgspec.json.Decoder(AccessLine)


def read_access_log(
    path: Path, block_size: int, osl_tokens: int, isl_tokens: int = DEFAULT_ISL
) -> Iterator[SimRequest]:
    """Requests that were answered with 200, in order of arrival, the first at 0.

    Raises ConfigError, while it is read, if there are none.
    """
    first_s: float | None = None
    for number, (arrived_s, line) in enumerate(read_lines(path)):
        first_s = arrived_s if first_s is None else first_s
        isl = line.isl_tokens or isl_tokens
        names = block_names(line, isl, block_size, number)
        yield SimRequest(arrived_s - first_s, isl, line.osl_tokens or osl_tokens, names, number)
    if first_s is None:
        hint = "the frontend writes it with --access-log-file"
        raise ConfigError(f"{path} has no request to {', '.join(PATHS)}", hint=hint)


def is_answered(line: AccessLine) -> bool:
    return line.status == 200 and line.path in PATHS


def read_lines(path: Path, keeps: Callable[[AccessLine], bool] = is_answered) -> Iterator[tuple[float, AccessLine]]:
    """Return the answered requests of a log, each after its time of arrival (Unix), in order of arrival.

    A log of several processes, `<path>.<name>`, and what was set aside, `<path>.1`, belong to it. Raise ConfigError if
    there is no log.
    """
    with ExitStack() as opened:
        try:
            logs = [[opened.enter_context(file.open("rb")) for file in files] for files in files_of(path)]
        except OSError as error:
            raise ConfigError(
                f"no access log at {path}: {error.strerror}", hint="start the frontend with --access-log-file"
            ) from error
        yield from heapq.merge(*[in_order(chain(*files), path, keeps) for files in logs], key=lambda found: found[0])


def files_of(path: Path) -> list[list[Path]]:
    """Return the files of a log: a list for each process, the older file first."""
    last = [file for file in path.parent.glob(f"{glob.escape(path.name)}.*") if file.suffix != ".1"]
    if path.exists() or not last:
        last.append(path)
    return [[*(older for older in [file.with_name(f"{file.name}.1")] if older.exists()), file] for file in last]


def block_names(line: AccessLine, isl_tokens: int, block_size: int, number: int) -> bytes:
    """Return the names of a prompt's blocks for the simulator. Larger blocks than those of the log are possible.

    Blocks without a hash are shared with nobody. Raise ConfigError if the sizes do not fit.
    """
    wanted = isl_tokens // block_size
    if not (line.blocks and line.block_size):
        return thread_names(number, 0, wanted)
    if block_size % line.block_size:
        raise ConfigError(
            f"blocks of {block_size} tokens are no multiple of the log's, which have {line.block_size}",
            hint=f"set --block-size {line.block_size}",
        )
    try:
        hashes = array("Q", b64decode(line.blocks, validate=True))
    except ValueError as error:
        raise ConfigError(f"the access log has blocks that cannot be read: {error}") from error
    step = block_size // line.block_size
    known = hashes[step - 1 :: step][:wanted]
    return known.tobytes() + thread_names(number, len(known), wanted)


def in_order(
    lines: Iterable[bytes], path: Path, keeps: Callable[[AccessLine], bool] = is_answered
) -> Iterator[tuple[float, AccessLine]]:
    """Return the lines to keep, which stand in the order of their ends, in order of arrival. Raise ConfigError."""
    pending: list[tuple[float, int, AccessLine]] = []
    for number, text in enumerate(lines):
        try:
            line = _lines.decode(text)
        except msgspec.DecodeError:  # what else a service logs
            continue
        if not keeps(line):
            continue
        ended_s = _seconds(line.ts, number, path)
        took_s = min(line.duration_ms / 1e3, LONGEST_S)
        heapq.heappush(pending, (ended_s - took_s, number, line))
        while pending and pending[0][0] < ended_s - LONGEST_S:
            arrived_s, _, earliest = heapq.heappop(pending)
            yield arrived_s, earliest
    while pending:
        arrived_s, _, earliest = heapq.heappop(pending)
        yield arrived_s, earliest


def _seconds(when: str, number: int, path: Path) -> float:
    try:
        return datetime.fromisoformat(when).timestamp()
    except ValueError as error:
        raise ConfigError(f"line {number + 1} of {path} has no time: {when[:40]!r}") from error
