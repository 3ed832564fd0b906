"""Reading text that arrives in pieces: markers that may be cut in two, JSON that is not there yet. Pure."""

import json
import re
from collections.abc import Sequence
from copy import copy
from enum import IntEnum, auto
from functools import lru_cache

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE_RUN = re.compile(r"[ \t\n\r]*")
_LITERAL_RUN = re.compile(r"[-+.0-9a-zA-Z]*")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SPACE = frozenset(" \t\n\r")
_ESCAPABLE = frozenset('"\\/bfnrt')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_MAX_LITERAL_CHARS = 1024
MAX_JSON_DEPTH = 64

_plain_json = json.JSONEncoder(ensure_ascii=False).encode  # an encoder made once: json.dumps would make it anew


class MarkerFinder:
    """Finds the first of some markers in text that may end in the middle of one.

    A marker may contain another only as its end (`\\n</x>` and `</x>`): then the longer one is found.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._first_chars = frozenset(marker[0] for marker in markers)
        self._only_first = next(iter(self._first_chars)) if len(self._first_chars) == 1 else ""
        self._pattern = re.compile("|".join(map(re.escape, markers))) if markers else None
        self._beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._max_held_chars = max(map(len, markers), default=1) - 1

    def absent(self, text: str) -> bool:
        """Return whether no marker is in `text`, nor the beginning of one: the quick test for plain text."""
        if self._only_first:
            return text.find(self._only_first) < 0
        return self._first_chars.isdisjoint(text)

    def find(self, text: str, at: int = 0) -> tuple[int, str]:
        """Return (where it begins, the marker); without a marker, where the tail begins that may become one, and ""."""
        if self._pattern is None or (self._only_first and text.find(self._only_first, at) < 0):
            return len(text), ""
        if found := self._pattern.search(text, at):
            return found.start(), found[0]
        return self._held_from(text, at), ""

    def _held_from(self, text: str, at: int) -> int:
        for start in range(max(at, len(text) - self._max_held_chars), len(text)):
            if text[start] in self._first_chars and text[start:] in self._beginnings:
                return start
        return len(text)


@lru_cache(maxsize=64)
def marker_finder(markers: tuple[str, ...]) -> MarkerFinder:
    """The finder of these markers. It holds no text, so that all answers can share it."""
    return MarkerFinder(markers)


def escaped(text: str) -> str:
    """Return `text` as it stands inside a JSON string."""
    return quoted(text)[1:-1]


def quoted(text: str) -> str:
    """Return `text` as a JSON string, which UTF-8 can carry even if `text` has half a surrogate pair."""
    plain = _plain_json(text)
    return plain if plain.isascii() or encodable(plain) else json.dumps(text)


def is_json(text: str) -> bool:
    """Return whether `text` is one JSON value, nested at most MAX_JSON_DEPTH deep, with white space around it."""
    scanner = JsonScanner()
    fragment, end = scanner.feed(text, 0, len(text))
    return fragment == text[:end] and scanner.complete and not text[end:].strip(" \t\n\r")


def encodable(text: str) -> bool:
    """UTF-8 can carry `text`: there is no half of a surrogate pair in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Expect(IntEnum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY = auto()
    KEY_OR_END = auto()  # after {
    COLON = auto()
    NEXT = auto()  # , or the end of what is open
    STRING = auto()  # more of a string
    ESCAPE = auto()  # what follows a backslash
    HEX = auto()  # more of \uXXXX
    LITERAL = auto()  # more of a number, true, false or null
    NOTHING = auto()  # the value is complete


_MAY_CLOSE = (_Expect.NEXT, _Expect.KEY_OR_END, _Expect.VALUE_OR_END)


class JsonScanner:
    """Follows one JSON value character by character, strictly, and so knows where it ends or stops being JSON.

    One fault of models is mended: control characters (a line break, say) inside a string are escaped.
    """

    def __init__(self, max_depth: int = MAX_JSON_DEPTH) -> None:
        self._expect = _Expect.VALUE
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._max_depth = max_depth
        self._in_key = False
        self._hex_left = 0
        self._literal = ""
        self.broken = False  # the character where `feed` stopped cannot stand there

    @property
    def done(self) -> bool:
        """The value is over. (A number is over once another character follows.)"""
        return self._expect is _Expect.NOTHING

    @property
    def complete(self) -> bool:
        """The value is over if no text follows."""
        at_number = self._expect is _Expect.LITERAL and not self._closers
        return self.done or (at_number and _LITERAL.fullmatch(self._literal) is not None)

    @property
    def closing(self) -> str | None:
        """Return the text that completes the value here, None if none does without adding to it."""
        if self._expect is _Expect.STRING and not self._in_key:
            return '"' + "".join(reversed(self._closers))
        return "".join(reversed(self._closers)) if self.done or self._expect in _MAY_CLOSE else None

    @property
    def closing_before_comma(self) -> str | None:
        """Return the text that completes the value in place of the comma that was just read, None if it was none."""
        return "".join(reversed(self._closers)) if self._expect in (_Expect.KEY, _Expect.VALUE) else None

    def copied(self) -> "JsonScanner":
        """Return a scanner at the same place."""
        other = copy(self)
        other._closers = self._closers.copy()
        return other

    def feed(self, text: str, at: int, end: int) -> tuple[str, int]:
        """Read `text[at:end]` as far as it belongs to the value: (the JSON read, where the reading stopped)."""
        mended: list[str] = []
        start = at
        while at < end and not self.broken and self._expect is not _Expect.NOTHING:
            if self._expect is _Expect.STRING:
                at = _run(_STRING_RUN, text, at, end)
                if at < end and text[at] < " ":
                    mended += (text[start:at], escaped(text[at]))
                    start = at = at + 1
                elif at < end:
                    self._in_string(text[at])
                    at += 1
            elif self._expect is _Expect.LITERAL:
                at = self._in_literal(text, at, end)
            elif text[at] in _SPACE and self._expect not in (_Expect.ESCAPE, _Expect.HEX):
                at = _run(_SPACE_RUN, text, at, end)
            else:
                at += self._step(text[at])
        return "".join(mended) + text[start:at], at

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._expect = _Expect.ESCAPE
        elif self._in_key:
            self._in_key = False
            self._expect = _Expect.COLON
        else:
            self._after_value()

    def _in_literal(self, text: str, at: int, end: int) -> int:
        stop = _run(_LITERAL_RUN, text, at, min(end, at + _MAX_LITERAL_CHARS - len(self._literal)))
        self._literal += text[at:stop]
        if stop < end:
            if _LITERAL.fullmatch(self._literal):
                self._after_value()
            else:
                self.broken = True
        return stop

    def _step(self, char: str) -> int:
        """Take one character of structure, 1; leave it, 0."""
        expect = self._expect
        if expect is _Expect.VALUE:
            return self._begin_value(char)
        if expect is _Expect.NEXT and char == ",":
            self._expect = _Expect.KEY if self._closers[-1] == "}" else _Expect.VALUE
        elif expect in _MAY_CLOSE and char == self._closers[-1]:
            self._closers.pop()
            self._after_value()
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect in (_Expect.KEY, _Expect.KEY_OR_END) and char == '"':
            self._in_key = True
            self._expect = _Expect.STRING
        elif expect is _Expect.VALUE_OR_END:
            return self._begin_value(char)
        elif expect is _Expect.ESCAPE and char == "u":
            self._expect, self._hex_left = _Expect.HEX, 4
        elif expect is _Expect.ESCAPE and char in _ESCAPABLE:
            self._expect = _Expect.STRING
        elif expect is _Expect.HEX and char in _HEX_DIGITS:
            self._hex_left -= 1
            self._expect = _Expect.HEX if self._hex_left else _Expect.STRING
        else:
            self.broken = True
            return 0
        return 1

    def _begin_value(self, char: str) -> int:
        if char == '"':
            self._expect = _Expect.STRING
        elif char in "{[" and len(self._closers) < self._max_depth:
            self._closers.append("}" if char == "{" else "]")
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.VALUE_OR_END
        elif char in "-0123456789tfn":
            self._literal = ""
            self._expect = _Expect.LITERAL
            return 0
        else:
            self.broken = True
            return 0
        return 1

    def _after_value(self) -> None:
        self._expect = _Expect.NEXT if self._closers else _Expect.NOTHING


def _run(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    """Return where the run of `pattern`, which may be empty, ends."""
    found = pattern.match(text, at, end)
    return found.end() if found else at
