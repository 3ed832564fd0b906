"""Token ids for servers that speak in texts, by the tokenizer of the model's folder."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvmesh.protocol.errors import ConfigError

ZERO_WIDTH_SPACE = "\u200b"
_ANCHOR = "\n"  # put before a piece, so that the piece is not tokenized as the beginning of a text


class Texts:
    """Both ways. What comes back from a server are tokens that mean the same text, not always those it generated."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        longest_first = sorted([text for text in self._added.values() if text.strip()], key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
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
        """The prompt as a text, special tokens as they are written.

        The server would read a special token wherever it is spelled. So a zero-width space goes into those that are
        not tokens here, but the text of a user.
        """
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        written = sum([token in self._added for token in tokens])
        if len(self._spelled.findall(text)) <= written:
            return text
        return "".join(self._literal_parts(tokens))

    def _literal_parts(self, tokens: Sequence[int]) -> Iterator[str]:
        places = [place for place, token in enumerate(tokens) if token in self._added]
        for start, end in pairwise([0, *places, len(tokens)]):
            part: str = self._tokenizer.decode(tokens[start:end], skip_special_tokens=False)
            token = self._added.get(tokens[start], "") if start < end else ""
            token = token if part.startswith(token) else ""
            yield token + self._spelled.sub(_broken, part[len(token) :])


def _broken(spelling: re.Match[str]) -> str:
    return spelling[0][0] + ZERO_WIDTH_SPACE + spelling[0][1:]


def read_texts(folder: Path) -> Texts:
    """Raises ConfigError if the folder has no tokenizer that can be read."""
    path = folder / "tokenizer.json"
    try:
        return Texts(Tokenizer.from_file(str(path)))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ConfigError(
            f"cannot read {path}: {error}", hint="give --model-path a folder with the model's tokenizer.json"
        ) from error
