"""Text to tokens, with the `tokenizer.json` of a checkpoint.

A prompt is cut into pieces where that provably changes nothing (`tokenizing/cuts.py`). Pieces that were seen before, as
in a conversation or behind a shared prefix, come from a cache; only the others are tokenized. Ids stay packed as u32
bytes on all the way, so that no Python runs per token.
"""

import asyncio
import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
import tokenizers

from kvmesh.frontend.detokenizer import NONE_SHOWN, Detokenizer, TokenDecoder, token_decoder
from kvmesh.frontend.tokenizing import metrics
from kvmesh.frontend.tokenizing.backends import BackendName, HfBackend, TokenizerBackend, choose_backend
from kvmesh.frontend.tokenizing.cache import PieceCache
from kvmesh.frontend.tokenizing.cuts import CutRules, cut_rules, steps
from kvmesh.frontend.tokenizing.names import TokenNames
from kvmesh.protocol.errors import ConfigError, InvalidRequestError

P = ParamSpec("P")
T = TypeVar("T")

CACHE_BYTES = 32 << 20  # some 15 million characters
LONG_TEXTS_AT_ONCE = 2
LEAD = "\x01"  # no token joins it with other characters
BATCH_CHARS = 1 << 20  # of a long text are tokenized before its tokens are counted
NO_LIMIT = 1 << 62
TOKEN_BYTES = 4
CUT_INLINE_CHARS = 256 * 1024  # from here on a thread finds the pieces, too: in odd texts that takes milliseconds

# One pool for all tokenizers: each takes a core and has caches of its own.
_threads = ThreadPoolExecutor(LONG_TEXTS_AT_ONCE, thread_name_prefix="tokenize")


