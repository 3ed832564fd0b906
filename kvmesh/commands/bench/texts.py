"""Make prompts of a given number of tokens out of common words. Pure.

Nothing is tokenized for a prompt: with a tokenizer only words of one token are used, without one the endpoint's own
counts say how many tokens a word takes.
"""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from kvmesh.commands.bench.prompts import COMMON_WORDS
from kvmesh.protocol.errors import ConfigError

LEAST_WORDS = 32  # a tokenizer with fewer words of one token cannot make varied prompts


class TextMaker:
    """Equal names give equal texts."""

    def __init__(self, words: Sequence[str], tokens_per_word: float, template_tokens: float, seed: int) -> None:
        self._words = words
        self._tokens_per_word = tokens_per_word
        self._template_tokens = template_tokens  # that the endpoint adds to the text of one message
        self._seed = seed

    def text(self, name: str, tokens: float) -> str:
        """Return a text of about `tokens` tokens, at least one word."""
        count = max(1, round(tokens / self._tokens_per_word))
        return " ".join(random.Random(f"{self._seed} {name}").choices(self._words, k=count))

    def first_tokens(self, tokens: int) -> float:
        """Return how many tokens of text make a first message a prompt of `tokens`, with its template."""
        return max(1.0, tokens - self._template_tokens)


def plain_words() -> list[str]:
    return COMMON_WORDS.split()


def words_of_one_token(tokenizer: Tokenizer) -> list[str]:
    """Return the common words that are one token after a space. Raise ConfigError if there are too few."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    base = count("x")
    words = [word for word in COMMON_WORDS.split() if count(f"x {word}") - base == 1]
    if len(words) < LEAST_WORDS:
        raise ConfigError(
            f"only {len(words)} common words are one token of this tokenizer",
            hint="leave --tokenizer out: the sizes are then measured",
        )
    return words
