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
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE
from kvmesh.simulator.requests import SimRequest, thread_names

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LONGEST_S = 3600.0  # lines stand in the order of the requests' ends; a request that took longer would come too late
DEFAULT_ISL = 1000
MOST_TOKENS = 10_000_000  # of a prompt or an answer; a line with more is not believed

_Ms = Annotated[float, Meta(ge=0)] | None


class AccessLine(Struct, frozen=True):
    """A line of the access log, as far as the simulator reads it."""

    path: str = ""
    status: int = 0
    duration_ms: Annotated[float, Meta(ge=0)] = 0.0
    ts: str = ""
    isl_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0  # 0: not known
    osl_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
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


@dataclass(slots=True)
class LineCounts:
    """Count the lines of a log by what became of them."""

    requests: int = 0
    others: int = 0  # other endpoints, requests that failed
    bad: int = 0  # that cannot be read
    first_bad: str = ""

    def add_bad(self, number: int, why: str) -> None:
        self.bad += 1
        self.first_bad = self.first_bad or f"line {number + 1}: {why[:200]}"

    @property
    def text(self) -> str:
        first = f" ({self.first_bad})" if self.bad else ""
        return f"{self.requests} requests; other lines: {self.others}, bad lines: {self.bad}{first}"


_lines = msgspec.json.Decoder(AccessLine)


def read_access_log(
    path: Path,
    block_size: int,
    osl_tokens: int,
    isl_tokens: int = DEFAULT_ISL,
    counts: LineCounts | None = None,
) -> Iterator[SimRequest]:
    """Yield the requests that were answered with 200, in order of arrival, the first at 0.

    Lines that cannot be read are left out and counted. Raise ConfigError, while reading, if there is no request.
    """
    counts = LineCounts() if counts is None else counts
    first_s: float | None = None
    for number, (arrived_s, line) in enumerate(read_lines(path, counts=counts)):
        first_s = arrived_s if first_s is None else first_s
        isl = line.isl_tokens or isl_tokens
        names = block_names(line, isl, block_size, number)
        counts.requests += 1
        yield SimRequest(arrived_s - first_s, isl, line.osl_tokens or osl_tokens, names, number)
    if first_s is None:
        hint = "the frontend writes it with --access-log-file"
        raise ConfigError(f"{path} has no request to {', '.join(PATHS)}: {counts.text}", hint=hint)


def is_answered(line: AccessLine) -> bool:
    return line.status == 200 and line.path in PATHS


def read_lines(
    path: Path, keeps: Callable[[AccessLine], bool] = is_answered, counts: LineCounts | None = None
) -> Iterator[tuple[float, AccessLine]]:
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
        merged = [in_order(chain(*files), keeps, counts) for files in logs]
        yield from heapq.merge(*merged, key=lambda found: found[0])


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
    lines: Iterable[bytes],
    keeps: Callable[[AccessLine], bool] = is_answered,
    counts: LineCounts | None = None,
) -> Iterator[tuple[float, AccessLine]]:
    """Return the lines to keep, which stand in the order of their ends, in order of arrival."""
    pending: list[tuple[float, int, AccessLine]] = []
    for number, ended_s, line in _kept(lines, keeps, LineCounts() if counts is None else counts):
        took_s = min(line.duration_ms / 1e3, LONGEST_S)
        heapq.heappush(pending, (ended_s - took_s, number, line))
        while pending and pending[0][0] < ended_s - LONGEST_S:
            arrived_s, _, earliest = heapq.heappop(pending)
            yield arrived_s, earliest
    while pending:
        arrived_s, _, earliest = heapq.heappop(pending)
        yield arrived_s, earliest


def _kept(
    lines: Iterable[bytes], keeps: Callable[[AccessLine], bool], counts: LineCounts
) -> Iterator[tuple[int, float, AccessLine]]:
    """Yield the lines to keep with their numbers and when they were written, and count the others."""
    for number, text in enumerate(lines):
        try:
            line = _lines.decode(text)
            if keeps(line):
                yield number, datetime.fromisoformat(line.ts).timestamp(), line
            else:
                counts.others += 1
        except (*UNREADABLE, ValueError) as error:  # what else a service logs, a line that was cut
            counts.add_bad(number, str(error))
