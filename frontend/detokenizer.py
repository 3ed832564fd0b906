"""Tokens to text while they come, never half a character.

Whatever the pieces, what `push` and a last `flush` return is together `tokenizer.decode` of all tokens
without special tokens, but for those that are asked for by name. The decoders that practically all language models
use are followed step by step, each token once:

- byte level (GPT-2, Llama 3, Qwen): a token is bytes, the text is their UTF-8;
- pieces (Llama 2, Mistral, Gemma, T5): a token is text with a sign for the space, or one byte. A run of
  bytes is text only if all of it is UTF-8, else every byte shows as U+FFFD; so it waits for its end.

Any other decoder is asked for a short window of tokens (`WindowDetokenizer`).
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from kvmesh.frontend.tokenizing import byte_level
from kvmesh.frontend.tokenizing.names import TokenNames

REPLACEMENT = "\ufffd"
NONE_SHOWN: frozenset[str] = frozenset()
MAX_VIEWS = 16  # different sets of special tokens to show, each with a table of its own


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these further tokens; may be empty."""
        ...

    def flush(self) -> str:
        """The rest, once no token follows."""
        ...

    def plain_texts(self) -> dict[int, bytes] | None:
        """Return the texts of tokens as they stand between the quotes of a JSON string. Up to the next `push` these
        tokens may be shown without one. The text is empty where a token takes `push`; None says that every token
        does."""
        ...


class TokenDecoder(Protocol):
    """Holds what all streams of one tokenizer share."""

    def stream(self, shown: frozenset[str] = NONE_SHOWN) -> Detokenizer:
        """Return a new stream. The special tokens in `shown` are text like others; the other special tokens are left
        out."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...


def token_decoder(tokenizer: Tokenizer, spec: dict[str, Any] | None, names: TokenNames | None = None) -> TokenDecoder:
    """The decoder for a tokenizer whose tokenizer.json says `spec` under "decoder"."""
    names = names or TokenNames(tokenizer)
    if (rules := piece_rules(spec)) is not None:
        return PieceDecoder(names, rules)
    match _steps(spec):
        case [{"type": "ByteLevel"}]:
            return ByteLevelDecoder(names)
        case _:
            return WindowDecoder(tokenizer, names)


def _steps(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A decoder's steps, in order, sequences unfolded."""
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [step for inner in spec["decoders"] for step in _steps(inner)]
    return [spec]


# --- byte level ---------------------------------------------------------------------------------------


class ByteLevelDecoder:
    def __init__(self, names: TokenNames) -> None:
        self.names = names
        self._view = lru_cache(MAX_VIEWS)(self._new_view)

    def stream(self, shown: frozenset[str] = NONE_SHOWN) -> Detokenizer:
        return ByteLevelDetokenizer(self._view(shown))

    def token_bytes(self, token_id: int) -> bytes:
        name = self.names.name(token_id)
        return b"" if name is None else byte_level.token_bytes(name)

    def _new_view(self, shown: frozenset[str]) -> "_TokenView":
        return _TokenView(self, shown)


class _ShownBytes(dict[int, bytes]):
    """Token id -> bytes that are shown; filled as tokens are met."""

    def __init__(self, decoder: ByteLevelDecoder, shown: frozenset[str]) -> None:
        super().__init__()
        self._decoder = decoder
        self._hidden_ids = decoder.names.hidden_ids(shown)

    def __missing__(self, token_id: int) -> bytes:
        hidden = token_id in self._hidden_ids
        shown = b"" if hidden else self._decoder.token_bytes(token_id)
        if shown or hidden:  # so there are no more entries than tokens, whatever a worker sends
            self[token_id] = shown
        return shown


class _ShownTexts(dict[int, str | None]):
    """Token id -> text that is shown, None where the bytes hold a part of a character; filled as tokens are met."""

    def __init__(self, shown_bytes: _ShownBytes) -> None:
        super().__init__()
        self._bytes = shown_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        if token_id in self._bytes:
            self[token_id] = text
        return text


class _PlainTexts(dict[int, bytes]):
    """Token id -> its text as the inside of a JSON string, empty where nothing or a part of a character is shown."""

    def __init__(self, shown_bytes: _ShownBytes) -> None:
        super().__init__()
        self._bytes = shown_bytes

    def __missing__(self, token_id: int) -> bytes:
        try:
            plain = msgspec.json.encode(self._bytes[token_id].decode())[1:-1]
        except UnicodeDecodeError:
            plain = b""
        if token_id in self._bytes:
            self[token_id] = plain
        return plain


