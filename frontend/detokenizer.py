"""Tokens to text while they come, never half a character.

Whatever the pieces, what `push` and a last `flush` return is together `tokenizer.decode` of all tokens
without special tokens. The decoders that practically all language models use are followed step by step,
each token once:

- byte level (GPT-2, Llama 3, Qwen): a token is bytes, the text is their UTF-8;
- pieces (Llama 2, Mistral, Gemma, T5): a token is text with a sign for the space, or one byte. A run of
  bytes is text only if all of it is UTF-8, else every byte shows as U+FFFD; so it waits for its end.

Any other decoder is asked for a short window of tokens (`WindowDetokenizer`).
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these further tokens; may be empty."""
        ...

    def flush(self) -> str:
        """The rest, once no token follows."""
        ...


class TokenDecoder(Protocol):
    """What all streams of one tokenizer share."""

    def stream(self) -> Detokenizer: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def token_decoder(tokenizer: Tokenizer, spec: dict[str, Any] | None) -> TokenDecoder:
    """The decoder for a tokenizer whose tokenizer.json says `spec` under "decoder"."""
    if (rules := piece_rules(spec)) is not None:
        return PieceDecoder(tokenizer, rules)
    match _steps(spec):
        case [{"type": "ByteLevel"}]:
            return ByteLevelDecoder(tokenizer)
        case _:
            return WindowDecoder(tokenizer)


def _steps(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A decoder's steps, in order, sequences unfolded."""
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [step for inner in spec["decoders"] for step in _steps(inner)]
    return [spec]


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


# --- byte level ---------------------------------------------------------------------------------------


def byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_CHAR = byte_of_char()


def byte_level_bytes(token: str) -> bytes:
    """A token with any character that is no stand-in is meant literally (added tokens)."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


class _ShownBytes(dict[int, bytes]):
    """Token id -> bytes that are shown; filled as tokens are met, so bounded by the vocabulary."""

    def __init__(self, decoder: "ByteLevelDecoder") -> None:
        super().__init__()
        self._decoder = decoder

    def __missing__(self, token_id: int) -> bytes:
        hidden = token_id in self._decoder.special_ids
        shown = self[token_id] = b"" if hidden else self._decoder.token_bytes(token_id)
        return shown


class ByteLevelDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = special_token_ids(tokenizer)
        self._shown = _ShownBytes(self)

    def stream(self) -> Detokenizer:
        return ByteLevelDetokenizer(self._shown)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else byte_level_bytes(token)


class ByteLevelDetokenizer:
    def __init__(self, shown: dict[int, bytes]) -> None:
        self._shown = shown
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        shown = self._shown
        return self._decode(b"".join([shown[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", final=True)


# --- pieces -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PieceRules:
    """What a decoder of the piece kind does with the tokens."""

    replace: tuple[tuple[str, str], ...] = ()  # in every token, in order
    byte_fallback: bool = False  # tokens named <0x0A> are bytes
    strip_char: str = ""  # cut from the beginning of the whole text, up to strip_chars times
    strip_chars: int = 0
    bare_first: str = ""  # removed from the first token, before `replace`


def piece_rules(spec: dict[str, Any] | None) -> PieceRules | None:
    """None if the decoder is of another kind, or has steps in an order that is not known here."""
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
    """0x0A for the token <0x0A>, else None."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


Piece = str | int | None  # text, one byte, or nothing to show


class _Pieces(dict[int, Piece]):
    """Token id -> what it stands for; filled as tokens are met, so bounded by the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, read: Callable[[str], Piece]) -> None:
        super().__init__()
        self._token = tokenizer.id_to_token
        self._read = read
        self._special_ids = special_token_ids(tokenizer)

    def __missing__(self, token_id: int) -> Piece:
        token = None if token_id in self._special_ids else self._token(token_id)
        piece = self[token_id] = None if token is None else self._read(token)
        return piece


class PieceDecoder:
    def __init__(self, tokenizer: Tokenizer, rules: PieceRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._pieces = _Pieces(tokenizer, self._read)
        self._first_pieces = _Pieces(tokenizer, self._read_first)

    def stream(self) -> Detokenizer:
        return PieceDetokenizer(self._pieces, self._first_pieces, self._rules)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        piece = None if token is None else self._read(token)
        if isinstance(piece, int):
            return bytes([piece])
        return b"" if piece is None else piece.encode()

    def _read(self, token: str) -> Piece:
        for pattern, content in self._rules.replace:
            token = token.replace(pattern, content)
        byte = fallback_byte(token) if self._rules.byte_fallback else None
        return token if byte is None else byte

    def _read_first(self, token: str) -> Piece:
        return self._read(token.replace(self._rules.bare_first, "") if self._rules.bare_first else token)


class PieceDetokenizer:
    def __init__(self, pieces: dict[int, Piece], first_pieces: dict[int, Piece], rules: PieceRules) -> None:
        self._pieces = pieces
        self._first_pieces = first_pieces
        self._at_first_token = True
        self._strip_char = rules.strip_char
        self._strip_left = rules.strip_chars  # how many characters may still be cut from the beginning
        self._bytes = bytearray()  # a run of byte tokens that goes on

    def push(self, token_ids: Sequence[int]) -> str:
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
        return self._strip("".join(texts))

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
    """For decoders that are not known by name, such as WordPiece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)

    def stream(self) -> Detokenizer:
        return WindowDetokenizer(self._decode, self._special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._decode([token_id], special=True).encode()

    def _decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text


class WindowDetokenizer:
    """Decodes the last shown tokens again together with the new ones and returns what is more.

    Exact where a token's text depends on the token before it only. Text that ends with U+FFFD may be half a
    character and waits, for MAX_WAITING tokens at most, so that the window stays short.
    """

    MAX_WAITING = 16

    def __init__(self, decode: Callable[[Sequence[int]], str], special_ids: frozenset[int]) -> None:
        self._decode = decode
        self._special_ids = special_ids
        self._shown: list[int] = []  # tokens before the new ones, for context
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token) for token in token_ids if token not in self._special_ids])

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
