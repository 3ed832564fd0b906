"""Endpoints: a route with its handler and its description, and how a request for answers is served at one."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from kvmesh.frontend import metrics
from kvmesh.frontend.access_log import access_fields
from kvmesh.frontend.admission import Admission
from kvmesh.frontend.callers import ApiCaller, Visit, begin, caller_of, model_for, salt_for
from kvmesh.frontend.crew import WorkerCrew
from kvmesh.frontend.dialect import Dialect
from kvmesh.frontend.errors import outcome
from kvmesh.frontend.gen_ai import GenAiMetrics
from kvmesh.frontend.generator import Generator
from kvmesh.frontend.guide_errors import in_callers_words
from kvmesh.frontend.hints import with_headers
from kvmesh.frontend.job import NO_CONTEXT, Context, Job, TokenCounts, prepare
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.operation import Operation
from kvmesh.frontend.outlet import SseOutlet, WholeOutlet
from kvmesh.frontend.parts import SharedParts
from kvmesh.frontend.rebuilt import complete
from kvmesh.frontend.report import placement_headers
from kvmesh.frontend.request import ParsedBody
from kvmesh.frontend.running import run
from kvmesh.frontend.service_level import NO_LIMIT, ServiceLevel
from kvmesh.frontend.timeline import RequestTimeline, Timelines
from kvmesh.frontend.timeline import now as clock
from kvmesh.mesh.http.connection import refusal
from kvmesh.mesh.http.errors import error_body
from kvmesh.mesh.http.request import Reply, ReplyStream, Request
from kvmesh.mesh.http.server import REQUEST_ID_HEADER, client_request_id
from kvmesh.mesh.trace_context import TRACEPARENT, read_context
from kvmesh.protocol.errors import InvalidRequestError, MeshError
from kvmesh.protocol.ids import RequestId, new_request_id
from kvmesh.router.findings import DiscoveryReport

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout-s"
SSE_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must not collect chunks
}


@dataclass(frozen=True, slots=True)
class TimeLimits:
    default_s: float  # where the client names none
    max_s: float


@dataclass(frozen=True, slots=True)
class Services:
    """Holds what the handlers of all endpoints use. There is one per application."""

    models: ModelRegistry
    generator: Generator
    admission: Admission
    limits: TimeLimits
    router_ready: Callable[[], bool]
    metrics_folder: Path | None  # where the processes that share our port meet
    document: Callable[[], bytes]  # /openapi.json
    search: Callable[[], DiscoveryReport]  # of workers
    parts: SharedParts = field(default_factory=SharedParts)  # of extensions
    is_steered: bool = False  # an endpoint picker is in front
    router_note: Callable[[], str] = str  # what is wrong with the routers, "" for nothing
    slo: ServiceLevel = NO_LIMIT
    gen_ai: GenAiMetrics | None = None  # None: only our own names are counted
    timelines: Timelines = field(default_factory=Timelines)
    crew: WorkerCrew | None = None  # None: this frontend reaches no workers


Handler = Callable[[Services, Request], Awaitable[Reply | ReplyStream]]
ErrorShape = Callable[[MeshError, str], bytes]  # the body of a refusal, given the request's id


def openai_error(error: MeshError, request_id: str) -> bytes:
    """Return OpenAI's error object, which has no place for the id."""
    return error_body(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A route of the API: its place, its handler, its description."""

    method: str
    path: str  # as kvmesh.mesh.http.server.Route has it
    handler: Handler
    operation: Operation
    dialect: Dialect | None = None  # of its requests, where models answer
    error_body: ErrorShape = openai_error
    is_open: bool = False  # needs no key


def generating(path: str, dialect: Dialect, operation: Operation) -> Endpoint:
    """Return the endpoint where models answer in `dialect`."""
    handler = partial(answer, dialect)
    return Endpoint(
        method="POST",
        path=path,
        handler=handler,
        operation=operation,
        dialect=dialect,
        error_body=dialect.error_body,
    )


async def answer(
    dialect: Dialect, services: Services, request: Request, kind: "type[Exchange] | None" = None
) -> Reply | ReplyStream:
    """Answer one request and count how it ended. Failures are answers too; only cancellation is raised."""
    exchange = (kind or Exchange)(services, request, dialect)
    try:
        with services.admission.enter():
            return await exchange.run()
    except MeshError as error:
        return exchange.refuse(error)
    finally:
        exchange.count()


class Exchange:
    """Answers one request."""

    __slots__ = (
        "_dialect",
        "_headers",
        "_job",
        "_loop",
        "_model",
        "_request",
        "_request_id",
        "_services",
        "_shown_id",
        "_started",
        "_stream",
        "_timeline",
        "_visit",
        "outcome",
    )

    def __init__(self, services: Services, request: Request, dialect: Dialect) -> None:
        self._services = services
        self._request = request
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        theirs = client_request_id(request)
        self._request_id = new_id(dialect.id_prefix, theirs)
        self._shown_id = theirs or self._request_id
        self._headers = request_id_headers(self._shown_id)
        self._job: Job | None = None
        self._model = ""  # as workers call it, once it is known
        self._stream: SseOutlet | None = None
        self._visit: Visit | None = None  # of a caller with limits
        self._timeline = services.timelines.begin(self._request_id, dialect.name, request.headers)
        self.outcome = "client_gone"  # what remains if the handler is cancelled

    async def run(self) -> Reply | ReplyStream:
        try:
            deadline = self._started + timeout_s(self._request, self._services.limits)
            with self._services.admission.until(deadline, self._loop):
                parsed = with_hints(
                    self._request, self._dialect.parse(self._request.body), is_steered=self._services.is_steered
                )
                if (timeline := self._timeline) is not None:
                    timeline.parsed, timeline.model, timeline.is_stream = clock(), parsed.model, parsed.stream
                model = await model_for(self._request, self._services.models, parsed.model)
                self._model = model.base
                self._services.generator.check(model.base, parsed.hints, parsed.max_tokens or 0, deadline)
                self._visit = visit = await begin(self._request)
                job = await prepare(parsed, model, self._request_id, self._started, self._context())
                if timeline is not None:
                    record(job, timeline)
                if visit is not None:
                    await reserve(visit, job)
                self._job = job
                reply = await (self._send_stream if parsed.stream else self._send_whole)(job, deadline)
            self.outcome = "ok"
            return reply
        except Exception as error:
            return await self._fail(self._named(as_failure(error, self._request_id, self._trace_id)))

    def _context(self) -> Context:
        """Return the trace that workers are told: ours, or where none is made here, what the client has sent."""
        if (timeline := self._timeline) is not None:
            return timeline.traceparent, "" if (parent := timeline.parent) is None else parent.state
        return NO_CONTEXT if self._request.header(TRACEPARENT) is None else carried(self._request)

    @property
    def _trace_id(self) -> str:
        return "" if self._timeline is None else self._timeline.trace_id

    def _named(self, failure: MeshError) -> MeshError:
        """Return the failure with the name of the caller's parameter."""
        return failure if self._job is None else in_callers_words(failure, self._job.parsed)

    async def _send_whole(self, job: Job, deadline: float) -> Reply:
        answers = WholeOutlet(job)
        await run(job, self._services.generator, answers, deadline)
        whole = partial(self._dialect.whole, job, answers.finished(), job.counts())
        body = whole() if job.parsed.sampling.prompt_logprobs is None else await asyncio.to_thread(whole)
        return Reply(body, headers=self._reply_headers(job))

    async def _send_stream(self, job: Job, deadline: float) -> Reply | ReplyStream:
        """Headers go out with the first token, so that a failure before it gets a status of its own."""
        headers = SSE_HEADERS | self._headers
        self._stream = outlet = SseOutlet(self._request, job, self._dialect.writer(job), headers)
        await run(job, self._services.generator, outlet, deadline)
        return outlet.end()

    def _reply_headers(self, job: Job) -> dict[str, str]:
        """Return the headers, with the placement if the caller wants to know it."""
        return self._headers | (placement_headers(job.branches[0].trace) if job.parsed.hints.explain else {})

    def refuse(self, error: MeshError) -> Reply:
        """A reply for a failure before the headers."""
        self.outcome = outcome(error)
        return refusal(error, self._dialect.error_body(error, self._shown_id), self._headers)

    async def _fail(self, error: MeshError) -> Reply | ReplyStream:
        """Report a failure; after the headers it can only be the last event of the stream."""
        if self._stream is None or self._stream.reply is None:
            return self.refuse(error)
        self.outcome = outcome(error)
        log.warning("request %s broke off: %s", self._request_id, error, extra=in_trace(self._trace_id))
        return await self._stream.break_off(error, self._shown_id)

    def count(self) -> None:
        """Tell the metrics how it ended."""
        services, job = self._services, self._job
        counters = metrics.of_endpoint(self._dialect.name, self._model)
        counters.requests(self.outcome).inc()
        duration_s = self._loop.time() - self._started
        counters.duration.observe(duration_s)
        if services.gen_ai is not None:
            services.gen_ai.ended(self._dialect.name, self._model, self.outcome, duration_s)
        if (caller := caller_of(self._request)) is not None:
            caller.usage.count(self.outcome)
        if self._visit is not None and job is None:
            self._visit.end(0)
        ttft_s, itl_s, counts = None, 0.0, None
        if job is not None:
            counts = job.counts()
            ttft_s, itl_s = count_tokens(counters, job, counts, services.gen_ai)
            settle(caller, self._visit, job, counts)
        if (missed := services.slo.missed(self.outcome, ttft_s, itl_s)) is not None:
            counters.slo_missed(missed).inc()
        if (timeline := self._timeline) is not None:
            if missed is not None and missed != "none":
                timeline.slo_missed = missed
            timeline.has_migrated = job is not None and has_migrated(job)
            if timeline.is_whole or timeline.slo_missed or timeline.has_migrated:  # traces alone want few
                if end_record(services.timelines, timeline, job, self.outcome, counts):
                    times = timeline.trace_id, duration_s, ttft_s, itl_s
                    counters.exemplify(*times)
                    if services.gen_ai is not None:
                        services.gen_ai.exemplify(self._dialect.name, self._model, self.outcome, *times)
                if services.timelines.is_logged:
                    self._request.log_fields = partial(access_fields, timeline)


def identified(handler: Handler, prefix: str, error_body: ErrorShape = openai_error) -> Handler:
    """Return the handler of an endpoint that runs nothing: every reply has the request's id, failures are replies."""

    async def answer(services: Services, request: Request) -> Reply | ReplyStream:
        shown_id = client_request_id(request) or new_request_id(prefix)
        try:
            reply = await handler(services, request)
        except Exception as error:
            failure = as_failure(error, shown_id)
            reply = refusal(failure, error_body(failure, shown_id))
        reply.headers = request_id_headers(shown_id) | dict(reply.headers)
        return reply

    return answer


def in_trace(trace_id: str) -> dict[str, str]:
    """Return the further fields of a log line."""
    return {"trace_id": trace_id} if trace_id else {}


def as_failure(error: Exception, request_id: str, trace_id: str = "") -> MeshError:
    """Return what the client is told. A bug met by one request must not end as something like an answer."""
    if isinstance(error, MeshError):
        return error
    log.error("request %s failed", request_id, exc_info=error, extra=in_trace(trace_id))
    return MeshError("the frontend failed", hint="see its log")


def record(job: Job, timeline: RequestTimeline) -> None:
    """Have the answers of a job recorded. The request was tokenized just now."""
    timeline.tokenized, timeline.rendered = clock(), job.prompts[0].rendered
    if timeline.is_whole:
        timeline.answers = [timeline.answer(branch.index, branch.request.stop.max_tokens) for branch in job.branches]
        for branch, answer in zip(job.branches, timeline.answers, strict=True):
            branch.trace.record = answer


def rebuild(job: Job, timeline: RequestTimeline) -> None:
    """Make the records of a job's answers, which ended now and were not followed."""
    ended = clock()
    timeline.answers = [timeline.answer(branch.index, branch.request.stop.max_tokens) for branch in job.branches]
    for branch, answer in zip(job.branches, timeline.answers, strict=True):
        timing = branch.timing
        answer.first_token, answer.last_token = timing.first_token, timing.last_token
        answer.osl_tokens = branch.answer.completion_tokens
        is_over = branch.answer.finish_reason is not None and timing.last_token is not None
        complete(answer, branch.trace, (timing.last_token if is_over else None) or ended, timeline.tokenized)


def carried(request: Request) -> tuple[str, str]:
    """Return the `traceparent` and `tracestate` that the client has sent, "" if it has sent none that can be read."""
    context = read_context(request.headers)
    return ("", "") if context is None else (context.header(context.parent_id), context.state)


def has_migrated(job: Job) -> bool:
    """Return whether a worker has failed its part of a job."""
    for branch in job.branches:  # noqa: SIM110 - for every request: a generator would cost more than all of it
        if branch.trace.migrations:
            return True
    return False


def end_record(
    timelines: Timelines, timeline: RequestTimeline, job: Job | None, outcome: str, counts: TokenCounts | None = None
) -> bool:
    """Complete the record of a request, and show it to those who look; return whether its trace is exported.

    `counts`: of the job, where they are at hand.
    """
    if job is not None:
        counts = counts or job.counts()
        timeline.isl_tokens, timeline.osl_tokens = counts.prompt, counts.completion
        timeline.cached_tokens = counts.cached
        if not timeline.is_whole:
            rebuild(job, timeline)
        for branch in job.branches:
            if (answer := branch.trace.record) is None:
                continue
            answer.osl_tokens, answer.generated = branch.answer.completion_tokens, None
            if answer.last_token is None:  # it broke off
                answer.last_token = branch.timing.last_token
    return timelines.end(timeline, outcome)


def count_tokens(
    counters: metrics.EndpointMetrics, job: Job, counts: TokenCounts, gen_ai: GenAiMetrics | None = None
) -> tuple[float | None, float]:
    """Count what a job has used. Return its TTFT, and the longest mean gap of its answers."""
    longest_s = 0.0
    for prompt in job.prompts:
        counters.input_tokens.observe(prompt.num_tokens)
    if counts.cached:
        counters.cached_tokens.inc(counts.cached)
    if (ttft_s := job.timing.ttft_s) is not None:
        counters.ttft.observe(ttft_s)
    for branch in job.branches:
        osl_tokens = branch.answer.completion_tokens
        counters.output_tokens.observe(osl_tokens)
        if branch.trace.migrations:
            counters.migrations.inc(branch.trace.migrations)
        if (itl_s := branch.timing.itl_s(osl_tokens)) is not None:
            counters.itl.observe(itl_s)
            longest_s = max(longest_s, itl_s)
    if gen_ai is not None:
        gen_ai.answered(counters.endpoint, counters.model, (counts.prompt, counts.completion), ttft_s, longest_s)
    return ttft_s, longest_s


async def reserve(visit: Visit, job: Job) -> None:
    """Take the tokens that a job may use. Raise RateLimitedError, TooLargeForKeyError."""
    named = job.parsed.max_tokens is not None
    most = sum([branch.request.stop.max_tokens for branch in job.branches]) if named else None
    await visit.reserve(sum([prompt.num_tokens for prompt in job.prompts]), most, len(job.branches))


def settle(caller: ApiCaller | None, visit: Visit | None, job: Job, counts: TokenCounts) -> None:
    """Count the tokens that a job has used."""
    if caller is not None:
        caller.usage.add(counts.prompt, counts.completion)
    if visit is not None:
        visit.end(counts.total, [branch.answer.completion_tokens for branch in job.branches])


ParsedT = TypeVar("ParsedT", bound=ParsedBody)


def with_hints(request: Request, parsed: ParsedT, *, is_steered: bool = False) -> ParsedT:
    """Add what the headers ask for. The tenant of an API key is not theirs to say, and shares no cache with others.
    A priority is cut to the ceiling of the key.

    Raise InvalidRequestError.
    """
    hints = with_headers(parsed.hints, request.headers, is_steered=is_steered)
    if request.header(TIMEOUT_HEADER) is not None:
        hints = msgspec.structs.replace(hints, has_deadline=True)
    caller = caller_of(request)
    if caller is not None:
        tenant, priority = caller.tenant or hints.tenant, caller.priority(hints.priority)
        if (tenant, priority) != (hints.tenant, hints.priority):
            hints = msgspec.structs.replace(hints, tenant=tenant, priority=priority)
    if (salt := salt_for(request, parsed.cache_salt)) != parsed.cache_salt:
        return msgspec.structs.replace(parsed, hints=hints, cache_salt=salt)
    return parsed if hints is parsed.hints else msgspec.structs.replace(parsed, hints=hints)


def salted(request: Request, parsed: ParsedT) -> ParsedT:
    """Return the request with the salt of its caller: what a tokenizer has seen shows in its time."""
    return msgspec.structs.replace(parsed, cache_salt=salt_for(request, parsed.cache_salt))


def timeout_s(request: Request, limits: TimeLimits) -> float:
    """Raises InvalidRequestError."""
    text = request.header(TIMEOUT_HEADER)
    if text is None:
        return limits.default_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= limits.max_s:  # false for nan
        raise InvalidRequestError(
            f"the header {TIMEOUT_HEADER} is {text[:40]!r}",
            hint=f"send seconds above 0 and up to {limits.max_s:g}",
            param=TIMEOUT_HEADER,
        )
    return seconds


def request_id_headers(shown_id: str) -> dict[str, str]:
    """Under OpenAI's and under Anthropic's name."""
    return {REQUEST_ID_HEADER: shown_id, "request-id": shown_id}


def new_id(prefix: str, theirs: str | None) -> RequestId:
    """Unique here; ends with the client's own id where there is one, so that logs can be joined."""
    own = new_request_id(prefix)
    return own if theirs is None else RequestId(f"{own}-{theirs}")
