"""Hold an answer to a guide: after each token, which ones may come next. The package `llguidance` does the parsing.

The place of an answer in its guide is a function of the guide and the answer's tokens. So a decode leg or a migrated
answer continues as it would have on the first worker. Guides come from the network: a large one is refused before it is
parsed, and a costly one by the limits of the parser. A deeply nested guide is compiled on a stack that is deep enough.
"""

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineError, InvalidRequestError
from protocol.messages import Guide, GuideKind
from workers.choices import choices_of
from workers.schemas import GuideWhitespace, SchemaFault, fault_of, fault_reason, held_text

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

MAX_GUIDE_BYTES = {  # an object of any shape has no value at all
    GuideKind.JSON: 0,
    GuideKind.JSON_SCHEMA: 128 << 10,
    GuideKind.CHOICE: 64 << 10,
    GuideKind.GRAMMAR: 16 << 10,
    GuideKind.REGEX: 8 << 10,
}
MAX_COMPILED = 64  # guides that are kept for the next request
COMPILE_TIMEOUT_S = 10.0
COMPILE_THREADS = 2
PROBE_S = 0.5  # to find the part of a schema that is at fault
# The parser recurses once per reference of a chain of definitions; the largest guides need a tenth of this.
COMPILE_STACK_BYTES = 512 << 20
# between the parts of JSON: none, or a bounded run, because a model may indent for ever
_WHITESPACE: "dict[GuideWhitespace, JsonCompileOptions]" = {
    "compact": {"whitespace_flexible": False},
    "flexible": {"whitespace_pattern": r"[ \n\r\t]{1,64}"},
}


class Matcher:
    """The place of one answer in its guide. Two threads must not use it at once."""

    def __init__(self, inner: "LLMatcher", vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return the tokens that may come next: bool [vocab_size], at least one of them. None: see `failure`."""
        packed = self._inner.compute_bitmask()
        if self._inner.is_error():
            return None
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def take(self, token_id: int) -> None:
        """The answer goes on with this token; one that was not allowed is a `failure`."""
        self._inner.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Return whether no token may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def failure(self) -> str:
        """Return why the answer cannot continue: too costly to follow, or it has left the guide. Empty: it can."""
        return _first_line(self._inner.get_error()) if self._inner.is_error() else ""


class Guides:
    """Compiles guides for one tokenizer, in threads of its own, and remembers the latest."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], whitespace: GuideWhitespace
    ) -> None:
        """Raises ImportError without the package, ValueError for a tokenizer that it cannot read."""
        from llguidance import LLTokenizer

        eos = list(eos_token_ids) or None
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._vocab_size = vocab_size
        self._whitespace = _WHITESPACE[whitespace]
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = _deep_threads(COMPILE_THREADS, COMPILE_STACK_BYTES)

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    async def open(self, guide: Guide, generated: Sequence[int] = ()) -> Matcher:
        """Begin an answer, or continue one that has `generated` tokens.

        Raises InvalidRequestError for a guide that cannot be compiled or that `generated` does not follow, and
        EngineError once it is closed.
        """
        num_bytes, most = len(guide.value.encode()), MAX_GUIDE_BYTES[guide.kind]
        if num_bytes > most:
            raise InvalidRequestError(
                f"the {_named(guide)} has {num_bytes} bytes, at most {most} are taken", param="guide"
            )
        if self._is_closed:
            raise EngineError("the engine is stopping")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await loop.run_in_executor(self._threads, self._open, guide, tuple(generated))
        except TimeoutError:
            raise InvalidRequestError(
                f"the {_named(guide)} took longer than {COMPILE_TIMEOUT_S:g} s to compile",
                hint="make it simpler",
                param="guide",
            ) from None

    def close(self) -> None:
        """Fail the requests that wait. A guide that is being compiled cannot be stopped, and is not waited for."""
        self._is_closed = True
        self._threads.shutdown(wait=False)

    def _open(self, guide: Guide, generated: tuple[int, ...]) -> Matcher:
        if self._is_closed:
            raise EngineError("the engine is stopping")
        with self._lock:
            fresh = self._compiled.get(guide)
            if fresh is not None:
                self._compiled.move_to_end(guide)
        if fresh is None:
            fresh = self._compile(guide)
            with self._lock:
                self._compiled[guide] = fresh
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        matcher = Matcher(fresh.deep_copy(), self._vocab_size)
        for token_id in generated:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(f"the generated token {token_id} is not in the vocabulary", param="generated")
            matcher.take(token_id)
        if matcher.failure:
            raise InvalidRequestError(
                f"the {len(generated)} tokens generated so far do not follow the {_named(guide)}: {matcher.failure}",
                param="generated",
            )
        return matcher

    def _compile(self, guide: Guide) -> "LLMatcher":
        try:
            matcher = self._matcher(_grammar(guide, self._whitespace))
            if not matcher.is_error():
                return matcher
            if guide.kind is not GuideKind.JSON_SCHEMA:
                reason = fault_reason(matcher.get_error())
                raise InvalidRequestError(f"the {_named(guide)} cannot be followed: {reason}", param="guide")
            until = time.monotonic() + PROBE_S
            raise fault_of(guide.value, matcher.get_error(), lambda part: self._problem(part, until))
        except SchemaFault as fault:
            raise InvalidRequestError(str(fault), param=f"guide#{fault.pointer}") from fault

    def _problem(self, schema: Any, until: float) -> str:
        """Return why a part of a schema cannot be followed; empty: it can be, or there is no time to find out."""
        if time.monotonic() > until:
            return ""
        try:
            matcher = self._matcher(_schema_grammar(json.dumps(schema), self._whitespace))
        except (ValueError, RecursionError, SchemaFault) as error:
            return str(error)
        return matcher.get_error() if matcher.is_error() else ""

    def _matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at its beginning. Where the grammar cannot be followed, the matcher is in error."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=100_000,
            step_max_items=20_000,
            max_lexer_states=20_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the lexer is built on demand: a pattern that it cannot compile fails here
        return matcher


