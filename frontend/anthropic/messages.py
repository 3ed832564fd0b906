"""POST /v1/messages: how a conversation is answered, whole or as a stream of content blocks."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from kvmesh.frontend.answer import Part
from kvmesh.frontend.anthropic.conversation import INVALID_JSON
from kvmesh.frontend.anthropic.errors import error_body
from kvmesh.frontend.anthropic.parse import (
    MESSAGES_DEFAULTS,
    PROMPT_DEFAULTS,
    ParsedMessages,
    parse_messages,
)
from kvmesh.frontend.anthropic.shapes import (
    Answer,
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    Ending,
    ErrorAnswer,
    Message,
    MessagesRequest,
    Usage,
    UsageSoFar,
)
from kvmesh.frontend.anthropic.shapes import Event as StreamEvent
from kvmesh.frontend.endpoint import generating
from kvmesh.frontend.job import Job, TokenCounts
from kvmesh.frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.report import trace_report
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.shapes import TraceReport, encode
from kvmesh.frontend.whole_answer import WholeAnswer, WholeCall, new_call_id
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import UNREADABLE, FinishReason


class MessagesDialect:
    name = "messages"
    id_prefix = "msg"

    def parse(self, body: bytes) -> ParsedRequest:
        return parse_messages(body)

    def whole(self, job: Job, answers: Sequence[WholeAnswer], counts: TokenCounts) -> bytes:
        content = content_of(answers[0], job.parsed)
        return encode(answer_of(job, content, stop_of(job), counts, trace_report(job)))

    def writer(self, job: Job) -> "MessagesWriter":
        return MessagesWriter(job)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error, request_id)


def answer_of(
    job: Job, content: list[AnswerBlock], stop: "Stop", counts: TokenCounts, trace: TraceReport | None = None
) -> Answer:
    return Answer(
        id=message_id(job),
        model=job.heading.model,
        content=content,
        stop_reason=stop.reason,
        stop_sequence=stop.sequence,
        usage=usage_of(counts, Usage),
        kvmesh=msgspec.UNSET if trace is None else trace,
    )


def message_id(job: Job) -> str:
    """Ours, with the separator of Anthropic's."""
    return job.heading.id.replace("-", "_", 1)


UsageT = TypeVar("UsageT", bound=UsageSoFar)


def usage_of(counts: TokenCounts, kind: type[UsageT]) -> UsageT:
    return kind(
        input_tokens=counts.prompt - counts.cached,
        cache_read_input_tokens=counts.cached,
        output_tokens=counts.completion,
    )


class Stop(NamedTuple):
    reason: str | None
    sequence: str | None


GOING_ON: Final = Stop(None, None)


def stop_of(job: Job) -> Stop:
    """Return why a complete answer ended."""
    answer = job.branches[0].answer
    if answer.stopped_by is not None:
        return Stop("stop_sequence", answer.stopped_by)
    if answer.finish_reason is FinishReason.LENGTH:
        return Stop("max_tokens", None)
    return Stop("tool_use" if answer.has_calls else "end_turn", None)


def omits_thoughts(parsed: ParsedRequest) -> bool:
    return isinstance(parsed, ParsedMessages) and parsed.omits_thoughts


def content_of(answer: WholeAnswer, parsed: ParsedRequest) -> list[AnswerBlock]:
    """Thoughts, prose, calls."""
    blocks: list[AnswerBlock] = []
    if answer.reasoning:
        blocks.append(AnswerThinking("" if omits_thoughts(parsed) else answer.reasoning))
    if answer.content:
        blocks.append(AnswerText(answer.content))
    return blocks + [AnswerToolUse(call.id, call.name, input_of(call)) for call in answer.calls]


def input_of(call: WholeCall) -> msgspec.Raw:
    """The arguments as the model wrote them; what is no JSON object (it was cut off) is wrapped into one, not lost."""
    text = call.arguments or "{}"
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE:
        return msgspec.Raw(encode({INVALID_JSON: text}))
    return msgspec.Raw(text.encode())


def framed(name: str, fields: bytes) -> bytes:
    """A server-sent event. `fields`: what follows the type in its object, with the comma before it."""
    return b'event: %b\ndata: {"type":"%b"%b}\n\n' % (name.encode(), name.encode(), fields)


