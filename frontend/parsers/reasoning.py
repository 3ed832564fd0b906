"""Thoughts between tags: formats by name, and the parser that tells thoughts from the answer.

All formats have this in common:

- Thoughts come first. A start tag counts only at the beginning of an answer (whitespace may precede it); later it is
  prose. So is an end tag after the thoughts are over.
- Newlines belong to the tags, and are dropped: right after the start tag, right before what ends the thoughts, right
  after the end tag. So is whitespace before the start tag. All other text is kept as written.
- If the end tag never comes, the whole answer is thoughts.
- Some models begin a call without having ended their thoughts. The text that begins a call then ends them too,
  and stays in the answer, for a parser of calls to read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import MappingProxyType

from kvmesh.frontend.parsers.events import Content, Event, Parser, Reasoning
from kvmesh.frontend.parsers.text import marker_finder
from kvmesh.protocol.parsers import reasoning_parser_name


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Says how one family of models marks its thoughts."""

    name: str
    open: Callable[[bool], Parser]  # True: the prompt itself opened the thoughts
    open_unforced: Callable[[], Parser]  # after a prompt that closed the thoughts: only a written start tag counts
    start: str
    end: str
    forced: bool  # an answer starts inside the thoughts, with or without a written start tag
    markers: tuple[str, ...]  # these the parser must see, also where the tokenizer calls them special


# --- the parser --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tags:
    """Says what opens thoughts, what closes them, and what begins a call that closes them too."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()


class _Phase(Enum):
    LEAD = auto()  # only whitespace so far, or part of a start tag
    THOUGHTS = auto()
    END_TAG = auto()  # only newlines since it
    ANSWER = auto()


class TaggedThoughts:
    """Splits an answer into thoughts and the rest. `inside`: it starts inside the thoughts."""

    def __init__(self, tags: Tags, inside: bool) -> None:
        self._tags = tags
        self._inside = inside
        self._phase = _Phase.LEAD
        self._closers = marker_finder(tags.ends + tags.calls)
        self._held = ""  # may become a tag
        self._lead: list[str] = []  # whitespace before what may be a start tag
        self._newlines = 0  # at the end of the thoughts so far; dropped if an end tag follows
        self._thought = False  # something other than newlines

    @property
    def is_plain(self) -> bool:
        """The thoughts are over."""
        return self._phase is _Phase.ANSWER

    def push(self, text: str) -> Sequence[Event]:
        if not text:
            return ()
        if self._phase is _Phase.ANSWER:
            return (Content(text),)
        if self._thought and self._is_plain_thought(text):
            return (Reasoning(text),)
        text = self._held + text
        self._held = ""
        match self._phase:
            case _Phase.LEAD:
                return self._read_lead(text)
            case _Phase.THOUGHTS:
                return self._read_thoughts(text)
            case _:
                return self._read_after_end(text)

    def flush(self) -> Sequence[Event]:
        rest = self._held
        self._held = ""
        if self._phase is _Phase.LEAD:
            rest = "".join(self._lead) + rest
            self._lead.clear()
            if not self._inside:
                return (Content(rest),) if rest else ()
            self._phase = _Phase.THOUGHTS
        events = self._think(rest)
        if self._newlines:
            events.append(Reasoning("\n" * self._newlines))
            self._newlines = 0
        return events

    def _is_plain_thought(self, text: str) -> bool:
        """Within thoughts, the common case: nothing waits, and nothing in `text` has to."""
        if self._phase is not _Phase.THOUGHTS or self._held or self._newlines or text[-1] == "\n":
            return False
        return self._closers.absent(text)

    def _read_lead(self, text: str) -> Sequence[Event]:
        tail = text.lstrip()
        self._lead.append(text[: len(text) - len(tail)])
        if not tail:
            return ()
        for start in self._tags.starts:
            if tail.startswith(start):
                self._lead.clear()
                return self._begin_thoughts(tail[len(start) :])
        if any(start.startswith(tail) for start in self._tags.starts):
            self._held = tail
            return ()
        text = "".join(self._lead) + tail
        self._lead.clear()
        if self._inside:
            return self._begin_thoughts(text)
        self._phase = _Phase.ANSWER
        return (Content(text),)

    def _begin_thoughts(self, text: str) -> Sequence[Event]:
        self._phase = _Phase.THOUGHTS
        return self._read_thoughts(text)

    def _read_thoughts(self, text: str) -> Sequence[Event]:
        at, closer = self._closers.find(text)
        if not closer:
            self._held = text[at:]
            return self._think(text[:at])
        events = self._think(text[:at])
        self._newlines = 0
        if closer in self._tags.calls:
            self._phase = _Phase.ANSWER
            return [*events, Content(text[at:])]
        self._phase = _Phase.END_TAG
        return [*events, *self._read_after_end(text[at + len(closer) :])]

    def _think(self, text: str) -> list[Event]:
        """Take thoughts; the newlines that end them wait for what follows."""
        if not self._thought:
            text = text.lstrip("\n")
        thought = text.rstrip("\n")
        if not thought:
            self._newlines += len(text)
            return []
        shown = "\n" * self._newlines + thought
        self._newlines = len(text) - len(thought)
        self._thought = True
        return [Reasoning(shown)]

    def _read_after_end(self, text: str) -> Sequence[Event]:
        text = text.lstrip("\n")
        if not text:
            return ()
        self._phase = _Phase.ANSWER
        return (Content(text),)


# --- the formats -------------------------------------------------------------------------------------------

_QWEN_CALLS = ("<tool_call>\n{", "<tool_call>{", "<tool_call>\n<function=", "<tool_call><function=")
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>")


def _tagged(name: str, tags: Tags, *, forced: bool = False, also_seen: tuple[str, ...] = ()) -> ReasoningFormat:
    """Return a format with tags. `also_seen` holds the tokens by which a call begins, where the tags do not show
    them."""
    return ReasoningFormat(
        name=name,
        open=lambda opened: TaggedThoughts(tags, inside=opened or forced),
        open_unforced=partial(TaggedThoughts, tags, inside=False),
        start=tags.starts[0],
        end=tags.ends[0],
        forced=forced,
        markers=(tags.starts[0], tags.ends[0], *also_seen),
    )


def _think(*calls: str) -> Tags:
    return Tags(("<think>",), ("</think>",), calls)


_FORMATS = (
    _tagged("think", _think(*_DEEPSEEK_CALLS), also_seen=_DEEPSEEK_CALLS),
    _tagged("deepseek_r1", _think(*_DEEPSEEK_CALLS), forced=True, also_seen=_DEEPSEEK_CALLS),
    # Qwen 3.5 begins calls without ending its thoughts. They also talk of "<tool_call>", so more must follow.
    _tagged("qwen3", _think(*_QWEN_CALLS), also_seen=("<tool_call>",)),
    _tagged("glm45", _think("<tool_call>"), also_seen=("<tool_call>",)),
    _tagged("kimi", Tags(("◁think▷",), ("◁/think▷",))),
    _tagged("kimi_k2", _think(*_KIMI_CALLS), also_seen=_KIMI_CALLS),
    _tagged("mistral", Tags(("[THINK]",), ("[/THINK]",))),
    _tagged(
        "granite",  # quantized ones write "Here's"
        Tags(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
    ),
    _tagged("seed_oss", Tags(("<seed:think>",), ("</seed:think>",), ("<seed:tool_call>",))),
    _tagged("step3", _think(), forced=True),
    _tagged("nemotron", _think("<TOOLCALL>[", *_QWEN_CALLS), forced=True, also_seen=("<TOOLCALL>", "<tool_call>")),
)

REASONING_PARSERS: Mapping[str, ReasoningFormat] = MappingProxyType({known.name: known for known in _FORMATS})


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format by its name or by the name that other servers use. Raise ConfigError, which lists the names."""
    return REASONING_PARSERS[reasoning_parser_name(name)]