class _TokenView:
    """Holds the text of each token, for all streams that show the same special tokens."""

    def __init__(self, decoder: ByteLevelDecoder, shown: frozenset[str]) -> None:
        self.bytes = _ShownBytes(decoder, shown)
        self.texts = _ShownTexts(self.bytes)
        self.plain = _PlainTexts(self.bytes)


class ByteLevelDetokenizer:
    __slots__ = ("_bytes", "_decoder", "_plain", "_texts", "_whole")

    def __init__(self, view: _TokenView) -> None:
        self._texts = view.texts
        self._bytes = view.bytes
        self._plain = view.plain
        self._whole = True  # no part of a character waits
        self._decoder: codecs.IncrementalDecoder | None = None  # made for the first part of a character

    def push(self, token_ids: Sequence[int]) -> str:
        if self._whole:
            if len(token_ids) == 1:
                text = self._texts[token_ids[0]]
                if text is not None:
                    return text
            else:
                texts = [self._texts[token_id] for token_id in token_ids]
                if None not in texts:
                    return "".join(texts)  # type: ignore[arg-type]
        return self._push_parts(token_ids)

    def plain_texts(self) -> dict[int, bytes] | None:
        return self._plain if self._whole else None

    def flush(self) -> str:
        return "" if self._decoder is None else self._decoder.decode(b"", final=True)

    def _push_parts(self, token_ids: Sequence[int]) -> str:
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoder.decode(b"".join([self._bytes[token_id] for token_id in token_ids]))
        self._whole = not self._decoder.getstate()[0]
        return text


# --- pieces -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PieceRules:
    """Says what a decoder of the piece kind does with the tokens."""

    replace: tuple[tuple[str, str], ...] = ()  # in every token, in order
    byte_fallback: bool = False  # tokens named <0x0A> are bytes
    strip_char: str = ""  # cut from the beginning of the whole text, up to strip_chars times
    strip_chars: int = 0
    bare_first: str = ""  # removed from the first token, before `replace`


def piece_rules(spec: dict[str, Any] | None) -> PieceRules | None:
    """Return the rules of a decoder; None if it is of another kind, or has steps in an order that is not known here."""
    match _steps(spec):
        case [{"type": "Metaspace", "replacement": str(sign), "prepend_scheme": str(scheme)}]:
            return PieceRules(replace=((sign, " "),), bare_first="" if scheme == "never" else sign)
        case [*replaces, {"type": "ByteFallback"}, {"type": "Fuse"}, strip] if strip["type"] == "Strip":
            if (pairs := _replacements(replaces)) is None or strip["stop"] != 0:
                return None
            return PieceRules(pairs, True, strip_char=strip["content"], strip_chars=strip["start"])
        case [*replaces, {"type": "ByteFallback"}] | [*replaces, {"type": "ByteFallback"}, {"type": "Fuse"}]:
            pairs = _replacements(replaces)
            return None if pairs is None else PieceRules(pairs, True)
    return None


def _replacements(steps: list[dict[str, Any]]) -> tuple[tuple[str, str], ...] | None:
    pairs: list[tuple[str, str]] = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
                pairs.append((pattern, content))
            case _:
                return None
    return tuple(pairs)


def fallback_byte(token: str) -> int | None:
    """Return 0x0A for the token <0x0A>, None for a token that is no byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


Piece = str | int | None  # text, one byte, or nothing to show


class _Pieces(dict[int, Piece]):
    """Token id -> what it stands for; filled as tokens are met."""

    def __init__(self, names: TokenNames, hidden_ids: frozenset[int], read: Callable[[str], Piece]) -> None:
        super().__init__()
        self._names = names
        self._read = read
        self._hidden_ids = hidden_ids

    def __missing__(self, token_id: int) -> Piece:
        if (name := self._names.name(token_id)) is None:
            return None  # no entry, so there are no more than tokens, whatever a worker sends
        piece = self[token_id] = None if token_id in self._hidden_ids else self._read(name)
        return piece


class _PlainPieces(dict[int, bytes]):
    """Token id -> its text as the inside of a JSON string, empty where it is none; filled as tokens are met."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        plain = msgspec.json.encode(piece)[1:-1] if isinstance(piece, str) else b""
        if token_id in self._pieces:
            self[token_id] = plain
        return plain


@dataclass(frozen=True, slots=True)
class _PieceView:
    """Holds the text of each token, for all streams that show the same special tokens."""

    pieces: _Pieces
    first_pieces: _Pieces  # as they are at the beginning
    plain: _PlainPieces


