"""Say where a discovery backend searches, and whether the place answers.

Nothing here has a secret: whoever asks a frontend for its health may read it.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class SearchPlace:
    """The place of the keys, as a backend knows it now."""

    name: str  # the URL of --discovery without its options
    is_read: bool = False  # all its keys were read at least once
    away_since_unix_s: float | None = None  # None: the place answers
    ignored: tuple[tuple[str, str], ...] = ()  # the first of the keys that do not count, with the reasons
    asked: tuple[tuple[str, str], ...] = ()  # of a backend that asks services themselves: an address, what it said

    def status(self) -> str:
        if self.away_since_unix_s is not None:
            return f"away since {datetime.fromtimestamp(self.away_since_unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
        return "reached" if self.is_read else "not reached yet"


class Contact:
    """Tracks whether a place answers. One thread reports to this object, and any thread may read `place`."""

    def __init__(self, name: str) -> None:
        self.place = SearchPlace(name)

    def on_read(self) -> None:
        if not self.place.is_read or self.place.away_since_unix_s is not None:
            self.place = SearchPlace(self.place.name, is_read=True)

    def on_failure(self, unix_s: float) -> None:
        if self.place.away_since_unix_s is None:
            self.place = replace(self.place, away_since_unix_s=unix_s)
