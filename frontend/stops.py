"""Find stop strings in a text that arrives in pieces. Pure; any cutting into pieces gives the same result."""

from collections.abc import Sequence


class StopMatcher:
    """Text goes in, text that is safe to show comes out.

    Held back is only what may be the beginning of a stop string, so at most one character less than the
    longest. The stop that ends first wins; of those that end together, the one that began first. That is
    what reading character by character would find, so the result does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._max_held_chars = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown now. After a hit nothing is shown any more."""
        if self.hit is not None:
            return ""
        held_chars = len(self._held)
        text = self._held + text
        self._held = ""
        if found := self._first_hit(text, held_chars):
            _end, start, self.hit = found
            return text[:start]
        shown_chars = self._held_from(text)
        self._held = text[shown_chars:]
        return text[:shown_chars]

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str, held_chars: int) -> tuple[int, int, str] | None:
        """Return (end, start, stop) of the hit that ends first. No hit ends in what was held back, so none is looked
        for there: of a text that repeats itself, every look would cost the length of the text times that of the
        stop."""
        starts = [text.find(stop, max(0, held_chars + 1 - len(stop))) for stop in self._stops]
        hits = [(at + len(stop), at, stop) for at, stop in zip(starts, self._stops, strict=True) if at >= 0]
        return min(hits, default=None)

    def _held_from(self, text: str) -> int:
        """Return where the longest tail of `text` that may still become a stop string begins."""
        for start in range(max(0, len(text) - self._max_held_chars), len(text)):
            if text[start] in self._first_chars:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