class PieceDecoder:
    def __init__(self, names: TokenNames, rules: PieceRules) -> None:
        self._names = names
        self._rules = rules
        self._view = lru_cache(MAX_VIEWS)(self._new_view)

    def stream(self, shown: frozenset[str] = NONE_SHOWN) -> Detokenizer:
        return PieceDetokenizer(self._view(shown), self._rules)

    def token_bytes(self, token_id: int) -> bytes:
        name = self._names.name(token_id)
        piece = None if name is None else self._read(name)
        if isinstance(piece, int):
            return bytes([piece])
        return b"" if piece is None else piece.encode()

    def _new_view(self, shown: frozenset[str]) -> "_PieceView":
        hidden_ids = self._names.hidden_ids(shown)
        pieces = _Pieces(self._names, hidden_ids, self._read)
        return _PieceView(pieces, _Pieces(self._names, hidden_ids, self._read_first), _PlainPieces(pieces))

    def _read(self, token: str) -> Piece:
        for pattern, content in self._rules.replace:
            token = token.replace(pattern, content)
        byte = fallback_byte(token) if self._rules.byte_fallback else None
        return token if byte is None else byte

    def _read_first(self, token: str) -> Piece:
        return self._read(token.replace(self._rules.bare_first, "") if self._rules.bare_first else token)


class PieceDetokenizer:
    __slots__ = (
        "_at_first_token", "_bytes", "_first_pieces", "_pieces", "_plain", "_plain_pieces", "_strip_char",
        "_strip_left",
    )  # fmt: skip

    def __init__(self, view: "_PieceView", rules: PieceRules) -> None:
        self._pieces = view.pieces
        self._first_pieces = view.first_pieces
        self._plain_pieces = view.plain
        self._at_first_token = True
        self._strip_char = rules.strip_char
        self._strip_left = rules.strip_chars  # how many characters may still be cut from the beginning
        self._bytes = bytearray()  # a run of byte tokens that goes on
        self._plain = False  # neither at the beginning nor in a run of bytes

    def push(self, token_ids: Sequence[int]) -> str:
        if self._plain and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            if piece.__class__ is str:
                return piece
        return self._push_all(token_ids)

    def plain_texts(self) -> dict[int, bytes] | None:
        return self._plain_pieces if self._plain else None

    def _push_all(self, token_ids: Sequence[int]) -> str:
        texts: list[str] = []
        for token_id in token_ids:
            piece = (self._first_pieces if self._at_first_token else self._pieces)[token_id]
            if piece is None:
                continue
            self._at_first_token = False
            if isinstance(piece, int):
                self._bytes.append(piece)
                continue
            if self._bytes:
                texts.append(self._end_of_run())
            texts.append(piece)
        text = self._strip("".join(texts))
        self._plain = not (self._at_first_token or self._strip_left or self._bytes)
        return text

    def flush(self) -> str:
        return self._strip(self._end_of_run())

    def _end_of_run(self) -> str:
        run = bytes(self._bytes)
        self._bytes.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        if not self._strip_left or not text:
            return text
        kept = text
        while self._strip_left and kept.startswith(self._strip_char):
            kept = kept[1:]
            self._strip_left -= 1
        if kept:  # something else has come: the beginning is over
            self._strip_left = 0
        return kept


# --- any other ----------------------------------------------------------------------------------------


class WindowDecoder:
    """Decodes with decoders that are not known by name, such as WordPiece."""

    def __init__(self, tokenizer: Tokenizer, names: TokenNames) -> None:
        self._tokenizer = tokenizer
        self._names = names

    def stream(self, shown: frozenset[str] = NONE_SHOWN) -> Detokenizer:
        return WindowDetokenizer(self._decode, self._names.hidden_ids(shown))

    def token_bytes(self, token_id: int) -> bytes:
        return self._decode([token_id]).encode()

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class WindowDetokenizer:
    """Decodes the last shown tokens again together with the new ones and returns what is more.

    Exact where a token's text depends on the token before it only. Text that ends with U+FFFD may be half a
    character and waits, for MAX_WAITING tokens at most, so that the window stays short.
    """

    MAX_WAITING = 16

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden_ids: frozenset[int]) -> None:
        self._decode = decode
        self._hidden_ids = hidden_ids
        self._shown: list[int] = []  # tokens before the new ones, for context
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token) for token in token_ids if token not in self._hidden_ids])

    def plain_texts(self) -> dict[int, bytes] | None:
        return None  # this is slow anyhow

    def flush(self) -> str:
        return self._take(self._new_text())

    def _push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._new_text()
        unsure = not text or text.endswith(REPLACEMENT)
        if unsure and len(self._waiting) < self.MAX_WAITING:
            return ""
        return self._take(text)

    def _new_text(self) -> str:
        return self._decode(self._shown + self._waiting)[len(self._decode(self._shown)) :]

    def _take(self, text: str) -> str:
        if self._waiting:
            self._shown, self._waiting = self._waiting, []
        return text
