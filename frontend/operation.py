"""The description of an endpoint, as /openapi.json shows it: what it takes, what it gives, and how it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from kvmesh.frontend.bodies import Only
from kvmesh.frontend.openai.shapes import ErrorBody
from kvmesh.mesh.http.request import JSON

Kind = Any  # a type or a union of types, as msgspec reads it

HTTP_FAILURES = (400, 405, 408, 413, 415, 429, 431, 500)  # of any request, before it reaches its endpoint
ASKED_FAILURES = (
    400,
    401,
    403,
    404,
    408,
    413,
    429,
    431,
    500,
    502,
    503,
    504,
)  # of what workers or the router are asked for
OWN_FAILURES = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503)  # of what the frontend answers by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeNotes:
    """Says what the types of the bodies do not."""

    partly: Sequence[tuple[type[Struct], Mapping[str, Only]]] = ()  # fields of which only some values are supported
    read_later: Mapping[tuple[type[Struct], str], Sequence[type[Struct]]] = field(default_factory=dict)
    """Fields with objects of one of several kinds, which are read in a second step."""
    needed: Sequence[tuple[type[Struct], str]] = ()  # by the kinds of parts that are supported
    token_id_keys: Sequence[tuple[type[Struct], str]] = ()  # objects whose keys are token ids
    examples: Mapping[tuple[type[Struct], str], object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Says what one endpoint takes and gives."""

    summary: str
    request: tuple[Kind, ...] = ()  # the body is one of these
    reply: Kind = None  # None: anything
    reply_type: str = JSON
    other_reply_types: tuple[str, ...] = ()  # of the same, for clients that prefer them
    events: tuple[Kind, ...] = ()  # where it can stream: the data of an event is one of these
    ends_with_done: bool = False  # ... or [DONE]
    error: Kind = ErrorBody
    others: Sequence[tuple[Kind, Kind]] = ()  # reply and error for clients of other APIs, which headers tell apart
    query: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)  # description and schema
    failures: tuple[int, ...] = ()
    fails_with_reply: bool = False  # its failures have the shape of the reply
    is_asked: bool = False  # it has an id and a timeout
    takes_hints: bool = False
    notes: ShapeNotes = ShapeNotes()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        kinds = (*self.request, *self.replies, *self.events, *self.errors)
        return tuple(kind for kind in kinds if kind is not None)

    @property
    def replies(self) -> tuple[Kind, ...]:
        return (self.reply, *(reply for reply, _ in self.others))

    @property
    def errors(self) -> tuple[Kind, ...]:
        return (self.error, *(error for _, error in self.others))
