"""Read OpenAI's batch format: one request per line in, one result per line out. Pure, apart from reading the file."""

import hashlib
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from kvmesh.protocol.errors import ConfigError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
MAX_LINE_BYTES = 16 << 20  # a frontend takes no larger body by default
SHOWN_PROBLEMS = 10
BOM = b"\xef\xbb\xbf"


class RequestLine(Struct, frozen=True):
    """One line of the input; fields that are not here are ignored."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class ResultResponse(Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultError(Struct, frozen=True):
    code: str
    message: str


class ResultLine(Struct, frozen=True):
    """One line of the output. `error` is set if no server has answered."""

    id: str
    custom_id: str
    response: ResultResponse | None
    error: ResultError | None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.status_code == 200


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """Point to a request in the input. `id` is made of all that is sent: an edited request has another one."""

    id: str
    offset: int
    number: int  # of the line, from 1


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request as it is sent."""

    id: str
    custom_id: str
    path: str
    body: bytes


_decode_request = msgspec.json.Decoder(RequestLine).decode
_decode_result = msgspec.json.Decoder(ResultLine).decode


def read_request(line: bytes, model: str) -> BatchRequest:
    """Return the request of a line, for `model` if that is not empty. Raises ValueError that says what is wrong."""
    try:
        found = _decode_request(line)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; a line has custom_id, method, url and body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if found.method != "POST":
        raise ValueError(f"method {found.method!r}: only POST can be sent")
    if found.url not in ENDPOINTS:
        raise ValueError(f"url {found.url!r}: expected one of {', '.join(ENDPOINTS)}")
    if found.body.get("stream"):
        raise ValueError("body.stream: the results of a batch are whole; leave stream out")
    body = msgspec.json.encode(found.body | {"model": model} if model else found.body)
    digest = hashlib.blake2b(digest_size=16)
    for part in (found.custom_id.encode(), found.url.encode(), body):
        digest.update(b"%d:" % len(part) + part)
    return BatchRequest(f"batch_req_{digest.hexdigest()}", found.custom_id, found.url, body)


def read_result(line: bytes) -> ResultLine:
    """Raises ValueError for a line that is not a result."""
    return _decode_result(line)


def check_input(path: Path, model: str) -> list[BatchEntry]:
    """Return where each request of the file stands. Blank lines are skipped.

    Raises ConfigError that lists the first lines that cannot be sent, so that nothing is sent before all can be.
    """
    entries: list[BatchEntry] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    with open_input(path) as file, told_if_unreadable(path):
        for number, offset, line in numbered_lines(file):
            try:
                request = read_request(line, model)
                if (earlier := seen.setdefault(request.custom_id, number)) != number:
                    raise ValueError(f"custom_id {request.custom_id!r} is that of line {earlier} too")
                entries.append(BatchEntry(request.id, offset, number))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise ConfigError(problems_of(path, problems), hint="mend these lines; nothing was sent")
    if not entries:
        raise ConfigError(f"{path} has no request", hint="each line is one request in OpenAI's batch format")
    return entries


def problems_of(path: Path, problems: Sequence[str]) -> str:
    more = len(problems) - SHOWN_PROBLEMS
    lines = [f"{path} has {len(problems)} lines that cannot be sent", *problems[:SHOWN_PROBLEMS]]
    return "\n  ".join([*lines, f"and {more} more"] if more > 0 else lines)


def open_input(path: Path) -> BinaryIO:
    """Open a regular file: requests are read again at their places, and a pipe or device may have no end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is no regular file", hint="name a file of requests")
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def told_if_unreadable(path: Path) -> Iterator[None]:
    """Raise ConfigError for a file that cannot be read to its end."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read {path}: {error.strerror}", hint="name a file of requests")


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset in bytes, text) of each line that is not blank. A line too long is cut."""
    number = offset = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        length = len(line)
        while not line.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            length += len(rest)
            if rest.endswith(b"\n"):
                break
        text = line.removeprefix(BOM) if offset == 0 else line
        if text.strip():
            yield number, offset, text
        offset += length


def request_at(file: BinaryIO, entry: BatchEntry, model: str) -> BatchRequest:
    """Read a request again. Raises ConfigError if the file is no longer what it was when it was checked."""
    file.seek(entry.offset)
    line = file.readline(MAX_LINE_BYTES + 1)
    try:
        request = read_request(line.removeprefix(BOM) if entry.offset == 0 else line, model)
    except ValueError as error:
        raise ConfigError(f"line {entry.number} of the input has changed: {error}", hint="start again") from error
    if request.id != entry.id:
        raise ConfigError(f"line {entry.number} of the input has changed", hint="start again")
    return request
