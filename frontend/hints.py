"""Read what the headers of a request ask of the mesh. Pure.

They are believed: whoever may set them may take another's place in the queue. A gateway in front of the mesh has to
set them, or to strip those that come from outside.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import msgspec

from kvmesh.frontend.generator import Hints
from kvmesh.protocol.errors import InvalidRequestError

PREFIX = "x-kvmesh-"
WORKER_HEADER = "x-kvmesh-worker"
PREFILL_HEADER = "x-kvmesh-prefill-worker"
DP_RANK_HEADER = "x-kvmesh-dp-rank"
PREFILLER_HEADER = "x-prefiller-host-port"  # llm-d's: the HTTP endpoint of the worker that prefills
PINS = frozenset({WORKER_HEADER, PREFILL_HEADER, DP_RANK_HEADER})
STEERING = PINS | {PREFILLER_HEADER}  # what an endpoint picker sets
MAX_PRIORITY = 100
_NAME = re.compile(r"[\x20-\x7e]{1,256}")
_RANK = re.compile(r"[0-9]{1,6}")
_PRIORITY = re.compile(r"[+-]?[0-9]{1,3}")


def with_headers(hints: Hints, headers: Iterable[tuple[str, str]], *, is_steered: bool = False) -> Hints:
    """The hints of a body and of its headers; a header wins. Raises InvalidRequestError that names the header.

    `is_steered`: an endpoint picker is in front, so the header with its word for the prefill worker counts too.
    """
    given: dict[str, Any] = {}
    prefiller: str | None = None
    for header, text in headers:
        if not (name := header.lower()).startswith(PREFIX):
            if is_steered and name == PREFILLER_HEADER:
                prefiller = _name(text)
            continue
        if (known := HEADERS.get(name)) is None:
            _refuse(name, "is not known", f"there are: {', '.join(HEADERS)}")
        if known.field in given:  # a gateway has added its own to what came from outside
            _refuse(name, "was sent twice", "send it once")
        if (value := known.read(text)) is None:
            _refuse(name, f"is {text[:40]!r}", f"send {known.expected}")
        given[known.field] = value
    if prefiller is not None:
        given.setdefault("pin_prefill", prefiller)
    if not given:
        return hints
    hints = msgspec.structs.replace(hints, **given)
    if hints.pin_rank is not None and hints.pin is None:
        _refuse(DP_RANK_HEADER, "needs a worker", "send x-kvmesh-worker as well")
    return hints


def _refuse(header: str, what: str, hint: str) -> NoReturn:
    raise InvalidRequestError(f"the header {header} {what}", hint=hint, param=header)


def _name(text: str) -> str | None:
    return text if _NAME.fullmatch(text) else None


def _rank(text: str) -> int | None:
    return int(text) if _RANK.fullmatch(text) else None


def _priority(text: str) -> int | None:
    return int(text) if _PRIORITY.fullmatch(text) and abs(int(text)) <= MAX_PRIORITY else None


def _switch(text: str) -> bool | None:
    return {"1": True, "0": False}.get(text)


class _Header(NamedTuple):
    field: str  # of Hints
    read: Callable[[str], object]  # None: not a value
    expected: str


_PLAIN_NAME = "1 to 256 printable ASCII characters"
HEADERS = {
    WORKER_HEADER: _Header("pin", _name, f"a worker's name or id, {_PLAIN_NAME}"),
    PREFILL_HEADER: _Header("pin_prefill", _name, f"a worker's name or id, {_PLAIN_NAME}"),
    DP_RANK_HEADER: _Header("pin_rank", _rank, "a rank from 0"),
    "x-kvmesh-session": _Header("session", _name, _PLAIN_NAME),
    "x-kvmesh-tenant": _Header("tenant", _name, _PLAIN_NAME),
    "x-kvmesh-priority": _Header("priority", _priority, f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"),
    "x-kvmesh-explain": _Header("explain", _switch, "1 or 0"),
}
