"""Text with choices: `{a|b}` picks one of its parts, `[name]` is replaced by a slot. Pure, driven by one `Random`."""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\[(\w+)\]")
_SPACES = re.compile(r" {2,}")
# "a user" and "a uniform" begin with a consonant sound, so they keep "a"
_ARTICLE = re.compile(r"\b([Aa]) (?=(?!use|uni|one)[aeiou])")


def expand(rng: random.Random, text: str, slots: Mapping[str, str] | None = None) -> str:
    """Return `text` with its choices made (innermost first), slots filled and articles right ("an owl")."""
    while "{" in text:
        text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
    if slots:
        text = _SLOT.sub(lambda match: slots[match[1]], text)
    return tidy(text)


def paragraph(rng: random.Random, lines: str, slots: Mapping[str, str] | None = None) -> str:
    """Expand a block of text whose lines follow one another as sentences."""
    return expand(rng, " ".join(lines.split("\n")), slots)


def tidy(text: str) -> str:
    return _ARTICLE.sub(r"\1n ", _SPACES.sub(" ", text)).strip()


def and_list(items: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
