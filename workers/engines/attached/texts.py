"""Token ids for servers that speak in texts, by the tokenizer of the model's folder."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from protocol.errors import ConfigError

_ANCHOR = "\n"  # put before a piece, so that the piece is not tokenized as the beginning of a text


class Texts:
    """Both ways. What comes back from a server are tokens that mean the same text, not always those it generated."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids

    def tokens_of(self, piece: str) -> Sequence[int]:
        """Tokens of a piece of an answer: without what a tokenizer puts before the beginning of a text."""
        if not piece:
            return ()
        ids: list[int] = self._tokenizer.encode(_ANCHOR + piece, add_special_tokens=False).ids
        size = len(self._anchor)
        if ids[:size] == self._anchor:
            return ids[size:]
        plain: list[int] = self._tokenizer.encode(piece, add_special_tokens=False).ids
        return plain

    def text_of(self, tokens: Sequence[int]) -> str:
        """The prompt as a text, special tokens as they are written."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def read_texts(folder: Path) -> Texts:
    """Raises ConfigError if the folder has no tokenizer that can be read."""
    path = folder / "tokenizer.json"
    try:
        return Texts(Tokenizer.from_file(str(path)))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ConfigError(
            f"cannot read {path}: {error}", hint="give --model-path a folder with the model's tokenizer.json"
        ) from error