# --- which format, and where an answer starts ----------------------------------------------------------------

# In order: the first whose texts all stand in a chat template.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("◁think▷",), "kimi"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process",), "granite"),
)
_SIGNS_BESIDE_THINK_TAGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[gMASK]",), "glm45"),
    (("<TOOLCALL>",), "nemotron"),
    (("truncate_history_thinking",), "nemotron"),
    (("<|BOT|>",), "step3"),
    (("<｜Assistant｜>", "thinking"), "think"),  # DeepSeek from V3.1 on: thinks if asked to
    (("<｜Assistant｜>",), "deepseek_r1"),
    (("<tool_call>",), "qwen3"),
    ((), "think"),
)


def guess_reasoning_format(template_source: str) -> str:
    """The name of the format that a chat template speaks of, "" if it speaks of none. Ask `is_harmony` first."""
    rows = _SIGNS
    if "<think>" in template_source or "</think>" in template_source:
        rows += _SIGNS_BESIDE_THINK_TAGS
    return next((name for signs, name in rows if all(sign in template_source for sign in signs)), "")


def prompt_opens_thoughts(prompt_tail: str, format: ReasoningFormat) -> bool:
    """Return whether a rendered prompt ends with an open start tag. `prompt_tail`: its last characters, 64 will do.

    A tag that other text follows does not count: it may be a user's.
    """
    return prompt_tail.rstrip().endswith(format.start)


def prompt_closes_thoughts(prompt_tail: str, format: ReasoningFormat) -> bool:
    """Return whether a rendered prompt ends with an end tag, as where thinking is switched off."""
    return prompt_tail.rstrip().endswith(format.end)


def open_after(format: ReasoningFormat, prompt_tail: str) -> Parser:
    """The parser for the answer to a prompt that ends with `prompt_tail`.

    A prompt that closes the thoughts wins over a format that is forced: the answer is no thought then.
    """
    if prompt_closes_thoughts(prompt_tail, format):
        return format.open_unforced()
    return format.open(prompt_opens_thoughts(prompt_tail, format))
