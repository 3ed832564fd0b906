"""Find what a split pattern of a pre-tokenizer can never join. Pure.

A pre-tokenizer splits a text with a regular expression, from left to right, each match starting where the last one
ended. Whether a text may be cut between two characters without changing the matches can be read off the pattern:
if no match holds `left` directly followed by `right`, and no assertion is asked directly after `left`, then all
matches left of the cut are the same with and without what follows. If besides `right` alone is a match, a match
starts at the cut, so what follows is split as if it stood alone.

Only the small language that tokenizers use is understood; anything else (anchors, look-behind, back references,
intersections of classes) raises UnknownPattern.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

CharTest = Callable[[str], bool]


class UnknownPattern(Exception):
    """The pattern uses what is not understood here. No error of a user: the text is then not cut."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Says what a part of a pattern may do at the border between `left` and `right`.

    Whether it may ... (True too where it is not known):
    """

    empty: bool = False  # match nothing, with or without assertions
    starts: bool = False  # begin with `right`
    asks_first: bool = False  # ask an assertion before it has matched anything
    ends: bool = False  # end with a character of `left`
    joins: bool = False  # hold `right`, or an assertion, directly after a character of `left`
    # and for certain (False where it is not known):
    blank: bool = False  # matches nothing without an assertion
    alone: bool = False  # matches exactly `right` without an assertion

    def then(self, other: "Joint") -> "Joint":
        return Joint(
            empty=self.empty and other.empty,
            starts=self.starts or (self.empty and other.starts),
            asks_first=self.asks_first or (self.empty and other.asks_first),
            ends=other.ends or (other.empty and self.ends),
            joins=self.joins or other.joins or (self.ends and (other.starts or other.asks_first)),
            blank=self.blank and other.blank,
            alone=(self.alone and other.blank) or (self.blank and other.alone),
        )

    def either(self, other: "Joint") -> "Joint":
        return Joint(
            empty=self.empty or other.empty,
            starts=self.starts or other.starts,
            asks_first=self.asks_first or other.asks_first,
            ends=self.ends or other.ends,
            joins=self.joins or other.joins,
            blank=self.blank or other.blank,
            alone=self.alone or other.alone,
        )

    def repeated(self, least: int, more_than_once: bool, *, exact: bool) -> "Joint":
        """Return the joint of a repetition; with `exact`, nothing but these bounds is known to be meant."""
        again = more_than_once and self.ends and (self.starts or self.asks_first)
        return Joint(
            empty=self.empty or least == 0,
            starts=self.starts,
            asks_first=self.asks_first,
            ends=self.ends,
            joins=self.joins or again,
            blank=exact and (self.blank or least == 0),
            alone=exact and self.alone and (least <= 1 or self.blank),
        )


NOTHING = Joint(empty=True, blank=True)
ASSERTION = Joint(empty=True, asks_first=True)


def joint(pattern: str, left: str, right: str) -> Joint:
    """Return what matches of `pattern` may do where one of the characters `left` stands before the character `right`.

    Raises UnknownPattern.
    """
    return _Parser(pattern, left, right).whole()


_CATEGORY = re.compile(r"[CLMNPSZ][a-z]?")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_HEX = re.compile(r"x\{([0-9A-Fa-f]{1,5})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_LITERAL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_GROUPS = {"(?:": False, "(?>": False, "(?i:": True}


class _Parser:
    """Recursive descent. Every method reads one construct at `_at` and says what it may do."""

    MAX_DEPTH = 50

    def __init__(self, pattern: str, left: str, right: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._left = left
        self._right = right
        self._any_case = False
        self._depth = 0

    def whole(self) -> Joint:
        found = self._alternatives()
        if self._at < len(self._pattern):
            self._unknown()
        return found

    def _unknown(self) -> NoReturn:
        raise UnknownPattern(f"at {self._at} of {self._pattern!r}")

    def _next_is(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _skip(self, text: str) -> bool:
        if not self._next_is(text):
            return False
        self._at += len(text)
        return True

    def _take(self) -> str:
        if self._at >= len(self._pattern):
            self._unknown()
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self) -> Joint:
        self._depth += 1
        if self._depth > self.MAX_DEPTH:
            self._unknown()
        found = self._sequence()
        while self._skip("|"):
            found = found.either(self._sequence())
        self._depth -= 1
        return found

    def _sequence(self) -> Joint:
        found = NOTHING
        while self._at < len(self._pattern) and not self._next_is("|") and not self._next_is(")"):
            found = found.then(self._repeated())
        return found

    def _repeated(self) -> Joint:
        found = self._atom()
        while (bounds := self._bounds()) is not None:
            least, more_than_once = bounds
            if self._skip("+") or self._skip("?"):  # dialects differ: lazy, possessive, or repeated once more
                found = found.repeated(0, True, exact=False)
            else:
                found = found.repeated(least, more_than_once, exact=True)
        return found

    def _bounds(self) -> tuple[int, bool] | None:
        """Return (least, may be more than once) of a quantifier, if one stands here."""
        for sign, bounds in (("*", (0, True)), ("+", (1, True)), ("?", (0, False))):
            if self._skip(sign):
                return bounds
        if not self._next_is("{"):
            return None
        count = _COUNT.match(self._pattern, self._at)
        if count is None or not (count[1] or count[3]):
            self._unknown()
        self._at = count.end()
        least = int(count[1] or 0)
        most = least if not count[2] else int(count[3] or 2)
        return least, most > 1

    def _atom(self) -> Joint:
        if self._next_is("("):
            return self._group()
        return self._one_char()

    def _group(self) -> Joint:
        if self._skip("(?!") or self._skip("(?="):
            self._one_char()  # a longer look could pass over the cut
            if not self._skip(")"):
                self._unknown()
            return ASSERTION
        outside = self._any_case
        opening = next((sign for sign in _GROUPS if self._skip(sign)), None)
        if opening is not None:
            self._any_case = outside or _GROUPS[opening]
        elif self._next_is("(?") or not self._skip("("):
            self._unknown()
        found = self._alternatives()
        if not self._skip(")"):
            self._unknown()
        self._any_case = outside
        return found

    def _one_char(self) -> Joint:
        test = self._class() if self._skip("[") else self._any_char() if self._skip(".") else self._char("^$*+?{)|")
        if self._any_case:
            test = _any_case(test)
        right = test(self._right)
        return Joint(starts=right, alone=right, ends=any(map(test, self._left)))

    def _any_char(self) -> CharTest:
        return lambda char: char != "\n"

    def _class(self) -> CharTest:
        negated = self._skip("^")
        tests: list[CharTest] = []
        while not self._skip("]"):
            if self._next_is("[") or self._next_is("&&"):
                self._unknown()
            tests.append(self._range_or_char())
        if not tests:
            self._unknown()
        return lambda char: any(test(char) for test in tests) != negated

    def _range_or_char(self) -> CharTest:
        if (first := self._literal()) is None:
            return self._kind_of_char()
        if self._next_is("-]") or not self._skip("-"):
            return first.__eq__
        if (last := self._literal()) is None:
            self._unknown()
        return lambda char: first <= char <= last

    def _char(self, signs: str) -> CharTest:
        if self._at < len(self._pattern) and self._pattern[self._at] in signs:
            self._unknown()
        if (literal := self._literal()) is not None:
            return literal.__eq__
        return self._kind_of_char()

    def _literal(self) -> str | None:
        """The one character that is meant here, or None, and nothing is read."""
        char = self._take()
        if char != "\\":
            return char
        name = self._take()
        if name in _LITERAL_ESCAPES:
            return _LITERAL_ESCAPES[name]
        if name in "xu" and (code := _HEX.match(self._pattern, self._at - 1)) is not None:
            self._at = code.end()
            return chr(int(code[1] or code[2] or code[3], 16))
        if not name.isalnum():
            return name
        self._at -= 2
        return None

    def _kind_of_char(self) -> CharTest:
        """An escape for a kind of characters, as for white space or letters."""
        name = self._pattern[self._at + 1]
        self._at += 2
        if name in "pP":
            return _opposite(self._property(), name == "P")
        if name not in "sSdDwW":  # an anchor, a back reference ...
            self._unknown()
        return _opposite(_CLASSES[name.lower()], name.isupper())

    def _property(self) -> CharTest:
        end = self._pattern.find("}", self._at)
        if not self._skip("{") or end < 0:
            self._unknown()
        name = self._pattern[self._at : end]
        self._at = end + 1
        negated = name.startswith("^")
        name = name.removeprefix("^")
        if name in _SCRIPTS:
            return _opposite(_script(name), negated)
        if not _CATEGORY.fullmatch(name):
            self._unknown()
        return _opposite(lambda char: unicodedata.category(char).startswith(name), negated)


_CLASSES: dict[str, CharTest] = {
    "s": str.isspace,
    "d": lambda char: unicodedata.category(char) == "Nd",
    "w": lambda char: char == "_" or unicodedata.category(char)[0] in "LMN",
}
_SCRIPTS = {"Han": "CJK UNIFIED", "Hiragana": "HIRAGANA LETTER", "Katakana": "KATAKANA LETTER"}


def _script(name: str) -> CharTest:
    """Exact for the letters of these scripts, which is all that is asked here besides ASCII and punctuation."""
    return lambda char: unicodedata.name(char, "").startswith(_SCRIPTS[name])


def _opposite(test: CharTest, negated: bool) -> CharTest:
    return (lambda char: not test(char)) if negated else test


def _any_case(test: CharTest) -> CharTest:
    return lambda char: test(char) or test(char.lower()) or test(char.upper())
