"""The dialect of the Responses API: how a conversation is answered, item by item."""

from collections.abc import Iterable, Sequence

import msgspec

from kvmesh.frontend.answer import Part
from kvmesh.frontend.job import Job, TokenCounts
from kvmesh.frontend.openai.logprobs import chat_logprobs
from kvmesh.frontend.openai.shapes import ChatLogprob
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.frontend.report import trace_report
from kvmesh.frontend.responses.background import BackgroundRun
from kvmesh.frontend.responses.items import GrowingCall, GrowingItem, GrowingMessage, GrowingReasoning, sse
from kvmesh.frontend.responses.parse import ParsedResponses, Storage, parse_responses
from kvmesh.frontend.responses.shapes import (
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseUsage,
    StreamEvent,
)
from kvmesh.frontend.shapes import encode
from kvmesh.frontend.whole_answer import WholeAnswer, new_call_id
from kvmesh.mesh.http.errors import client_text, error_body, http_failure
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError
from kvmesh.protocol.messages import FinishReason


class ResponsesDialect:
    name = "responses"
    id_prefix = "resp"

    def __init__(self, storage: Storage | None = None) -> None:
        """Make the dialect of a frontend that stores nothing, or of one request with what it finds stored."""
        self._storage = storage
        self.started: BackgroundRun | None = None

    def parse(self, body: bytes) -> ParsedResponses:
        return parse_responses(body, self._storage)

    def whole(self, job: Job, answers: Sequence[WholeAnswer], counts: TokenCounts) -> bytes:
        return encode(whole_response(job, answers, counts))

    def writer(self, job: Job) -> "ResponsesWriter":
        return ResponsesWriter(job)

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        return error_body(error)


# --- the response object ------------------------------------------------------------------------------


def parsed_of(job: Job) -> ParsedResponses:
    assert isinstance(job.parsed, ParsedResponses), "the dialect parsed it"
    return job.parsed


def in_progress(job: Job) -> Response:
    """The response as it begins."""
    parsed = parsed_of(job)
    return Response(
        **msgspec.structs.asdict(parsed.settings),
        id=response_id(job),
        created_at=job.heading.created,
        status="in_progress",
        model=job.heading.model,
        output=[],
    )


def queued(job: Job) -> Response:
    """Return the response as it is before it begins."""
    return msgspec.structs.replace(in_progress(job), status="queued")


def whole_response(job: Job, answers: Sequence[WholeAnswer], counts: TokenCounts) -> Response:
    [answer] = answers
    return finished(job, items_of(job, answer), answer.finish_reason, counts)


def finished(job: Job, output: Sequence[OutputItem], reason: FinishReason, counts: TokenCounts) -> Response:
    trace = trace_report(job)
    was_cut = reason is FinishReason.LENGTH
    return msgspec.structs.replace(
        in_progress(job),
        status="incomplete" if was_cut else "completed",
        completed_at=None if was_cut else completed_at(job),
        incomplete_details=IncompleteDetails("max_output_tokens") if was_cut else None,
        output=list(output),
        usage=ResponseUsage(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(counts.cached),
            output_tokens=counts.completion,
            total_tokens=counts.total,
        ),
        kvmesh=msgspec.UNSET if trace is None else trace,
    )


def failed(job: Job, output: Sequence[OutputItem], error: MeshError) -> Response:
    told = ResponseError(failure_code(error), client_text(error))
    return msgspec.structs.replace(in_progress(job), status="failed", error=told, output=list(output))


def cancelled(job: Job, output: Sequence[OutputItem]) -> Response:
    return msgspec.structs.replace(in_progress(job), status="cancelled", output=list(output))


def completed_at(job: Job) -> int:
    """Unix seconds."""
    timing = job.timing
    return job.heading.created + int((timing.last_token or timing.started) - timing.started)


def response_id(job: Job) -> str:
    """The request's id as OpenAI would write it."""
    return f"resp_{job.heading.id.removeprefix('resp-')}"


def failure_code(error: MeshError) -> str:
    """Return one of the codes that OpenAI's clients know."""
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequestError) else "server_error"


def items_of(job: Job, answer: WholeAnswer) -> list[OutputItem]:
    """Thoughts, then prose, then calls; an answer of nothing is an empty message."""
    growing: list[GrowingItem] = []
    own_id = response_id(job)
    if answer.reasoning:
        growing.append(GrowingReasoning(own_id, 0))
        growing[-1].fragments.append(answer.reasoning)
    if answer.content or not (answer.reasoning or answer.calls):
        message = GrowingMessage(own_id, len(growing))
        message.fragments.append(answer.content)
        message.logprobs = chat_logprobs(job.model.tokenizer, answer.logprobs).content
        growing.append(message)
    for call in answer.calls:
        growing.append(begun_call(job, len(growing), call.id, call.name))
        growing[-1].fragments.extend(call.fragments)
    items = [item.item("completed") for item in growing[:-1]]
    return [*items, growing[-1].item(last_status(answer.finish_reason))]


