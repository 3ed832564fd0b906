"""Define what a parser makes of a model's text, and the seam that every parser fills."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Prose for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Thoughts, without the tags around them."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool; its arguments follow."""

    index: int  # of the call in this answer, from 0
    name: str
    id: str | None = None  # where the model writes ids of its own


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A fragment of a call's arguments. Joined, the fragments of one call are the JSON text of one object."""

    index: int
    fragment: str


Event = Content | Reasoning | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. Some formats write arguments without types, which the schema then gives."""

    name: str
    parameters: dict[str, object]  # JSON schema; may be empty
    strict: bool = False  # annotations of the schema count, too


class Parser(Protocol):
    """Reads one answer. Every parser passes tests/contracts/test_parsers.py:

    - how the text is cut into pieces changes nothing but how events are cut: joined, they are the same;
    - nothing is lost: text that turns out not to be a call or a thought comes out as Content, as it was written;
    - no text makes it raise, and work per character is constant (bounded by the length of the longest marker).
    """

    @property
    def is_plain(self) -> bool:
        """All further text is Content as it is, whether it is pushed or not, and nothing else is left. May turn true
        with a push, and then stays."""
        ...

    def push(self, text: str) -> Sequence[Event]:
        """Return what is certain after this further text; may be empty."""
        ...

    def flush(self) -> Sequence[Event]:
        """The rest, once no text follows."""
        ...
