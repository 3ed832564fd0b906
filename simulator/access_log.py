"""A frontend's access log (`--access-log`, `--log-format json`) as requests of the simulator.

A line tells when a request ended, how long it took, and how many tokens came in and went out. It tells nothing of what
prompts have in common: no two of them share a prefix.
"""

import heapq
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from protocol.errors import ConfigError
from simulator.requests import SimRequest, thread_names

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LONGEST_S = 3600.0  # lines stand in the order of the requests' ends; a request that took longer would come too late
DEFAULT_ISL = 1000


class _Line(Struct, frozen=True):
    path: str = ""
    status: int = 0
    duration_ms: Annotated[float, Meta(ge=0)] = 0.0
    ts: str = ""
    isl_tokens: Annotated[int, Meta(ge=0)] = 0  # 0: not known
    osl_tokens: Annotated[int, Meta(ge=0)] = 0


_lines = msgspec.json.Decoder(_Line)


def read_access_log(
    path: Path, block_size: int, osl_tokens: int, isl_tokens: int = DEFAULT_ISL
) -> Iterator[SimRequest]:
    """Requests that were answered with 200, in order of arrival, the first at 0.

    Raises ConfigError, while it is read, if there are none or one of them took longer than `LONGEST_S`.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"no access log at {path}: {error.strerror}", hint="start it with --access-log") from error
    first_s: float | None = None
    with file:
        for number, (arrived_s, line) in enumerate(_in_order(file, path)):
            first_s = arrived_s if first_s is None else first_s
            isl = line.isl_tokens or isl_tokens
            names = thread_names(number, 0, isl // block_size)
            yield SimRequest(arrived_s - first_s, isl, line.osl_tokens or osl_tokens, names, number)
    if first_s is None:
        hint = "the frontend writes it with --access-log --log-format json"
        raise ConfigError(f"{path} has no request to {', '.join(PATHS)}", hint=hint)


def _in_order(lines: Iterator[bytes], path: Path) -> Iterator[tuple[float, _Line]]:
    pending: list[tuple[float, int, _Line]] = []
    for number, text in enumerate(lines):
        try:
            line = _lines.decode(text)
        except msgspec.DecodeError:  # what else a service logs
            continue
        if line.status != 200 or line.path not in PATHS:
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
