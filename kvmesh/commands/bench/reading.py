"""Read one streamed answer: bytes and times in, tokens and what went wrong out. Pure.

The reader is given the time of each read, so a test can say when tokens came. It holds one unfinished event and the
times of the tokens, never the answer itself (except its text, where a conversation continues with it).
"""

import msgspec
from msgspec import Struct

from kvmesh.commands.http_client import beginning_of

MOST_EVENT_BYTES = 4 << 20
# Kinds of failures. The status of an HTTP error is appended to `http`.
NO_CONNECTION, CUT, TIMEOUT, HTTP, ERROR_EVENT = "no connection", "cut short", "timeout", "http", "error event"
UNREADABLE, EMPTY = "unreadable", "no tokens"


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Event)
_NOTHING = (b"", b"null", b"[]")


class StreamReading:
    """Reads the body of one answer."""

    __slots__ = (
        "_keeps_text",
        "_rest",
        "cached_tokens",
        "completion_tokens",
        "detail",
        "events",
        "failure",
        "first_s",
        "gaps_s",
        "is_finished",
        "last_s",
        "prompt_tokens",
        "texts",
    )

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._rest = b""
        self._keeps_text = keeps_text
        self.texts: list[str] = []
        self.first_s = self.last_s = 0.0
        self.gaps_s: list[float] = []
        self.events = 0  # that hold tokens
        self.completion_tokens: int | None = None
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None
        self.is_finished = False  # a finish reason or [DONE] has come
        self.failure = self.detail = ""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take a part of the body that was read at `now_s`."""
        if self.failure:
            return
        if b"\r" in data or self._rest.endswith(b"\r"):
            data = (self._rest + data).replace(b"\r\n", b"\n")
            self._rest = b""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MOST_EVENT_BYTES:
            self._fail(UNREADABLE, "an event has no end")
        for event in whole:
            if not self.failure:
                self._take(event, now_s)

    def _take(self, event: bytes, now_s: float) -> None:
        payload = event[6:] if event.startswith(b"data: ") else _payload_of(event)
        if not payload:
            return
        if payload == b"[DONE]":
            self.is_finished = True
            return
        try:
            said = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(UNREADABLE, f"{error}: {payload[:120]!r}")
            return
        if bytes(said.error) not in _NOTHING:
            self._fail(ERROR_EVENT, bytes(said.error)[:200].decode(errors="replace"))
            return
        if said.usage is not None:
            self._count(said.usage)
        brings_tokens = False
        for choice in said.choices:  # all of them are looked at: each may keep its text
            brings_tokens |= self._says(choice)
        if brings_tokens:
            self._token_at(now_s)

    def _says(self, choice: _Choice) -> bool:
        """Return whether a choice brings tokens."""
        if choice.finish_reason is not None:
            self.is_finished = True
        text, delta = choice.text or "", choice.delta
        has_call = False
        if delta is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or ""
            has_call = bytes(delta.tool_calls) not in _NOTHING
        if self._keeps_text and text:
            self.texts.append(text)
        return bool(text) or has_call

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _token_at(self, now_s: float) -> None:
        if self.events:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s
        self.events += 1

    def _fail(self, kind: str, detail: str) -> None:
        self.failure, self.detail = kind, detail

    def end(self, status: int, why: str, body: bytes = b"") -> None:
        """Note that the answer is over. `why`: the kind of failure that the connection saw, "" for none."""
        if status and status != 200:
            self._fail(f"{HTTP} {status}", beginning_of(body))
        elif self.failure:
            return
        elif why:
            self._fail(why, "")
        elif not self.is_finished:
            self._fail(CUT, "the body ended without a finish reason and without [DONE]")
        elif not self.events and not self.completion_tokens:
            self._fail(EMPTY, "the answer holds no text")


def _payload_of(event: bytes) -> bytes:
    """Return the data of an event that is not a single `data: ` line: comments and other fields say nothing."""
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
