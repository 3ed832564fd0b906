"""Prompts of random common words with an exact number of tokens, and where it is asked for a common beginning."""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from kvmesh.protocol.errors import ConfigError

COMMON_WORDS = (
    "about after again air all along also always animal another answer any around ask away back because been before "
    "began below between big book both boy came car change city close come could country cut day did different does "
    "done down each early earth eat end enough even every eye face family far father feet few find first follow food "
    "form found four friend from gave girl give good great group grow hand hard have head hear help here high home "
    "house idea important keep kind know land large last later learn leave left letter life light line list little"
)
_SPARE_TOKENS = 16  # left to be filled one by one
_MAX_CORRECTIONS = 20


class PromptMaker:
    """Equal seeds give equal prompts. The tokens are those of the text alone, without a template."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._sizes = {f" {word}": self.count(f"x {word}") - self.count("x") for word in COMMON_WORDS.split()}
        self._filler = self._single_token()

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, num_tokens: int, prefix: str = "") -> str:
        """A text of exactly `num_tokens`, eight or more, that begins with `prefix`, whose own tokens count.

        Raises ConfigError if the tokenizer does not let it come out even.
        """
        pieces = [prefix, *self._pieces(num_tokens - (self.count(prefix) if prefix else 0))]
        for _ in range(_MAX_CORRECTIONS):
            text = "".join(pieces) if prefix else "".join(pieces).lstrip()
            missing = num_tokens - self.count(text)
            if missing == 0:
                return text
            if missing > 0:
                pieces += [self._filler] * missing
            else:
                del pieces[max(1, len(pieces) + missing) :]
        raise ConfigError(
            f"no text of exactly {num_tokens} tokens was found", hint="use another tokenizer folder with --model"
        )

    def _pieces(self, num_tokens: int) -> list[str]:
        pieces: list[str] = []
        room = num_tokens
        names = list(self._sizes)
        while room > _SPARE_TOKENS or (room > 0 and not pieces):
            piece = self._random.choice(names)
            pieces.append(piece)
            room -= self._sizes[piece]
        return pieces + [self._filler] * room

    def _single_token(self) -> str:
        """A piece that adds one token wherever it is put."""
        for piece in [*self._sizes, " a", " I", " .", "."]:
            if self.count("x" + 8 * piece) - self.count("x") == 8:
                return piece
        raise ConfigError("the tokenizer has no word of one token", hint="use another folder with --model")


def load_tokenizer(folder: str) -> Tokenizer:
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no tokenizer.json", hint="name a Hugging Face folder with --model")
    return Tokenizer.from_file(str(path))


def make_prompts(
    tokenizer: Tokenizer, seed: int, count: int, num_tokens: int, shared_tokens: int = 0, groups: int = 1
) -> Sequence[str]:
    """Return `count` prompts. Each begins with the `shared_tokens` of one of the `groups`, which depend on no seed."""
    maker, common = PromptMaker(tokenizer, seed), PromptMaker(tokenizer, -1)
    prefixes = [common.prompt(shared_tokens) for _ in range(groups)] if shared_tokens else [""]
    return [maker.prompt(num_tokens, prefixes[i % len(prefixes)]) for i in range(count)]