def begun_call(job: Job, output_index: int, call_id: str, written: str) -> GrowingCall:
    """Return the call of a function under the client's name for it; `written` is the model's name for it."""
    parsed = job.parsed
    assert isinstance(parsed, ParsedResponses), "the dialect parsed it"
    if (full := parsed.full_names.get(written)) is None:
        return GrowingCall(response_id(job), output_index, call_id, written)
    return GrowingCall(response_id(job), output_index, call_id, full.name, full.namespace)


def last_status(reason: FinishReason) -> ItemStatus:
    """Return the status of the item with which the answer ends."""
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


# --- streaming ----------------------------------------------------------------------------------------


class ResponsesWriter:
    """An item is open until the next one begins. Events are numbered; the opening has the first two numbers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sequence_number = 2
        self._open: GrowingItem | None = None
        self._done: list[OutputItem] = []
        self._waiting: list[ChatLogprob] = []  # for the text they belong to, which a parser may hold back
        self._reason = FinishReason.STOP

    def opening(self) -> bytes:
        response = in_progress(self._job)
        created = ResponseCreated(sequence_number=0, response=response)
        return sse(created) + sse(ResponseInProgress(sequence_number=1, response=response))

    def part(self, index: int, part: Part) -> bytes:
        if part.logprobs:
            self._waiting += chat_logprobs(self._job.model.tokenizer, part.logprobs).content
        events = part.events
        chunk = self._only(events[0]) if len(events) == 1 else b"".join([self._on_event(event) for event in events])
        if self._waiting and not isinstance(self._open, GrowingMessage | None):
            self._waiting.clear()  # of a thought, a call or a marker
        return chunk

    def frame(self, index: int) -> None:
        return None  # its events are numbered

    def _only(self, event: Event) -> bytes:
        """Nearly all parts are more of the message that is open."""
        if self._waiting or not (isinstance(event, Content) and isinstance(self._open, GrowingMessage)):
            return self._on_event(event)
        return self._delta(event.text)

    def _on_event(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._prose(text)
            case Reasoning(text):
                begun = b"" if isinstance(self._open, GrowingReasoning) else self._begin_item(GrowingReasoning)
                return begun + self._delta(text)
            case CallBegun(_, name, call_id):
                return self._begin(begun_call(self._job, self._next, call_id or new_call_id(), name))
            case CallArguments(_, fragment):
                return self._delta(fragment)

    def _prose(self, text: str) -> bytes:
        begun = b"" if isinstance(self._open, GrowingMessage) else self._begin_item(GrowingMessage)
        return begun + (self._with_logprobs(text) if self._waiting else self._delta(text))

    def _delta(self, text: str) -> bytes:
        assert self._open is not None, "a fragment belongs to an item"
        event = self._open.delta(text, self._sequence_number)
        self._sequence_number += 1
        return event

    def _with_logprobs(self, text: str) -> bytes:
        assert isinstance(self._open, GrowingMessage)
        event = self._open.delta_with_logprobs(text, self._waiting, self._sequence_number)
        self._sequence_number += 1
        self._waiting.clear()
        return event

    @property
    def _next(self) -> int:
        """The index of an item that begins now."""
        return len(self._done) + (self._open is not None)

    def _begin_item(self, kind: type[GrowingMessage] | type[GrowingReasoning]) -> bytes:
        return self._begin(kind(response_id(self._job), self._next))

    def _begin(self, item: GrowingItem) -> bytes:
        before = self._close("completed")
        self._open = item
        return before + self._send(item.begun())

    def _close(self, status: ItemStatus) -> bytes:
        if (item := self._open) is None:
            return b""
        self._open = None
        self._done.append(item.item(status))
        return self._send(item.done(status))

    def _send(self, events: Iterable[StreamEvent]) -> bytes:
        numbered: list[bytes] = []
        for event in events:
            event.sequence_number = self._sequence_number
            self._sequence_number += 1
            numbered.append(sse(event))
        return b"".join(numbered)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        self._reason = reason
        begun = b"" if self._open is not None else self._begin_item(GrowingMessage)
        is_message = isinstance(self._open, GrowingMessage)
        rest = self._with_logprobs("") if is_message and self._waiting else b""
        return begun + rest + self._close(last_status(reason))

    def response(self, counts: TokenCounts) -> Response:
        """Return the response as `end` reports it."""
        return finished(self._job, self._done, self._reason, counts)

    def so_far(self) -> list[OutputItem]:
        """Return the items of an answer that does not go on."""
        return [*self._done, *([] if self._open is None else [self._open.item("incomplete")])]

    def end(self, counts: TokenCounts) -> bytes:
        response = self.response(counts)
        is_whole = response.status == "completed"
        return self._send([ResponseCompleted(response=response) if is_whole else ResponseIncomplete(response=response)])

    def error(self, error: MeshError, request_id: str) -> bytes:
        told = ErrorEvent(code=http_failure(error.code).code, message=client_text(error), param=error.param)
        return self._send([told, ResponseFailed(response=failed(self._job, self.so_far(), error))])


class BackgroundWriter(ResponsesWriter):
    """A background response is queued until its first token."""

    def opening(self) -> bytes:
        response = queued(self._job)
        created = ResponseCreated(sequence_number=0, response=response)
        return sse(created) + sse(ResponseQueued(sequence_number=1, response=response))

    def begun(self) -> bytes:
        return self._send([ResponseInProgress(response=in_progress(self._job))])
