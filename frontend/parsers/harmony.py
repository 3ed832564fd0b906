"""Harmony, the format of gpt-oss: an answer is a row of messages, each with a header that says what it is.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>prose<|return|>

The prompt ends with `<|start|>assistant`, so an answer begins inside a header. A header names a channel and may
name a recipient, before or after the channel, and a content type, which says nothing that is needed here:

- `analysis` is Reasoning; `final`, and `commentary` to nobody, is Content;
- `commentary` or `analysis` to `functions.NAME` is a call, its text the arguments as the model wrote them. Models
  forget `functions.` at times: in `commentary`, any recipient but a built-in tool is taken for a name;
- what goes to a built-in tool (`python`, `browser.search`) is Reasoning: no tool of the caller's is meant.

`<|end|>`, `<|return|>` and `<|call|>` end a message. The last two are stop tokens, so the text may lack them; a
new header ends a message too. Whitespace between messages is dropped. A text without a header is Content, and
so, as it was written, is a header that breaks off or makes no sense.
"""

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.parsers.reasoning import ReasoningFormat
from kvmesh.frontend.parsers.sound import SoundEvents
from kvmesh.frontend.parsers.text import marker_finder

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
_ENDS = (END, RETURN, CALL)
_FINDER = marker_finder(MARKERS)

MAX_HEADER_CHARS = 512  # a longer one is prose
_BUILT_IN_TOOLS = ("python", "browser", "container")
_NOBODY = ("", "all", "assistant", "user")
_CHANNEL_NAME = re.compile(r"(analysis|commentary|final)(?![a-z])")  # "commentary?" was seen


class _ChannelKind(Enum):
    THOUGHTS = auto()
    PROSE = auto()
    CALL = auto()


class Header(NamedTuple):
    kind: _ChannelKind
    function: str = ""


def read_header(raw: str) -> Header | None:
    """Return what a message is whose header, up to `<|message|>`, is `raw`; None if it makes no sense.

    Without a channel it is read like `commentary`, if nothing but a role, a recipient and a type stands in it.
    """
    before, *channels = raw.replace(START, " ").replace(CONSTRAIN, " ").split(CHANNEL)
    words = [word for part in (before, *channels) for word in part.split()]
    recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
    if not channels:
        known = all(word.startswith("to=") or word in ("assistant", "json") for word in words)
        return _addressed("commentary", recipient) if known else None
    for channel in reversed(channels):  # a second one begins the header again
        if name := _CHANNEL_NAME.match(channel.lstrip()):
            return _addressed(name[0], recipient)
    return None


def _addressed(channel: str, recipient: str) -> Header | None:
    if channel == "final":
        return Header(_ChannelKind.PROSE)
    default = Header(_ChannelKind.THOUGHTS if channel == "analysis" else _ChannelKind.PROSE)
    if recipient in _NOBODY:
        return default
    function = recipient.removeprefix("functions.")
    if function != recipient:
        return Header(_ChannelKind.CALL, function) if function else None
    if channel == "analysis" or recipient.partition(".")[0] in _BUILT_IN_TOOLS:
        return Header(_ChannelKind.THOUGHTS)
    return Header(_ChannelKind.CALL, recipient)


class _State(Enum):
    HEADER = auto()
    MESSAGE = auto()
    BETWEEN = auto()