def open_guides(
    model_path: Path, vocab_size: int, eos_token_ids: Sequence[int], whitespace: GuideWhitespace = "compact"
) -> Guides | None:
    """Return what compiles guides for a model, None where answers cannot be guided: the log says why."""
    tokenizer = model_path / "tokenizer.json"
    if not tokenizer.is_file():
        log.info("no guided decoding: %s is missing", tokenizer)
        return None
    try:
        return Guides(tokenizer.read_text(encoding="utf-8"), vocab_size, eos_token_ids, whitespace)
    except ImportError as error:
        log.info("no guided decoding: %s; pip install 'kvmesh[torch]'", error)
    except ValueError as error:
        log.warning("no guided decoding: llguidance cannot read %s: %s", tokenizer, error)
    return None


def _grammar(guide: Guide, whitespace: "JsonCompileOptions") -> str:
    """Return the guide in the notation of llguidance. Raise InvalidRequestError, SchemaFault."""
    from llguidance import LLMatcher

    match guide.kind:
        case GuideKind.JSON:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=whitespace)
        case GuideKind.JSON_SCHEMA:
            try:
                return _schema_grammar(guide.value, whitespace)
            except ValueError as error:
                raise SchemaFault((), f"the JSON schema cannot be read: {error}") from error
        case GuideKind.REGEX:
            return LLMatcher.grammar_from_regex(guide.value)
        case GuideKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(guide.value)
        case GuideKind.CHOICE:
            # JSON writes a string as Lark does.
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(choice) for choice in choices_of(guide.value))
            )


def _schema_grammar(schema: str, whitespace: "JsonCompileOptions") -> str:
    """Raise ValueError, SchemaFault."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(held_text(schema), overrides=whitespace)


def _named(guide: Guide) -> str:
    return {
        GuideKind.JSON: "JSON guide",
        GuideKind.JSON_SCHEMA: "JSON schema",
        GuideKind.REGEX: "regular expression",
        GuideKind.GRAMMAR: "grammar",
        GuideKind.CHOICE: "list of choices",
    }[guide.kind]


def _first_line(error: str) -> str:
    """Return the error's first line, without the parser's own state, which fills the others."""
    return error.strip().split("\n", 1)[0][:300]


def _deep_threads(count: int, stack_bytes: int) -> ThreadPoolExecutor:
    """The stack's size can only be set for threads yet to begin, so all of them begin here."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="guides")
    all_here = threading.Barrier(count + 1)
    before = threading.stack_size(stack_bytes)
    try:
        for _ in range(count):
            threads.submit(all_here.wait)
        all_here.wait()
    finally:
        threading.stack_size(before)
    return threads
