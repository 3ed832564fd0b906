"""Parsers one after the other, and events put together again."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser, Reasoning


class ChainedParser:
    """A parser of thoughts whose Content a parser of calls reads. Events keep their order."""

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        return self._reasoning.is_plain and self._tools.is_plain

    def push(self, text: str) -> Sequence[Event]:
        return self._forward(self._reasoning.push(text))

    def flush(self) -> Sequence[Event]:
        return [*self._forward(self._reasoning.flush()), *self._tools.flush()]

    def _forward(self, events: Sequence[Event]) -> Sequence[Event]:
        if len(events) == 1 and isinstance(events[0], Content):
            return self._tools.push(events[0].text)
        forwarded: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                forwarded.extend(self._tools.push(event.text))
            else:
                forwarded.append(event)
        return forwarded


def merge(events: Iterable[Event]) -> list[Event]:
    """Return the same events with neighbours of one kind (arguments: of one call) joined, and empty texts left out."""
    merged: list[Event] = []
    for (kind, index), group in groupby(filter(_says_something, events), key=_kind_and_index):
        if kind is CallBegun:
            merged.extend(group)
            continue
        text = "".join(map(_text, group))
        merged.append(CallArguments(index, text) if kind is CallArguments else _prose(kind, text))
    return merged


def _kind_and_index(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, CallArguments) else -1


def _says_something(event: Event) -> bool:
    return isinstance(event, CallBegun) or bool(_text(event))


def _text(event: Event) -> str:
    match event:
        case Content(text) | Reasoning(text) | CallArguments(_, text):
            return text
        case CallBegun():
            return ""


def _prose(kind: type[Event], text: str) -> Content | Reasoning:
    return Reasoning(text) if kind is Reasoning else Content(text)
