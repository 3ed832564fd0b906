"""POST /v1/chat/completions: how a chat is answered."""

from collections.abc import Sequence

import msgspec

from kvmesh.frontend.answer import Part
from kvmesh.frontend.endpoint import generating
from kvmesh.frontend.job import Job, TokenCounts
from kvmesh.frontend.openai.answers import ChunkWriter, whole_response
from kvmesh.frontend.openai.logprobs import chat_logprobs
from kvmesh.frontend.openai.parameters import CHAT_DEFAULTS, MESSAGE_DEFAULTS, PART_DEFAULTS, parse_chat
from kvmesh.frontend.openai.shapes import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatChunkChoice,
    ChatRequest,
    Chunk,
    ErrorBody,
    Message,
    Response,
    TextPart,
)
from kvmesh.frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.shapes import encode
from kvmesh.frontend.whole_answer import WholeAnswer, new_call_id
from kvmesh.mesh.http.errors import error_body
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import FinishReason


class ChatDialect:
    name = "chat"
    id_prefix = "chatcmpl"

    def parse(self, body: bytes) -> ParsedRequest:
        return parse_chat(body)

    def whole(self, job: Job, answers: Sequence[WholeAnswer], counts: TokenCounts) -> bytes:
        choices = [chat_choice(job, n, answer) for n, answer in enumerate(answers)]
        return whole_response("chat.completion", job, choices, counts)

    def writer(self, job: Job) -> "ChatWriter":
        return ChatWriter(job)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error)


def chat_choice(job: Job, index: int, answer: WholeAnswer) -> ChatChoice:
    calls = [AnswerToolCall(call.id, AnswerFunction(call.name, call.arguments)) for call in answer.calls]
    message = AnswerMessage(
        content=None if calls and not answer.content else answer.content,
        reasoning_content=answer.reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
    wants_logprobs = job.parsed.sampling.top_logprobs is not None
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(job.model.tokenizer, answer.logprobs) if wants_logprobs else None,
        finish_reason=finish_reason_of(answer.finish_reason, bool(calls)),
    )


def finish_reason_of(reason: FinishReason, has_calls: bool) -> str:
    """Return OpenAI's name of the reason: an answer that ends in calls has not merely stopped."""
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value


class ChatWriter(ChunkWriter):
    def __init__(self, job: Job) -> None:
        super().__init__("chat.completion.chunk", job)
        self._content_heads = [head + b'"delta":{"content":' for head in self._heads]

    def _set_usage(self, usage: bytes) -> None:
        super()._set_usage(usage)
        self._content_tail = b"}" + self._unfinished

    def opening(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":"","refusal":null}'
        return b"".join([self.plain(index, delta) for index in range(len(self._heads))])

    def part(self, index: int, part: Part) -> bytes:
        self._count_on()
        if part.logprobs:
            return self._with_logprobs(index, part)
        events = part.events
        if len(events) == 1 and isinstance(event := events[0], Content):
            return self._content_heads[index] + encode(event.text) + self._content_tail
        return b"".join([self.plain(index, b'"delta":' + _delta(event)) for event in events])

    def _with_logprobs(self, index: int, part: Part) -> bytes:
        """Write logprobs with the first chunk of the part."""
        logprobs = encode(chat_logprobs(self._job.model.tokenizer, part.logprobs))
        first, *rest = [_delta(event) for event in part.events] or [b'{"content":""}']
        chunks = [self.chunk(index, b'"delta":' + first, logprobs)]
        return b"".join([*chunks, *[self.plain(index, b'"delta":' + delta) for delta in rest]])

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        if self._job.parsed.is_usage_continuous:
            return None
        return self._content_heads[index] + b'"', b'"' + self._content_tail

    def finish(self, index: int, reason: FinishReason) -> bytes:
        has_calls = self._job.branches[index].answer.has_calls
        return self.chunk(index, b'"delta":{}', reason=encode(finish_reason_of(reason, has_calls)))


def _delta(event: Event) -> bytes:
    """The `delta` object."""
    match event:
        case Content(text):
            return b'{"content":' + encode(text) + b"}"
        case Reasoning(text):
            return b'{"reasoning_content":' + encode(text) + b"}"
        case CallBegun(index, name, call_id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id or new_call_id(), "type": "function", "function": function}
            return encode({"tool_calls": [call]})
        case CallArguments(index, fragment):
            return encode({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})


_ASKING = "Tell me a story."
_NOTES = ShapeNotes(
    partly=((ChatRequest, CHAT_DEFAULTS), (Message, MESSAGE_DEFAULTS), (TextPart, PART_DEFAULTS)),
    needed=((TextPart, "text"),),
    token_id_keys=((ChatRequest, "logit_bias"),),
    examples={
        (ChatRequest, "messages"): [{"role": "user", "content": _ASKING}],
        (Message, "content"): _ASKING,
        (Message, "role"): "user",
        (TextPart, "text"): _ASKING,
    },
)
ENDPOINT = generating(
    "/v1/chat/completions",
    ChatDialect(),
    Operation(
        summary="Answer a chat",
        request=(ChatRequest,),
        reply=Response[ChatChoice],
        events=(Chunk[ChatChunkChoice], ErrorBody),
        ends_with_done=True,
        failures=ASKED_FAILURES,
        is_asked=True,
        takes_hints=True,
        notes=_NOTES,
    ),
)
