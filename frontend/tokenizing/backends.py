"""Text to token ids, by one of two libraries.

`tokenizers` knows every tokenizer.json and is the reference. `fastokens` knows most byte-pair encodings, is some twenty
times faster and gives bytes, not lists. It is used where it gives the same tokens for texts that are hard to get right.
"""

import logging
import os
from array import array
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import tokenizers

from kvmesh.frontend.tokenizing.probes import probes
from kvmesh.protocol.errors import ConfigError

log = logging.getLogger(__name__)

BackendName: TypeAlias = Literal["auto", "hf", "fastokens"]


class TokenizerBackend(Protocol):
    """Gives the tokens of a text, without those that a tokenizer adds around it. Safe to use from several threads."""

    name: str
    # As measured: longer texts pause the event loop for more than a few milliseconds, a thread costs less then.
    inline_chars: int
    # From here on a piece is worth keeping: looking it up costs less than tokenizing it.
    least_piece_chars: int
    most_piece_chars: int

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text, u32 little endian. Raises Exception for what is no text (lone surrogates)."""
        ...


class HfBackend:
    """Tokenizes with `tokenizers`: 0.25-0.7 us per character."""

    name = "hf"
    inline_chars = 8 * 1024
    least_piece_chars = 128
    most_piece_chars = 1024

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        encode = self._tokenizer.encode_batch_fast  # `fast`: without offsets into the text, which nobody needs
        # One by one: several at once would be spread over all cores.
        return [array("I", encode([text], add_special_tokens=False)[0].ids).tobytes() for text in texts]


class FastokensBackend:
    """Tokenizes with `fastokens`: 0.003-0.07 us per character. It releases the GIL. Its caches of words grow to some
    240 MiB if all prompts bring new words."""

    name = "fastokens"
    inline_chars = 64 * 1024
    least_piece_chars = 512
    most_piece_chars = 4096

    def __init__(self, data: str) -> None:
        """Read `data`, a tokenizer.json. Raise Exception where it is not supported, ImportError without the package."""
        # Threads of its own make a text of megabytes faster, and every call dearer. Read once, at the first call.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        self._tokenizer = import_module("fastokens").Tokenizer.from_json_str(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts))
        if len(texts) == 1:
            return [ids]
        ends = memoryview(offsets).cast("Q").tolist()
        return [ids[4 * start : 4 * end] for start, end in pairwise(ends)]


NOT_INSTALLED = "the package fastokens is not installed"
DO_WITHOUT = "set --tokenizer to auto or hf"


def require_backend(wanted: BackendName) -> None:
    """Raises ConfigError if the package is missing: at the start, and not with the first model."""
    if wanted == "fastokens" and find_spec("fastokens") is None:
        raise ConfigError(NOT_INSTALLED, hint=f"install it (pip install fastokens), or {DO_WITHOUT}")


def choose_backend(wanted: BackendName, reference: tokenizers.Tokenizer, data: str, origin: str) -> TokenizerBackend:
    """The backend for the tokenizer.json `data`, which `reference` has read.

    Raises ConfigError if fastokens is wanted by name, and is missing or differs.
    """
    exact = HfBackend(reference)
    if wanted == "hf":
        return exact
    why_not, fast = "", None
    try:
        fast = FastokensBackend(data)
        why_not = difference(fast, exact, special_texts(reference))
    except ImportError:
        why_not = NOT_INSTALLED
    except Exception as error:  # plain ValueError, whatever is not supported
        why_not = f"it says: {error}"
    if fast is not None and not why_not:
        return fast
    if wanted == "fastokens":
        raise ConfigError(f"fastokens cannot be used for {origin}: {why_not}", hint=DO_WITHOUT)
    log.info("%s is used with `tokenizers`, which is slower than fastokens: %s", origin, why_not)
    return exact


def special_texts(tokenizer: tokenizers.Tokenizer) -> list[str]:
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return [token.content for token in added.values()]


MAX_SPECIAL_TEXTS = 64  # some tokenizers have thousands that are reserved


def difference(one: TokenizerBackend, other: TokenizerBackend, special: Sequence[str]) -> str:
    """Return where two backends differ first, in words; "" if they agree on all probes."""
    texts = probes(special[:MAX_SPECIAL_TEXTS])
    for text, ids, other_ids in zip(texts, one.encode(texts), other.encode(texts), strict=True):
        if ids != other_ids:
            return f"it differs for {text[:80]!r}"
    return ""