class HarmonyParser:
    """Thoughts, prose and calls of one answer. `thinking`: the prompt itself opened an analysis message."""

    def __init__(self, thinking: bool = False) -> None:
        self._state = _State.MESSAGE if thinking else _State.HEADER
        self._kind = _ChannelKind.THOUGHTS  # of the message
        self._header = ""  # as written, from its first marker on
        self._held = ""  # may become a marker
        self._calls = 0
        self._argued = False  # the call has arguments

    @property
    def is_plain(self) -> bool:
        return False  # another message may come

    def push(self, text: str) -> Sequence[Event]:
        if not text:
            return ()
        if self._state is _State.MESSAGE and not self._held and _FINDER.absent(text):
            return (self._said(text),)
        text = self._held + text
        events: list[Event] = []
        done = 0
        while True:
            at, marker = _FINDER.find(text, done)
            if at > done:
                self._take_text(text[done:at], events)
            if not marker:
                self._held = text[at:]
                return events
            self._take_marker(marker, events)
            done = at + len(marker)

    def flush(self) -> Sequence[Event]:
        events: list[Event] = []
        rest, self._held = self._held, ""
        if rest:
            self._take_text(rest, events)
        if self._state is _State.HEADER and self._header.strip():
            self._give_header_up(events)
        self._end_message(events)
        return events

    def _take_text(self, text: str, events: list[Event]) -> None:
        match self._state:
            case _State.MESSAGE:
                events.append(self._said(text))
            case _State.HEADER:
                self._header += text
                if not _may_be_header(self._header):
                    self._give_header_up(events)
            case _State.BETWEEN:
                if text := text.lstrip():
                    self._begin_message(_ChannelKind.PROSE)
                    events.append(Content(text))

    def _take_marker(self, marker: str, events: list[Event]) -> None:
        if self._state is _State.HEADER and not self._goes_on_with(marker, events):
            return
        if marker in _ENDS:
            self._end_message(events)
        elif marker in (START, CHANNEL):
            self._end_message(events)
            self._state = _State.HEADER
            self._header = marker
        else:  # out of place, so text
            self._take_text(marker, events)

    def _goes_on_with(self, marker: str, events: list[Event]) -> bool:
        """Inside a header: take what belongs to it; False if that is all there is to do."""
        if marker == MESSAGE:
            return self._end_header(events)
        if marker in (CHANNEL, CONSTRAIN):
            self._take_text(marker, events)
            return False
        if self._header.strip():
            self._give_header_up(events)
        else:
            self._state = _State.BETWEEN
        return True

    def _end_header(self, events: list[Event]) -> bool:
        """Begin what the header says, at `<|message|>`. Return True if it says nothing, so that the marker is text."""
        if (header := read_header(self._header)) is None:
            self._give_header_up(events)
            return True
        self._begin_message(header.kind)
        if header.kind is _ChannelKind.CALL:
            events.append(CallBegun(self._calls, header.function))
        return False

    def _give_header_up(self, events: list[Event]) -> None:
        """Give the header up: what was written is prose, and so is what follows."""
        events.append(Content(self._header))
        self._begin_message(_ChannelKind.PROSE)

    def _begin_message(self, kind: _ChannelKind) -> None:
        self._state = _State.MESSAGE
        self._kind = kind
        self._argued = False

    def _end_message(self, events: list[Event]) -> None:
        if self._state is _State.MESSAGE and self._kind is _ChannelKind.CALL:
            if not self._argued:
                events.append(CallArguments(self._calls, "{}"))
            self._calls += 1
        self._state = _State.BETWEEN

    def _said(self, text: str) -> Event:
        if self._kind is _ChannelKind.THOUGHTS:
            return Reasoning(text)
        if self._kind is _ChannelKind.PROSE:
            return Content(text)
        self._argued = self._argued or not text.isspace()
        return CallArguments(self._calls, text)


def _may_be_header(raw: str) -> bool:
    """Return whether `raw`, from its first marker on, can still become a header. The prompt's role stands before the
    first."""
    if len(raw) > MAX_HEADER_CHARS:
        return False
    raw = raw.lstrip()
    return raw.startswith((START, CHANNEL, CONSTRAIN)) or "to=".startswith(raw[: len("to=")])


# Reads thoughts and calls both, so no parser of calls follows it.
HARMONY = ReasoningFormat(
    name="harmony",
    open=lambda thinking: SoundEvents(HarmonyParser(thinking), MARKERS),
    open_unforced=lambda: SoundEvents(HarmonyParser(), MARKERS),
    start=CHANNEL + "analysis" + MESSAGE,
    end=END,
    forced=False,
    markers=MARKERS,
)


def is_harmony(template_source: str) -> bool:
    """Return whether a chat template writes messages in this format."""
    return CHANNEL in template_source and MESSAGE in template_source
