"""POST /v1/chat/completions: how a chat is answered."""

from collections.abc import Sequence

import msgspec

from frontend.answer import Part
from frontend.call import Call, Endpoint, TokenCounts
from frontend.chunks import ChunkWriter, usage_of
from frontend.logprobs import chat_logprobs
from frontend.openai import AnswerFunction, AnswerMessage, AnswerToolCall, ChatChoice, Response, encode
from frontend.parameters import parse_chat
from frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from frontend.pipeline import Job, trace_report
from frontend.whole import Whole, new_call_id, openai_finish_reason
from mesh.http.errors import error_body
from protocol.errors import MeshError
from protocol.messages import FinishReason


class ChatDialect:
    endpoint = Endpoint.CHAT
    id_prefix = "chatcmpl"

    def parse(self, body: bytes) -> Call:
        return parse_chat(body)

    def whole(self, job: Job, answers: Sequence[Whole], counts: TokenCounts) -> bytes:
        trace = trace_report(job)
        response = Response(
            id=job.heading.id,
            object="chat.completion",
            created=job.heading.created,
            model=job.heading.model,
            choices=[chat_choice(job, n, answer) for n, answer in enumerate(answers)],
            usage=usage_of(counts),
            kvmesh=msgspec.UNSET if trace is None else trace,
        )
        return encode(response)

    def writer(self, job: Job) -> "ChatWriter":
        return ChatWriter(job)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error)


def chat_choice(job: Job, index: int, answer: Whole) -> ChatChoice:
    calls = [AnswerToolCall(call.id, AnswerFunction(call.name, call.arguments)) for call in answer.calls]
    message = AnswerMessage(
        content=None if calls and not answer.content else answer.content,
        reasoning_content=answer.reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
    wants_logprobs = job.call.sampling.top_logprobs is not None
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(job.model.tokenizer, answer.logprobs) if wants_logprobs else None,
        finish_reason=openai_finish_reason(answer.finish_reason, bool(calls)),
    )


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
        """They go with the first chunk of the part."""
        logprobs = encode(chat_logprobs(self._job.model.tokenizer, part.logprobs))
        first, *rest = [_delta(event) for event in part.events] or [b'{"content":""}']
        chunks = [self.chunk(index, b'"delta":' + first, logprobs)]
        return b"".join([*chunks, *[self.plain(index, b'"delta":' + delta) for delta in rest]])

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        if self._job.call.is_usage_continuous:
            return None
        return self._content_heads[index] + b'"', b'"' + self._content_tail

    def finish(self, index: int, reason: FinishReason) -> bytes:
        has_calls = self._job.branches[index].answer.has_calls
        return self.chunk(index, b'"delta":{}', reason=encode(openai_finish_reason(reason, has_calls)))


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
