"""Give calls the ids that a model's chat template accepts, where the model writes none."""

import secrets
from collections.abc import Sequence

import msgspec

from kvmesh.frontend.parsers.events import CallBegun, Event, Parser

SHORT_ID_CHARS = 9  # Mistral's templates refuse other ids


class ShortIds:
    """Gives each call without an id one of nine letters and digits."""

    def __init__(self, calls: Parser) -> None:
        self._calls = calls

    @property
    def is_plain(self) -> bool:
        return self._calls.is_plain

    def push(self, text: str) -> Sequence[Event]:
        return list(map(_named, self._calls.push(text)))

    def flush(self) -> Sequence[Event]:
        return list(map(_named, self._calls.flush()))


def _named(event: Event) -> Event:
    if isinstance(event, CallBegun) and event.id is None:
        return msgspec.structs.replace(event, id=secrets.token_hex(SHORT_ID_CHARS)[:SHORT_ID_CHARS])
    return event