class Tokenizer:
    """Safe to use from several threads: nothing but the cache changes once it is loaded, and that has a lock."""

    def __init__(
        self, backend: TokenizerBackend, rules: CutRules, frame: "Frame", names: TokenNames, decoder: TokenDecoder,
        cache_bytes: int = CACHE_BYTES, normalize: "Normalize | None" = None,
    ) -> None:  # fmt: skip
        """`normalize`: None if it changes no text."""
        self._backend = backend
        self._rules = rules
        self._frame = frame
        self._normalize = normalize
        self._lead = lead_of(backend)
        self._names = names
        self._decoder = decoder
        self.cache = PieceCache(cache_bytes)
        self.vocab_size: int = len(names)  # ids are below
        self.longest_token_chars: int = names.longest_chars

    @classmethod
    def load(cls, path: str | Path, backend: BackendName = "auto", cache_bytes: int = CACHE_BYTES) -> "Tokenizer":
        """Read `path`/tokenizer.json. Raises ConfigError."""
        file = Path(path) / "tokenizer.json"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}", hint="a model needs it") from error
        return cls.from_json(data, str(file), backend, cache_bytes)

    @classmethod
    def from_json(
        cls, data: bytes, origin: str = "tokenizer.json", backend: BackendName = "auto", cache_bytes: int = CACHE_BYTES
    ) -> "Tokenizer":
        """Make the tokenizer of a tokenizer.json; `cache_bytes` bounds the cache of pieces, 0 is none. Raise
        ConfigError."""
        try:
            text = data.decode()
            reference = tokenizers.Tokenizer.from_str(text)
            spec: dict[str, Any] = msgspec.json.decode(data)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ConfigError(f"{origin} is no tokenizer: {error}", hint="save the model again") from error
        reference.no_truncation()  # files saved after a training often cut or pad
        reference.no_padding()
        normalize = normalizer_of(reference)
        tokenizer = cls(
            choose_backend(backend, reference, text, origin),
            cut_rules(spec, normalize),
            frame_of(reference),
            names := TokenNames(reference),
            token_decoder(reference, spec.get("decoder"), names),
            cache_bytes,
            normalize if steps(spec, "normalizer", "normalizers") else None,
        )
        del reference, spec, text
        give_back_memory()
        return tokenizer

    @property
    def backend_name(self) -> str:
        """Return which library is used: hf or fastokens."""
        return self._backend.name

    async def encode_packed(
        self, text: str, *, add_special_tokens: bool, salt: str = "", most_tokens: int = NO_LIMIT
    ) -> bytes:
        """Tokens of `text`, u32 little endian. Rendered chats hold their special tokens already, raw prompts do not.

        Prompts with another `salt` share no cached pieces. Raises InvalidRequestError, and TooManyTokensError for a
        long text as soon as it has more than `most_tokens`: what follows is not tokenized.
        """
        if len(text) < self._backend.least_piece_chars:  # too short for the cache
            ids = self._encoded([text])[0]
            metrics.ENCODED_CHARS.inc(len(text))
            return self._frame(text, ids) if add_special_tokens else ids
        if len(text) >= CUT_INLINE_CHARS:
            return await _in_thread(self.encode_now, text, add_special_tokens, salt, most_tokens)
        lookup = self._look_up(text, salt)
        if lookup.new_chars < self._backend.inline_chars:
            self._encode_new(lookup)
        else:
            await _in_thread(self._encode_new, lookup)
        return self._framed(text, lookup, add_special_tokens)

    def encode_now(
        self, text: str, add_special_tokens: bool = False, salt: str = "", most_tokens: int = NO_LIMIT
    ) -> bytes:
        """Do as `encode_packed` does, in this thread whatever the length."""
        lookup = self._look_up(text, salt)
        self._encode_new(lookup, most_tokens)
        return self._framed(text, lookup, add_special_tokens)

    async def encode_parts(self, parts: Sequence[str], *, salt: str = "", most_tokens: int = NO_LIMIT) -> bytes:
        """Return the tokens of a text that is given in parts; no token lies across two of them.

        Raise InvalidRequestError, and TooManyTokensError if one part alone has more than `most_tokens`.
        """
        if len(parts) == 1:
            return await self.encode_packed(parts[0], add_special_tokens=False, salt=salt, most_tokens=most_tokens)
        return await _in_thread(self._encode_parts, parts, salt, most_tokens)

    def _encode_parts(self, parts: Sequence[str], salt: str, most_tokens: int = NO_LIMIT) -> bytes:
        first, *others = parts
        short = [part for part in others if len(part) < self._backend.least_piece_chars]
        known = dict(zip(short, self._continued(self._encoded, short), strict=True))
        encode = partial(self.encode_now, salt=salt, most_tokens=most_tokens)
        encoded = [encode(first)]
        for part in others:
            if part in known:
                encoded.append(known[part])
            else:
                encoded += self._continued(lambda texts: [encode(text) for text in texts], [part])
        return b"".join(encoded)

    def _continued(self, encode: Callable[[Sequence[str]], Sequence[bytes]], parts: Sequence[str]) -> list[bytes]:
        """Return the tokens of parts that continue a text."""
        lead, lead_ids = self._lead
        if not lead:
            return list(encode(parts))
        ids = encode([lead + part for part in parts])
        return [
            found[len(lead_ids) :] if found.startswith(lead_ids) else encode([part])[0]
            for part, found in zip(parts, ids, strict=True)
        ]

    def _look_up(self, text: str, salt: str) -> "Lookup":
        least_chars = self._backend.least_piece_chars
        if len(text) < least_chars or not self._rules or not self.cache.max_bytes:
            return Lookup(salt, [text], [None], kept=0)
        pieces = self._rules.pieces(text, least_chars, self._backend.most_piece_chars)
        kept = len(pieces) - (len(pieces[-1]) < least_chars)
        ids = self.cache.get(pieces[:kept], salt)
        lookup = Lookup(salt, pieces, ids + [None] * (len(pieces) - kept), kept)
        metrics.HITS.inc(len(pieces) - len(lookup.new))
        metrics.MISSES.inc(len(lookup.new))
        return lookup

    def _encode_new(self, lookup: "Lookup", most_tokens: int = NO_LIMIT) -> None:
        """Fill in what was not found, and keep it for the next. Raise TooManyTokensError."""
        num_bytes = sum([len(ids) for ids in lookup.ids if ids is not None])
        for new in lookup.batches():
            if num_bytes > TOKEN_BYTES * most_tokens:
                raise TooManyTokensError(num_bytes // TOKEN_BYTES)
            pieces = [lookup.pieces[place] for place in new]
            new_ids = self._encoded(pieces)
            for place, ids in zip(new, new_ids, strict=True):
                lookup.ids[place] = ids
                num_bytes += len(ids)
            kept = len(new) - (new[-1] >= lookup.kept)  # the last piece may be too short
            self.cache.put(pieces[:kept], new_ids[:kept], lookup.salt)
            metrics.ENCODED_CHARS.inc(sum(map(len, pieces)))

    def _encoded(self, texts: Sequence[str]) -> Sequence[bytes]:
        try:
            return self._backend.encode(texts)
        except Exception as error:  # plain Exception, ValueError, TypeError
            raise InvalidRequestError(f"the prompt cannot be tokenized: {error}") from error

    def _framed(self, text: str, lookup: "Lookup", add_special_tokens: bool) -> bytes:
        ids = lookup.joined()
        return self._frame(text, ids) if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, shown: frozenset[str] = NONE_SHOWN) -> str:
        """The whole text at once; of the special tokens, those in `shown`."""
        stream = self.detokenizer(shown)
        return stream.push(token_ids) + stream.flush()

    @property
    def special_tokens(self) -> frozenset[str]:
        """All of them, as they are written."""
        return frozenset(self._names.special_ids)

    @property
    def added_tokens(self) -> frozenset[str]:
        """Tokens that are looked for in a text before it is tokenized; special ones among them."""
        return frozenset(self._names.added_ids)

    def normalizer_for(self, tokens: Iterable[str]) -> "Normalize | None":
        """Return the normalizer, if some of these added tokens are looked for in normalized text."""
        return self._normalize if not self._names.normalized.isdisjoint(tokens) else None

    def detokenizer(self, shown: frozenset[str] = NONE_SHOWN) -> Detokenizer:
        """A new stream of tokens to text. Special tokens show if they are named in `shown`."""
        return self._decoder.stream(shown)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself, which may be part of a character. Special tokens have their name."""
        return self._decoder.token_bytes(token_id)

    def special_token_id(self, text: str) -> int | None:
        """The token that `text` becomes wherever it stands; None if there is none.

        Not only those that are marked special, which decides what an answer shows: the marks around a gap, for one,
        are merely added in some tokenizers (Qwen 2.5) and special in others.
        """
        return self._names.added_ids.get(text)


class TooManyTokensError(Exception):
    """Reports a text with more tokens than are wanted: it has `num_tokens`, or more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Lookup:
    """The pieces of one text and the ids of those that were found."""

    __slots__ = ("ids", "kept", "new", "new_chars", "pieces", "salt")

    def __init__(self, salt: str, pieces: list[str], ids: list[bytes | None], kept: int) -> None:
        """Note what was found of the pieces; the first `kept` of them belong into the cache."""
        self.salt = salt
        self.pieces = pieces
        self.ids = ids
        self.kept = kept
        self.new = [place for place, known in enumerate(ids) if known is None]
        self.new_chars = sum([len(pieces[place]) for place in self.new])

    def batches(self) -> Iterator[list[int]]:
        """Yield the places of what was not found, in order, for some BATCH_CHARS at a time."""
        if self.new_chars <= BATCH_CHARS:  # nearly always
            if self.new:
                yield self.new
            return
        batch: list[int] = []
        num_chars = 0
        for place in self.new:
            batch.append(place)
            num_chars += len(self.pieces[place])
            if num_chars >= BATCH_CHARS:
                yield batch
                batch, num_chars = [], 0
        if batch:
            yield batch

    def joined(self) -> bytes:
        """All ids, once none is missing."""
        return b"".join(self.ids)  # type: ignore[arg-type]