class MessagesWriter:
    """Writes an answer as events: a block is opened by the first event that belongs to it, and closed by the first that
    does not. Only what is new in a delta is encoded each time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._omits_thoughts = omits_thoughts(job.parsed)
        self._index = -1  # of the latest block
        self._open: type[Event] | None = None  # what the open block takes: Content, Reasoning or CallArguments
        self._delta_head = b""  # up to the text of a delta of the open block

    def opening(self) -> bytes:
        message = answer_of(self._job, [], GOING_ON, self._job.counts())
        return framed("message_start", b',"message":' + encode(message))

    def part(self, index: int, part: Part) -> bytes:
        events = part.events
        if len(events) == 1 and self._open is Content and isinstance(only := events[0], Content):
            return self._delta_head + encode(only.text) + b"}}\n\n"
        return b"".join([self._write(event) for event in events])

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        return (self._delta_head + b'"', b'"}}\n\n') if self._open is Content else None

    def _write(self, event: Event) -> bytes:
        match event:
            case Content("") | Reasoning(""):
                return b""
            case Content(text):
                return self._enter(Content, b"text_delta", b"text", AnswerText("")) + self._delta(text)
            case Reasoning(text):
                opened = self._enter(Reasoning, b"thinking_delta", b"thinking", AnswerThinking(""))
                return opened + (b"" if self._omits_thoughts else self._delta(text))
            case CallBegun(_, name, call_id):
                block = AnswerToolUse(call_id or new_call_id(), name, msgspec.Raw(b"{}"))
                return self._begin(CallArguments, b"input_json_delta", b"partial_json", block)
            case CallArguments(_, fragment):
                return self._delta(fragment)

    def _delta(self, text: str) -> bytes:
        return self._delta_head + encode(text) + b"}}\n\n"

    def _enter(self, kind: type[Event], delta: bytes, field: bytes, block: AnswerBlock) -> bytes:
        return b"" if self._open is kind else self._begin(kind, delta, field, block)

    def _begin(self, kind: type[Event], delta: bytes, field: bytes, block: AnswerBlock) -> bytes:
        """Close the open block and open the next."""
        closed = self._close()
        self._index += 1
        self._open = kind
        at = b',"index":%d' % self._index
        head = framed("content_block_delta", at + b',"delta":{"type":"%b","%b":' % (delta, field))
        self._delta_head = head.removesuffix(b"}\n\n")
        return closed + framed("content_block_start", at + b',"content_block":' + encode(block))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        at = b',"index":%d' % self._index
        signed = b""
        if self._open is Reasoning:  # thoughts are not signed here, and clients wait for it
            signed = framed("content_block_delta", at + b',"delta":{"type":"signature_delta","signature":""}')
        self._open = None
        return signed + framed("content_block_stop", at)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._close()

    def end(self, counts: TokenCounts) -> bytes:
        stop = stop_of(self._job)
        delta = encode(Ending(stop.reason, stop.sequence))
        trace = trace_report(self._job)
        last = b"" if trace is None else b',"kvmesh":' + encode(trace)
        usage = b',"usage":' + encode(usage_of(counts, UsageSoFar))
        return framed("message_delta", b',"delta":' + delta + usage) + framed("message_stop", last)

    def error(self, error: MeshError, request_id: str) -> bytes:
        return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"


_ASKING = "Tell me a story."
ENDPOINT = generating(
    "/v1/messages",
    MessagesDialect(),
    Operation(
        summary="Answer, in the shape of Anthropic's Messages API",
        request=(MessagesRequest,),
        reply=Answer,
        events=(StreamEvent,),
        error=ErrorAnswer,
        failures=ASKED_FAILURES,
        is_asked=True,
        takes_hints=True,
        notes=ShapeNotes(
            partly=((MessagesRequest, {**PROMPT_DEFAULTS, **MESSAGES_DEFAULTS}),),
            examples={
                (MessagesRequest, "messages"): [{"role": "user", "content": _ASKING}],
                (Message, "content"): _ASKING,
            },
        ),
    ),
)
