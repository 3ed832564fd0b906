"""Decide how a collection of Kubernetes is followed: list it in pages, then watch from the revision of the list. Pure.

A watch that the server ends in order goes on from the last revision that was heard, of an object or of a bookmark.
Whatever else ends it has the collection listed again: the server may have forgotten the revision (410 Gone), or be
another one with fewer revisions, where a watch from ours would wait in silence.
"""

from collections.abc import Callable
from dataclasses import dataclass

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0  # after failures, doubled each time; a part of it is drawn
SHORT_WATCH_S = 1.0  # a server that ends watches sooner is broken
WATCH_S = 300.0  # asked of the server; a part of it is drawn, so that clients do not return together


@dataclass(frozen=True, slots=True)
class ListPart:
    more: str  # the token of the page before, "" for the first page


@dataclass(frozen=True, slots=True)
class WatchFrom:
    revision: str
    seconds: int


@dataclass(frozen=True, slots=True)
class WaitFor:
    seconds: float


WatchStep = ListPart | WatchFrom | WaitFor


class ListWatch:
    """Says what to do next, and takes what came of it. Times are seconds of one clock, `draw` returns from [0, 1)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self.revision = ""  # to watch from, "" while there is none
        self._more = ""
        self._due_s = 0.0
        self._failures = 0
        self._watched_s = 0.0  # when the present watch began

    def next(self, now_s: float) -> WatchStep:
        if now_s < self._due_s:
            return WaitFor(self._due_s - now_s)
        if not self.revision:
            return ListPart(self._more)
        self._watched_s = now_s
        return WatchFrom(self.revision, int(WATCH_S * (0.8 + 0.4 * self._draw())))

    def on_page(self, revision: str, more: str) -> bool:
        """Take a page. Return whether the list is complete."""
        self._more = more
        if more:
            return False
        self.revision = revision
        return True

    def on_heard(self, revision: str) -> None:
        """Take an event or a bookmark. Only now the server is known to work again."""
        self._failures = 0
        if revision:
            self.revision = revision

    def on_end(self, now_s: float) -> None:
        """Take that the server has ended a watch in order."""
        if now_s - self._watched_s < SHORT_WATCH_S:
            self.on_failure(now_s)
        else:
            self._failures = 0

    def on_gone(self, now_s: float) -> None:
        """Take that the server has forgotten the revision, or the rest of a list. The first time costs no wait."""
        self.on_failure(now_s)
        if self._failures == 1:
            self._due_s = now_s

    def on_failure(self, now_s: float) -> None:
        """Take that a request was refused, or its connection broke."""
        if self.revision and now_s - self._watched_s > LONGEST_WAIT_S:
            self._failures = 0  # it has worked for a while
        self.revision = self._more = ""
        wait_s = min(FIRST_WAIT_S * 2.0**self._failures, LONGEST_WAIT_S)
        self._failures = min(self._failures + 1, 16)
        self._due_s = now_s + wait_s * (0.5 + self._draw())
