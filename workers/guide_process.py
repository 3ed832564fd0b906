"""Compile guides and follow answers in a process of their own, which may be killed. `workers/guides.py` drives it.

A process compiles one guide, and holds a matcher for each answer under it. The limits of the parser end most of what is
costly. They do not bound everything (a single derivative of an intersection may take minutes), so the process has
limits of time and memory besides.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvmesh.mesh.jobs.zygote import resident_bytes
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.choices import choices_of
from kvmesh.workers.guide_messages import (
    BeginAnswer,
    Close,
    Compile,
    GuideRefused,
    GuideSetup,
    Reply,
    Standing,
    Take,
    guide_name,
    job_decoder,
)
from kvmesh.workers.schemas import GuideWhitespace, SchemaFault, fault_of, fault_reason, held_text, plain_reason

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

PROBE_S = 0.5  # to find the part of a schema that is at fault
MAX_ROW_ITEMS = 4_000  # of the parser at one place. An optional property of an object makes 4 of them
MAX_FORCED_TOKENS = 256  # that every answer begins with, followed when the guide is compiled
REPORT_EVERY = 64  # tokens of a process: then it says how much memory it has
# between the parts of JSON: none, or a bounded run, because a model may indent for ever
_WHITESPACE: "dict[GuideWhitespace, JsonCompileOptions]" = {
    "compact": {"whitespace_flexible": False},
    "flexible": {"whitespace_pattern": r"[ \n\r\t]{1,64}"},
}
_LIMITS = LLParserLimits(
    max_items_in_row=MAX_ROW_ITEMS,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def prepare(argument: bytes) -> Callable[[], Callable[[bytes], bytes]]:
    """Return what makes the handler of a child process. Runs once, in the zygote."""
    setup = msgspec.msgpack.decode(argument, type=GuideSetup)
    with open(setup.tokenizer, encoding="utf-8") as file:
        tokenizer = LLTokenizer(
            file.read(), n_vocab=setup.vocab_size or None, eos_token=list(setup.eos_token_ids) or None
        )
    return lambda: GuideProcess(tokenizer, tokenizer.vocab_size, _WHITESPACE[setup.whitespace]).handle


class GuideProcess:
    """Compiles one guide, and follows the answers under it."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, whitespace: "JsonCompileOptions") -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._whitespace = whitespace
        self._fresh: LLMatcher | None = None
        self._matchers: dict[int, LLMatcher] = {}
        self._base_bytes = resident_bytes()
        self._num_taken = 0
        self._grown_bytes = 0

    def handle(self, body: bytes) -> bytes:
        """Return the answer to one message of the worker."""
        try:
            reply = self._reply(job_decoder.decode(body))
        except InvalidRequestError as error:
            reply = GuideRefused(error.message, error.hint, error.param or "")
        return msgspec.msgpack.encode(reply)

    def _reply(self, job: Compile | BeginAnswer | Take | Close) -> Reply:
        match job:
            case Compile(guide):
                self._fresh = self._compile(guide)
                return self._standing(self._fresh)
            case BeginAnswer(number, generated):
                return self._open(number, generated)
            case Take(number, token_id):
                matcher = self._matchers[number]
                matcher.consume_token(token_id)
                self._num_taken += 1
                return self._standing(matcher, reports=self._num_taken % REPORT_EVERY == 0)
            case Close(number):
                self._matchers.pop(number, None)
                return Standing()

    def _open(self, number: int, generated: Sequence[int]) -> Standing:
        assert self._fresh is not None, "a guide is compiled before an answer begins"
        matcher = self._fresh.deep_copy()
        for token_id in generated:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(f"the generated token {token_id} is not in the vocabulary", param="generated")
            matcher.consume_token(token_id)
        if matcher.is_error():
            raise InvalidRequestError(
                f"the {len(generated)} tokens generated so far do not follow the guide: {_failure(matcher)}",
                param="generated",
            )
        self._matchers[number] = matcher
        return self._standing(matcher)

    def _standing(self, matcher: LLMatcher, *, reports: bool = True) -> Standing:
        """Return where an answer stands, and which tokens may follow."""
        is_complete = matcher.is_stopped() and not matcher.is_error()
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        failure = _failure(matcher)
        if reports:
            self._grown_bytes = max(0, resident_bytes() - self._base_bytes)
        return Standing(b"" if failure else mask, is_complete, failure, self._grown_bytes)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def _compile(self, guide: Guide) -> LLMatcher:
        try:
            matcher = self._matcher(_grammar(guide, self._whitespace))
            if not matcher.is_error():
                return matcher
            if guide.kind is not GuideKind.JSON_SCHEMA:
                reason = fault_reason(matcher.get_error())
                raise InvalidRequestError(f"the {guide_name(guide)} cannot be followed: {reason}", param="guide")
            until = time.monotonic() + PROBE_S
            raise fault_of(guide.value, matcher.get_error(), lambda part: self._problem(part, until))
        except SchemaFault as fault:
            raise InvalidRequestError(str(fault), param=f"guide#{fault.pointer}") from fault
        except (ValueError, TypeError, RecursionError) as error:  # of a schema that is none
            what = f"{type(error).__name__}: {error}"[:300]
            raise InvalidRequestError(f"the {guide_name(guide)} cannot be followed: {what}", param="guide") from error

    def _problem(self, schema: Any, until: float) -> str:
        """Return why a part of a schema cannot be followed; empty: it can be, or there is no time to find out."""
        if time.monotonic() > until:
            return ""
        try:
            matcher = self._matcher(_schema_grammar(json.dumps(schema), self._whitespace))
        except (ValueError, RecursionError, SchemaFault) as error:
            return str(error)
        return matcher.get_error() if matcher.is_error() else ""

    def _matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at its beginning. Where the grammar cannot be followed, the matcher is in error.

        The parser works on demand: a pattern that it cannot compile fails at the first mask, an object with too many
        properties behind its brace. So the tokens that begin every answer are tried.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            return matcher
        matcher.compute_bitmask()
        trial = matcher.deep_copy()
        for _ in range(MAX_FORCED_TOKENS):
            if trial.is_error():
                return trial
            if not (forced := trial.compute_ff_tokens()):
                break
            trial.consume_tokens(forced)
            if not trial.is_stopped():
                trial.compute_bitmask()
        return trial if trial.is_error() else matcher


def _grammar(guide: Guide, whitespace: "JsonCompileOptions") -> str:
    """Return the guide in the notation of llguidance. Raise InvalidRequestError, SchemaFault."""
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
    return LLMatcher.grammar_from_json_schema(held_text(schema), overrides=whitespace)


def _failure(matcher: LLMatcher) -> str:
    """Return the error's first line, without the parser's own state, which fills the others."""
    return plain_reason(matcher.get_error()) if matcher.is_error() else ""
