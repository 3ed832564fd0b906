"""Keep two promises for every parser of calls: no special token in prose, and arguments that are JSON objects.

Arguments go out up to a place where they can be closed: after a value, or within a string. Where a call breaks off they
are closed there, and what could not be sent is prose.
"""

from collections.abc import Iterator, Sequence

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Parser, Reasoning
from kvmesh.frontend.parsers.text import JsonScanner, marker_finder

MAX_TOKEN_CHARS = 64
BLOCK_CHARS = 512  # of prose, searched at once: the work for each character stays constant
_NONE = ("", "[]", "null", '""')  # models write these where the call has no arguments


class SoundEvents:
    """Passes on the events of a parser, mended."""

    def __init__(self, parser: Parser, special: tuple[str, ...], *, is_forced: bool = False) -> None:
        """Mend the events of `parser`. `special`: the special tokens that it reads; with `is_forced` what is left of
        a call is no prose."""
        self._parser = parser
        self._finder = marker_finder(special)
        self._is_forced = is_forced
        self._held = ""  # prose that may become a special token
        self._shown = 0  # characters of `_held` that went out already
        self._call: _OpenCall | None = None  # whose arguments are not complete

    @property
    def is_plain(self) -> bool:
        return self._call is None and not self._held and self._parser.is_plain

    def push(self, text: str) -> Sequence[Event]:
        events = self._parser.push(text)
        if not self._held and self._call is None and all(map(self._is_sound, events)):
            return events
        return list(self._mended(events))

    def flush(self) -> Sequence[Event]:
        return [*self._mended(self._parser.flush()), *self._closed(), *self._let_go()]

    def _is_sound(self, event: Event) -> bool:
        return isinstance(event, Reasoning) or (isinstance(event, Content) and self._finder.absent(event.text))

    def _mended(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            match event:
                case CallArguments(_, fragment) if self._call is not None:
                    yield from self._call.argued(fragment)
                    if self._call.is_over:
                        yield from self._closed()
                case CallArguments(_, fragment):
                    yield from self._prose(fragment)
                case CallBegun(index):
                    yield from self._closed()
                    yield from self._let_go()
                    self._call = _OpenCall(index)
                    yield event
                case Content(text):
                    yield from self._closed()
                    yield from self._prose(text)
                case Reasoning():
                    yield from self._closed()
                    yield from self._let_go()
                    yield event

    def _closed(self) -> Iterator[Event]:
        """End the call that is open."""
        if self._call is not None:
            call, self._call = self._call, None
            closing, rest = call.closed()
            if closing:
                yield CallArguments(call.index, closing)
            if not self._is_forced:
                yield from self._prose(rest)

    def _prose(self, text: str) -> Iterator[Event]:
        """Yield prose without special tokens, nor what becomes one where another is left out."""
        for start in range(0, len(text), BLOCK_CHARS):
            yield from self._block(text[start : start + BLOCK_CHARS])

    def _block(self, text: str) -> Iterator[Event]:
        text, at, shown = self._held + text, 0, self._shown
        while True:
            where, marker = self._finder.find(text, at)
            if where > shown:
                yield Content(text[shown:where])
            if not marker:
                break
            end = max(where, shown)  # what is shown of the token stays, and may begin another one
            keep = self._begun_at(text, end)
            text, at, shown = text[keep:end] + text[where + len(marker) :], 0, end - keep  # at most a block
        start = self._begun_at(text, where)
        self._held, self._shown = text[start:], max(shown, where) - start

    def _begun_at(self, text: str, end: int) -> int:
        """Return where the text that ends at `end` begins to look like special tokens, one in the other."""
        low = max(0, end - MAX_TOKEN_CHARS)
        while True:
            begun = low + self._finder.find(text[low:end])[0]
            if begun == end:
                return end
            end = begun

    def _let_go(self) -> Iterator[Event]:
        """Yield the prose that is held: an event of another kind follows, or nothing."""
        if rest := self._held[self._shown :]:
            self._shown = len(self._held)
            yield Content(rest)


class _OpenCall:
    """Follows the arguments of one call."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._scanner = JsonScanner()
        self._sent = self._scanner.copied()  # the scanner where the text that went out ends
        self._begun = False
        self._held: list[str] = []  # cannot go out yet
        self._rest = ""  # behind what the scanner accepts
        self.is_over = False

    def argued(self, fragment: str) -> Iterator[Event]:
        """Yield the arguments that can be closed."""
        if not self._begun:
            if self._rest:
                self._rest += fragment
                return
            fragment = fragment.lstrip()
            if not fragment.startswith("{"):
                self._rest = fragment
                return
            self._rest, self._begun = "", True
        read, at = self._scanner.feed(fragment, 0, len(fragment))
        self._held.append(read)
        if at < len(fragment):
            self._rest += fragment[at:]
            self.is_over = self._scanner.broken or bool(self._rest.strip())
        if self._scanner.closing is not None:
            held = "".join(self._held)
            self._held.clear()
            self._sent = self._scanner.copied()
            if held:
                yield CallArguments(self.index, held)

    def closed(self) -> tuple[str, str]:
        """Return what closes the arguments, and the text that is none."""
        if not self._begun:
            return "{}", "" if self._rest.strip() in _NONE else self._rest
        held, good, scanner = "".join(self._held), 0, self._sent
        closing = scanner.closing
        for at, char in enumerate(held, 1):
            scanner.feed(char, 0, 1)
            if scanner.closing is not None:
                good, closing = at, scanner.closing
            elif char == "," and scanner.closing_before_comma is not None:
                good, closing = at - 1, scanner.closing_before_comma
        rest = self._rest if self._scanner.broken or self._rest.strip() else ""
        return held[:good] + (closing or ""), held[good:] + rest
