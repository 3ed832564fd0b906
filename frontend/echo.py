"""Echo a prompt with the logprobs of its tokens, as they come from the worker. Pure."""

from collections.abc import Sequence
from math import nan

from kvmesh.frontend.answer import NOTHING, GrowingAnswer, Part, PlacedLogprob
from kvmesh.frontend.parsers.events import Content
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.messages import Delta, FinishReason, TokenLogprob, token_array


class PromptEcho:
    """Turns the logprobs of one prompt into parts of the answer: its text, with the place of each token in it."""

    __slots__ = ("_place", "_scored", "_shown_chars", "_text", "_tokens")

    def __init__(self, tokenizer: Tokenizer, tokens: bytes, text: str) -> None:
        """Begin with the first token, which has no logprob. `tokens`: u32 little endian; `text`: what is echoed."""
        self._tokens = token_array(tokens)
        self._text = text
        self._place = TokenPlaces(tokenizer, text)
        self._scored = 0  # tokens that have come
        self._shown_chars = 0

    @property
    def has_all(self) -> bool:
        return self._scored == len(self._tokens)

    def take(self, logprobs: Sequence[TokenLogprob]) -> Part:
        """Return the next part of the prompt: its first token if that has not come yet, then those of `logprobs`.

        Raise EngineError if they are not of the prompt's tokens.
        """
        entries = [*logprobs] if self._scored else [TokenLogprob(self._tokens[0], nan), *logprobs]
        expected = self._tokens[self._scored : self._scored + len(entries)].tolist()
        if [entry.token_id for entry in entries] != expected:
            raise EngineError(f"logprobs came of other tokens than those of the prompt of {len(self._tokens)}")
        self._scored += len(entries)
        placed = [PlacedLogprob(entry, self._place.next(entry.token_id), of_prompt=True) for entry in entries]
        end = len(self._text) if self.has_all else self._place.offset_chars
        text, self._shown_chars = self._text[self._shown_chars : end], end
        return Part((Content(text),) if text else (), placed)

    def finish(self) -> Part:
        """Return the last part when the answer begins. Raise EngineError if logprobs are missing."""
        part = NOTHING if self._scored else self.take(())
        if not self.has_all:
            raise EngineError(f"logprobs came of {self._scored} of the prompt's {len(self._tokens)} tokens")
        return part


class TokenPlaces:
    """Finds where each token of a prompt begins in the prompt's text.

    Tokens that show nothing, such as the one that a tokenizer puts first, have no length. Where the tokenizer changes
    the text before it reads it, places are as near as the lengths of the tokens lead.
    """

    __slots__ = ("_at", "_chars", "_data", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._data = text.encode(errors="replace")
        self._at = 0  # in `_data`
        self._chars = 0  # that begin before

    @property
    def offset_chars(self) -> int:
        """Return how many characters end before the next token."""
        is_inside = self._at < len(self._data) and self._data[self._at] & 0xC0 == 0x80
        return self._chars - is_inside

    def next(self, token_id: int) -> int:
        """Return where the next token begins."""
        offset = self.offset_chars
        end = self._at + self._length(self._tokenizer.token_bytes(token_id))
        piece = self._data[self._at : end]
        self._chars += len(piece) if piece.isascii() else sum([byte & 0xC0 != 0x80 for byte in piece])
        self._at = end
        return offset

    def _length(self, token: bytes) -> int:
        if self._data.startswith(token, self._at):
            return len(token)
        if not self._at and token[:1] == b" " and self._data.startswith(token[1:]):
            return len(token) - 1  # SentencePiece reads every text as if a space stood before it
        if token.decode(errors="replace") in self._tokenizer.special_tokens:
            return 0
        return min(len(token), len(self._data) - self._at)


class PromptAlone(GrowingAnswer):
    """An answer of no tokens, for who wants nothing but the prompt. It ends with the one token that workers make."""

    __slots__ = ()

    def on_delta(self, delta: Delta) -> Part:
        self.finish_reason = FinishReason.LENGTH
        return NOTHING