Normalize = Callable[[str], str]
Frame = Callable[[str, bytes], bytes]  # (text, its ids) -> its ids with the special tokens around


def frame_of(tokenizer: tokenizers.Tokenizer) -> Frame:
    """Find how the tokenizer puts special tokens around a text: some before, some after, whatever the text is."""
    encode = HfBackend(tokenizer).encode

    def encode_framed(text: str) -> bytes:
        return array("I", tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids).tobytes()

    bare, framed = encode(["a b"])[0], encode_framed("a b")
    before, found, after = framed.partition(bare)
    if found and before + after == encode_framed("") and len(before) % 4 == 0:
        return lambda text, ids: before + ids + after
    return lambda text, ids: encode_framed(text)  # some template that does more


def lead_of(backend: TokenizerBackend) -> tuple[str, bytes]:
    """Return what to put before a text that continues another one, with its tokens: some tokenizers write a sign for a
    space before every text."""
    lead, alone, both = backend.encode([LEAD, "a", f"{LEAD}a"])
    return ("", b"") if lead + alone == both else (LEAD, lead)


def normalizer_of(tokenizer: tokenizers.Tokenizer) -> Normalize:
    normalizer = tokenizer.normalizer
    return (lambda text: text) if normalizer is None else normalizer.normalize_str


def give_back_memory() -> None:
    """Return freed memory to the system: loading needs much once, and glibc would keep it (30 of 110 MiB)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


async def _in_thread(run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(run, *args, **kwargs))
