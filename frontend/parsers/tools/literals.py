"""Python's way to write values, turned into JSON. Nothing is evaluated."""

import re

from kvmesh.frontend.parsers.text import MAX_JSON_DEPTH, is_json, quoted

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
    r"|(?P<number>[-+]?[0-9.][0-9a-zA-Z_.]*(?:(?<=[eE])[-+][0-9]+)?)"
    r"|(?P<word>[A-Za-z]+)|(?P<mark>[][(){},:]))",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE_ESCAPES = {char: char for char in "\\'\""} | {
    "\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_MAX_NUMBER_CHARS = 64
_DIGITS = re.compile(r"([-+]?)([0-9]+(?:_[0-9]+)*)")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")

_Token = tuple[str, str]  # kind, text


class _NotALiteralError(ValueError):
    pass


def json_of_literal(text: str) -> str | None:
    """The JSON of a Python (or JSON) literal: a string, number, list, tuple or dict, True, False, None.

    None for anything else, and for what is nested deeper than MAX_JSON_DEPTH.
    """
    try:
        tokens = _Tokens(text)
        value = _value(tokens, MAX_JSON_DEPTH)
        return value if tokens.next() == ("end", "") else None
    except _NotALiteralError:
        return None


class _Tokens:
    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0
        self._peeked: _Token | None = None

    def next(self) -> _Token:
        token, self._peeked = self.peek(), None
        return token

    def peek(self) -> _Token:
        if self._peeked is None:
            self._peeked = self._read()
        return self._peeked

    def _read(self) -> _Token:
        if self._at == len(self._text):
            return "end", ""
        if (found := _TOKEN.match(self._text, self._at)) is None:
            raise _NotALiteralError
        self._at = found.end()
        kind = str(found.lastgroup)
        return kind, found[kind]


def _value(tokens: _Tokens, depth: int) -> str:
    if depth < 0:
        raise _NotALiteralError
    match tokens.next():
        case "string", text:
            return quoted(_strings(text, tokens))
        case "number", text:
            return _number(text)
        case "word", text if text in _WORDS:
            return _WORDS[text]
        case "mark", "[":
            items, _ = _items(tokens, "]", depth)
            return f"[{', '.join(items)}]"
        case "mark", "(":
            items, commas = _items(tokens, ")", depth)
            return items[0] if len(items) == 1 and not commas else f"[{', '.join(items)}]"
        case "mark", "{":
            return _dict(tokens, depth)
    raise _NotALiteralError


def _items(tokens: _Tokens, closer: str, depth: int) -> tuple[list[str], int]:
    """Return what stands up to `closer`, and the number of commas."""
    items: list[str] = []
    commas = 0
    while tokens.peek() != ("mark", closer):
        items.append(_value(tokens, depth - 1))
        if tokens.peek() != ("mark", ","):
            break
        tokens.next()
        commas += 1
    _take(tokens, closer)
    return items, commas


def _dict(tokens: _Tokens, depth: int) -> str:
    members: list[str] = []
    while tokens.peek() != ("mark", "}"):
        key = _value(tokens, 0)  # no list or dict
        _take(tokens, ":")
        members.append((key if key.startswith('"') else quoted(key)) + ": " + _value(tokens, depth - 1))
        if tokens.peek() != ("mark", ","):
            break
        tokens.next()
    _take(tokens, "}")
    return f"{{{', '.join(members)}}}"


def _take(tokens: _Tokens, mark: str) -> None:
    if tokens.next() != ("mark", mark):
        raise _NotALiteralError


def _strings(first: str, tokens: _Tokens) -> str:
    """Strings side by side are one, which also reads most strings in triple quotes."""
    parts = [_unescaped(first[1:-1])]
    while tokens.peek()[0] == "string":
        parts.append(_unescaped(tokens.next()[1][1:-1]))
    return "".join(parts)


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return _SURROGATES.sub(_paired, _ESCAPE.sub(_character, text))


def _paired(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _character(escape: re.Match[str]) -> str:
    octal, *hexes, other = escape.groups()
    if other is not None:
        return _SIMPLE_ESCAPES.get(other, "\\" + other)
    code = int(octal, 8) if octal else int(next(filter(None, hexes)), 16)
    return chr(code) if code < 0x110000 else escape[0]


def _number(text: str) -> str:
    if len(text) > _MAX_NUMBER_CHARS:
        raise _NotALiteralError
    if is_json(text):
        return text
    if whole := _DIGITS.fullmatch(text):
        return ("-" if whole[1] == "-" else "") + (whole[2].replace("_", "").lstrip("0") or "0")
    if _FRACTION.fullmatch(text):
        number = repr(float(text))
        if is_json(number):  # not inf
            return number
    raise _NotALiteralError
