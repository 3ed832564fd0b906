"""The timeline of a request: when it reached each of its stages, where, and why there.

The record is made only while somebody looks: the access log, traces, the live page. They all read the same one, so that
they agree. It holds no text. Times are those of `time.monotonic`: the event loop's clock has whole milliseconds.

Nobody knows at the beginning which request will fail and have its trace exported. So while traces alone look, a request
that is not sampled has a record without answers: those are made at the end, for the few that are wanted, of a few notes
(frontend/rebuilt.py). Ids of spans are made for traces that are sampled.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from kvmesh.mesh.trace_context import (
    Headers,
    TraceContext,
    new_span_id,
    read_context,
    span_id_of,
    trace_id_of,
    traceparent,
)
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Placed, PullReport, Target, WorkerTimes

MAX_ATTEMPTS = 16  # of one answer that are kept: the first, and the latest
EMBEDDINGS = "embeddings"  # the endpoint that has vectors for answers
MAX_VECTORS = 16  # of one request whose stages are kept: the first ones

now = time.monotonic


class LegRecord(Struct, gc=False):
    """Record what one worker did for one attempt."""

    worker: str  # its name
    dp_rank: int
    sent: float
    first: float | None = None  # when its first message came: a token, or the ticket
    ended: float | None = None
    pull: PullReport | None = None
    times: WorkerTimes | None = None  # as the worker reports them, of a request that belongs to a trace
    traceparent: str = ""  # that the worker gets: of this call where the trace is sampled, else of the whole request

    @property
    def span_id(self) -> str:
        """Return the span of this call; where the trace was not sampled at its beginning, the span of the request."""
        return span_id_of(self.traceparent)


class Attempt(Struct, gc=False):
    """Record one placement of one answer, and what came of it. An attempt after the first is a migration."""

    asked: float  # when the router was asked
    isl_tokens: int  # prompt, and the answer so far
    block_size: int
    block_hashes: bytes  # u64 [isl_tokens // block_size], packed
    placed: Placed | None = None
    placed_at: float | None = None
    prefill: LegRecord | None = None  # a worker that computes the prompt alone
    decode: LegRecord | None = None  # the worker that answers; without a prefill leg it computes the prompt too
    ended: float | None = None
    error: str = ""  # code of the failure for which the next attempt was made

    def on_placed(self, placed: Placed) -> None:
        self.placed, self.placed_at = placed, now()

    def begin_leg(self, target: Target, answer: "AnswerRecord", *, is_prefill: bool) -> LegRecord:
        """Begin the part of a worker. The first one is asked as soon as the attempt is placed."""
        parent = answer.traceparent
        if answer.is_sampled:
            parent = traceparent(trace_id_of(parent), new_span_id(), is_sampled=True)
        sent = self.placed_at if self.prefill is None else None
        leg = LegRecord(target.name, target.dp_rank, sent or now(), traceparent=parent)
        if is_prefill:
            self.prefill = leg
        else:
            self.decode = leg
        return leg

    def end(self) -> None:
        """End this attempt, with the part of its last worker if it had one."""
        last = self.prefill if self.decode is None else self.decode
        self.ended = now() if last is None or last.ended is None else last.ended


def with_attempt(attempts: Sequence[Attempt], latest: Attempt) -> list[Attempt]:
    """Return the attempts of an answer with one more: the first, and the latest."""
    return [*attempts[:1], *attempts[1:][-(MAX_ATTEMPTS - 2) :], latest]


class AnswerRecord(Struct, gc=False):
    """The life of one answer."""

    index: int
    traceparent: str = ""  # of the request, "" if it belongs to no trace
    is_sampled: bool = False  # spans are made here, decided at the beginning
    max_tokens: int = 0  # that were asked for
    attempts: list[Attempt] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    osl_tokens: int = 0
    generated: list[int] | None = None  # while it runs: the dispatcher's list, of which the length matters

    def begin(self, isl_tokens: int, block_size: int, block_hashes: bytes) -> Attempt:
        """Begin an attempt. One that found no worker goes on: the request still waits."""
        attempts = self.attempts
        if attempts and attempts[-1].placed is None:
            attempts[-1].ended = None
            return attempts[-1]
        attempt = Attempt(now(), isl_tokens, block_size, block_hashes)
        attempts[:] = with_attempt(attempts, attempt)
        return attempt

    @property
    def tokens_so_far(self) -> int:
        return self.osl_tokens if self.generated is None else len(self.generated)


class RequestTimeline(Struct, gc=False):
    """The life of one request, filled while it runs. What it has not reached is None."""

    request_id: RequestId
    endpoint: str
    started: float
    model: str = ""
    traceparent: str = ""  # for what is asked for this request, "" if it belongs to no trace
    parent: TraceContext | None = None  # what the client has sent
    is_sampled: bool = False  # spans are made here, decided at the beginning
    is_whole: bool = True  # its answers are recorded from the beginning
    is_stream: bool = False
    parsed: float | None = None
    rendered: float | None = None  # the chat template
    tokenized: float | None = None
    answers: Sequence[AnswerRecord] = ()
    ended: float | None = None
    outcome: str = ""  # from kvmesh.frontend.errors.OUTCOMES, "" while it runs
    has_migrated: bool = False
    slo_missed: str = ""  # the part of the SLO that it missed, "" for none
    isl_tokens: int = 0
    osl_tokens: int = 0
    cached_tokens: int = 0

    def answer(self, index: int, max_tokens: int = 0) -> AnswerRecord:
        """Return the record of a new answer. The caller puts it into `answers`."""
        return AnswerRecord(index, self.traceparent, self.is_sampled, max_tokens)

    @property
    def started_unix_s(self) -> float:
        """Return when the request came, in Unix time as this host has it now."""
        return time.time() - now() + self.started

    @property
    def trace_id(self) -> str:
        """Return 32 hex digits, "" if the request belongs to no trace."""
        return trace_id_of(self.traceparent)

    @property
    def span_id(self) -> str:
        return span_id_of(self.traceparent)

    @property
    def tracestate(self) -> str:
        return "" if self.parent is None else self.parent.state

    def s(self, at: float | None) -> float | None:
        """Return a time of this record as seconds since the request came."""
        return None if at is None else max(0.0, at - self.started)

    @property
    def ttft_s(self) -> float | None:
        return self.s(min((a.first_token for a in self.answers if a.first_token is not None), default=None))

    @property
    def itl_s(self) -> float | None:
        """Return the mean gap between the tokens of the first answer."""
        answer = self.answers[0] if self.answers else None
        if answer is None or answer.first_token is None or answer.last_token is None or answer.osl_tokens < 2:
            return None
        return max(0.0, answer.last_token - answer.first_token) / (answer.osl_tokens - 1)


class Phase(NamedTuple):
    """A stage of a request: `parse`, `template`, `tokenize`; for each attempt `queue`, `prefill`, `pull`, `decode`."""

    name: str
    start_s: float  # since the request came
    end_s: float | None  # None: it is still in this stage
    answer: int = 0
    attempt: int = 0
    worker: str = ""


def phases(timeline: RequestTimeline) -> Iterator[Phase]:
    """Return the stages of a request that ran or runs, in the order of their beginning for each answer.

    A worker's own queue belongs to `prefill`, where nothing tells it apart.
    """
    s = timeline.s
    began = 0.0
    for name, at in (("parse", timeline.parsed), ("template", timeline.rendered), ("tokenize", timeline.tokenized)):
        if at is not None:
            yield Phase(name, began, s(at))
            began = s(at) or 0.0
    for answer in timeline.answers:
        for number, attempt in enumerate(answer.attempts):
            yield from _phases_of(timeline, answer, attempt, number)


def _phases_of(timeline: RequestTimeline, answer: AnswerRecord, attempt: Attempt, number: int) -> Iterator[Phase]:
    def phase(name: str, start: float, end: float | None, worker: str = "") -> Phase:
        last = attempt.ended if end is None else end
        return Phase(name, max(0.0, start - timeline.started), timeline.s(last), answer.index, number, worker)

    yield phase("queue", attempt.asked, attempt.placed_at)
    if (prefill := attempt.prefill) is not None:
        yield phase("prefill", prefill.sent, prefill.ended, prefill.worker)
    if (decode := attempt.decode) is None:
        return
    first = decode.first
    if attempt.prefill is None:
        yield phase("prefill", decode.sent, first, decode.worker)
    elif first is None:
        yield phase("pull", decode.sent, None, decode.worker)
    elif (pull := decode.pull) is not None:
        began = max(decode.sent, first - pull.duration_s)
        yield phase("pull", began, first, decode.worker)
    if first is not None:
        yield phase("decode", first, decode.ended, decode.worker)


Look = Callable[[RequestTimeline], None]


class Tracer(Protocol):
    """Decides which requests are traced."""

    def begin(self, parent: TraceContext | None) -> tuple[str, bool]:
        """Return the traceparent of a request, and whether it is sampled: by its client, if that has sent a trace."""
        ...

    def ended(self, timeline: RequestTimeline) -> bool:
        """Export the trace of a request that has ended, if it is wanted; return whether it is on its way."""
        ...


class Timelines:
    """Make the records of requests while somebody looks, and give each to those who look when it has ended."""

    def __init__(self) -> None:
        self._looks: list[Look] = []
        self._tracer: Tracer | None = None  # None: no traces are made here
        self.is_logged = False  # the server asks each request for the fields of its line
        self.is_watched = False
        self.running: dict[RequestId, RequestTimeline] = {}  # those that began while a look was there

    def trace(self, tracer: Tracer) -> None:
        """Have requests traced, from now on."""
        self._tracer, self.is_watched = tracer, True

    def log(self) -> None:
        """Have the fields of requests ready for the access log, from now on."""
        self.is_logged = self.is_watched = True

    def look(self, look: Look) -> Callable[[], None]:
        """Have `look` called with the record of each request that ends; return what ends that.

        It must be quick and must not raise: it runs where the request ends, on the event loop.
        """
        self._looks.append(look)
        self.is_watched = True

        def leave() -> None:
            self._looks.remove(look)
            self.is_watched = self.is_logged or self._tracer is not None or bool(self._looks)

        return leave

    def begin(self, request_id: RequestId, endpoint: str, headers: Headers = ()) -> RequestTimeline | None:
        """Return the record of a request that comes now; None while nobody looks."""
        if not self.is_watched:
            return None
        parent, traceparent, is_sampled, is_whole = read_context(headers), "", False, True
        if self._tracer is not None:
            traceparent, is_sampled = self._tracer.begin(parent)
            is_whole = is_sampled or self.is_logged or bool(self._looks)
        elif parent is not None:
            traceparent = parent.header(parent.parent_id)
        timeline = RequestTimeline(request_id, endpoint, now(), "", traceparent, parent, is_sampled, is_whole)
        if self._looks:
            self.running[request_id] = timeline
        return timeline

    def end(self, timeline: RequestTimeline, outcome: str) -> bool:
        """Complete a record, and show it to those who look; return whether its trace is exported."""
        timeline.ended = now()
        timeline.outcome = outcome
        if timeline.is_whole and (self._looks or self.running):
            self._show(timeline)
        tracer = self._tracer
        return tracer is not None and tracer.ended(timeline)

    def _show(self, timeline: RequestTimeline) -> None:
        self.running.pop(timeline.request_id, None)
        for look in tuple(self._looks):
            look(timeline)
