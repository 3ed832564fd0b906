"""Compile a guide as the engine of a worker will, in a process that may be killed. `GuideTrial` drives it.

The engine's own library compiles the guide with the model's vocabulary, so what passes the limits here is affordable
for the engine. What a library refuses passes: the engine says what is wrong with it.
"""

import logging
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.choices import choice_regex, choices_of
from kvmesh.workers.guide_checks import may_be_costly
from kvmesh.workers.guide_messages import Compile, GuideSetup, Standing, XgrammarForm, job_decoder

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

log = logging.getLogger(__name__)

_COMMENT = re.compile(r"(#|//).*$", re.MULTILINE)
_OUT_OF_MEMORY = "bad_alloc"  # the C++ exception, in the words of xgrammar's RuntimeError

Try = Callable[[Guide], None]


def prepare(argument: bytes) -> Callable[[], Callable[[bytes], bytes]]:
    """Return what makes the handler of a child process. Runs once, in the zygote."""
    setup = msgspec.msgpack.decode(argument, type=GuideSetup)
    tries: list[Try] = []
    failures: list[str] = []
    for opened in (_llguidance, _xgrammar):
        try:
            tries.append(opened(setup))
        except Exception as error:  # libraries of other projects raise what they like
            failures.append(f"{opened.__name__[1:]}: {error}")
    if not tries:
        raise ImportError("; ".join(failures))
    if setup.xgrammar and len(tries) < 2:
        log.warning("guides are tried with one library only: %s", failures[0])
    return lambda: lambda body: _answer(body, tries)


def _answer(body: bytes, tries: list[Try]) -> bytes:
    job = job_decoder.decode(body)
    assert isinstance(job, Compile), "a trial only compiles"
    for attempt in tries:
        attempt(job.guide)
    return msgspec.msgpack.encode(Standing())


def _llguidance(setup: GuideSetup) -> Try:
    """Our own compiler. vLLM uses the same library for schemas that xgrammar does not support."""
    from kvmesh.workers.guide_process import prepare as prepare_process

    make = prepare_process(msgspec.msgpack.encode(setup))

    def attempt(guide: Guide) -> None:
        if may_be_costly(guide):
            make()(msgspec.msgpack.encode(Compile(guide)))

    return attempt


def _xgrammar(setup: GuideSetup) -> Try:
    if not setup.xgrammar or find_spec("xgrammar") is None:
        raise ImportError("not used or not installed")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a zygote has a single thread; xgrammar imports torch and numpy
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=setup.tokenizer)
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[0])
    # One thread: a thread of xgrammar's own would have to be forked. No cache: a process compiles one guide.
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)

    def attempt(guide: Guide) -> None:
        try:
            compiled = compiled_by(compiler, guide, setup.xgrammar)
            xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
        except MemoryError:
            raise
        except Exception as error:
            if _OUT_OF_MEMORY in str(error):
                raise MemoryError from error

    return attempt


def compiled_by(compiler: "GrammarCompiler", guide: Guide, form: XgrammarForm) -> "CompiledGrammar":
    """Compile a guide in the form in which the engine gives it to xgrammar. Raise what xgrammar raises."""
    match guide.kind:
        case GuideKind.JSON:
            return compiler.compile_json_schema('{"type": "object"}')
        case GuideKind.JSON_SCHEMA:
            return compiler.compile_json_schema(guide.value)
        case GuideKind.REGEX:
            return compiler.compile_regex(guide.value)
        case GuideKind.CHOICE if form == "vllm":
            return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, choices_of(guide.value))))
        case GuideKind.CHOICE:
            return compiler.compile_regex(choice_regex(guide.value))
        case GuideKind.GRAMMAR:
            is_lark = form == "vllm" and "::=" not in _COMMENT.sub("", guide.value)
            return compiler.compile_lark(guide.value) if is_lark else compiler.compile_grammar(guide.value)


def _literal(text: str) -> str:
    """Return the text as a literal of xgrammar's EBNF."""
    return '"' + "".join(f"\\u{ord(char):04x}" if char < " " or char in '"\\\x7f' else char for char in text) + '"'
