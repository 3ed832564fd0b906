"""The bytes of an answer: server-sent events prepared once per stream, and the body that is not streamed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.answer import Part, PlacedLogprob
from frontend.logprobs import chat_logprobs, completion_logprobs
from frontend.openai import (
    AnswerMessage,
    ChatChoice,
    CompletionChoice,
    Response,
    TraceReport,
    Usage,
    encode,
)
from frontend.parameters import Endpoint
from frontend.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the text stands in a chunk's choice."""

    object: str
    before_text: bytes
    after_text: bytes
    no_text: bytes
    opening: bytes | None  # the choice's content in the first chunk


SHAPES = {
    Endpoint.CHAT: Shape(
        object="chat.completion.chunk",
        before_text=b'"delta":{"content":',
        after_text=b"}",
        no_text=b'"delta":{}',
        opening=b'"delta":{"role":"assistant","content":"","refusal":null}',
    ),
    Endpoint.COMPLETIONS: Shape(
        object="text_completion",
        before_text=b'"text":',
        after_text=b"",
        no_text=b'"text":""',
        opening=None,
    ),
}


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands at the top of every chunk and of the whole answer."""

    id: str
    created: int
    model: str


class ChunkWriter:
    """Makes the events of one stream. Of a chunk only the text is encoded anew."""

    def __init__(self, endpoint: Endpoint, heading: Heading, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._shape = SHAPES[endpoint]
        fields: dict[str, object] = {"id": heading.id, "object": self._shape.object}
        fields |= {"created": heading.created, "model": heading.model}
        self._event_head = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._usage_null = b',"usage":null' if include_usage else b""  # as OpenAI's, in all but the last
        self._text_head = self._event_head + b'{"index":0,' + self._shape.before_text
        self._text_tail = self._after(self._shape.after_text, b"null", b"null")

    def opening(self) -> bytes:
        """Sent before any text; empty where the endpoint has no such chunk."""
        if self._shape.opening is None:
            return b""
        return self._event_head + b'{"index":0,' + self._after(self._shape.opening, b"null", b"null")

    def part(self, part: Part) -> bytes:
        """A chunk with text, empty if there is nothing to say."""
        if part.logprobs:
            logprobs = encode(logprobs_of(self._endpoint, self._tokenizer, part.logprobs))
            return self._text_head + encode(part.text) + self._after(self._shape.after_text, logprobs, b"null")
        if not part.text:
            return b""
        return self._text_head + encode(part.text) + self._text_tail

    def finish(self, reason: str, trace: TraceReport | None) -> bytes:
        """The chunk that says why the answer ends; `trace` only if no usage chunk follows."""
        after = self._after(self._shape.no_text, b"null", encode(reason), trace)
        return self._event_head + b'{"index":0,' + after

    def usage(self, usage: Usage, trace: TraceReport | None) -> bytes:
        return self._event_head + b'],"usage":' + encode(usage) + _trace(trace) + b"}\n\n"

    def _after(self, text: bytes, logprobs: bytes, finish_reason: bytes, trace: TraceReport | None = None) -> bytes:
        """From the end of the text to the end of the event."""
        rest = (text, b',"logprobs":', logprobs, b',"finish_reason":', finish_reason, b"}]")
        return b"".join((*rest, self._usage_null, _trace(trace), b"}\n\n"))


def _trace(trace: TraceReport | None) -> bytes:
    return b"" if trace is None else b',"kvmesh":' + encode(trace)


def logprobs_of(endpoint: Endpoint, tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> Any:
    formatted = chat_logprobs if endpoint is Endpoint.CHAT else completion_logprobs
    return formatted(tokenizer, placed)


def whole_body(
    endpoint: Endpoint,
    heading: Heading,
    text: str,
    logprobs: Any,
    finish_reason: str,
    usage: Usage,
    trace: TraceReport | None,
) -> bytes:
    """An answer that is not streamed. `logprobs` as from logprobs_of, or None."""
    choice: ChatChoice | CompletionChoice
    if endpoint is Endpoint.CHAT:
        kind = "chat.completion"
        choice = ChatChoice(message=AnswerMessage(text), logprobs=logprobs, finish_reason=finish_reason)
    else:
        kind = "text_completion"
        choice = CompletionChoice(text=text, logprobs=logprobs, finish_reason=finish_reason)
    response = Response(
        id=heading.id,
        object=kind,
        created=heading.created,
        model=heading.model,
        choices=[choice],
        usage=usage,
        kvmesh=msgspec.UNSET if trace is None else trace,
    )
    return encode(response)
