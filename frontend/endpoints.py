"""The endpoints that generate: run one request and send its answers, whole or as a stream."""

import asyncio
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from frontend import metrics
from frontend.admission import Admission
from frontend.answer import Part
from frontend.call import Call, Dialect, Endpoint, StreamWriter, TokenCounts
from frontend.embeddings import embed, parse_embeddings
from frontend.errors import outcome
from frontend.generator import Generator
from frontend.hints import with_headers
from frontend.lane import TokenLane
from frontend.models import ModelRegistry
from frontend.parameters import parse_either
from frontend.pipeline import Branch, Job, placement_headers, prepare, run
from frontend.whole import Whole
from mesh.http.connection import refusal
from mesh.http.request import Reply, ReplyStream, Request, json_reply
from mesh.http.server import Handler
from protocol.errors import InvalidRequestError, MeshError
from protocol.ids import RequestId, new_request_id
from protocol.messages import RouteRequest
from router.api import place_reply

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout-s"
REQUEST_ID_HEADER = "x-request-id"
ERROR_WRITE_S = 1.0  # for telling a client that may not read any more that its request failed
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SSE_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx must not collect chunks
}


@dataclass(frozen=True, slots=True)
class TimeLimits:
    default_s: float  # where the client names none
    max_s: float


@dataclass(frozen=True, slots=True)
class CompletionService:
    """What answering takes. One per application."""

    models: ModelRegistry
    generator: Generator
    admission: Admission
    limits: TimeLimits

    async def answer(self, request: Request, dialect: Dialect) -> Reply | ReplyStream:
        """Answer one request and count how it ended. Failures are answers too; only cancellation is raised."""
        exchange = Exchange(self, request, dialect)
        try:
            with self.admission.enter():
                return await exchange.run()
        except MeshError as error:
            return exchange.refuse(error)
        finally:
            exchange.count()

    async def embed(self, request: Request) -> Reply:
        """Answer one request for vectors, and count how it ended. Failures are answers too."""
        started = asyncio.get_running_loop().time()
        theirs = client_request_id(request)
        request_id = new_id("embd", theirs)
        headers = request_id_headers(theirs or request_id)
        result = "client_gone"
        try:
            deadline = started + timeout_s(request, self.limits)
            with self.admission.enter(), self.admission.until(deadline):
                asked = parse_embeddings(request.body)
                asked = msgspec.structs.replace(asked, call=with_hints(request, asked.call))
                model = await self.models.get(asked.call.model)
                reply = await embed(asked, model, self.generator, request_id, deadline)
            result = "ok"
            return json_reply(reply, headers=headers)
        except Exception as error:
            failure = as_failure(error, request_id)
            result = outcome(failure)
            return refusal(failure, None, headers)
        finally:
            counters = metrics.of_endpoint(Endpoint.EMBEDDINGS)
            counters.requests(result).inc()
            counters.duration.observe(asyncio.get_running_loop().time() - started)

    async def preview(self, request: Request) -> Reply:
        """Say where a request would run. Raises MeshError."""
        deadline = asyncio.get_running_loop().time() + timeout_s(request, self.limits)
        with self.admission.enter(), self.admission.until(deadline):
            call = with_hints(request, parse_either(request.body))
            model = await self.models.get(call.model)
            request_id = new_id("route", client_request_id(request))
            job = await prepare(call, model, request_id, deadline)
            asked = job.branches[0].request
            placed = await self.generator.preview(asked, call.hints, deadline)
        route = RouteRequest(
            request_id=asked.request_id, model=model.name, isl_tokens=job.prompts[0].num_tokens, lora=model.lora
        )
        return json_reply(place_reply(route, placed, model.block_size, None))


class Exchange:
    """One request and its reply."""

    __slots__ = (
        "_dialect",
        "_headers",
        "_job",
        "_loop",
        "_request",
        "_request_id",
        "_service",
        "_shown_id",
        "_started",
        "_stream",
        "outcome",
    )

    def __init__(self, service: CompletionService, request: Request, dialect: Dialect) -> None:
        self._service = service
        self._request = request
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        theirs = client_request_id(request)
        self._request_id = new_id(dialect.id_prefix, theirs)
        self._shown_id = theirs or self._request_id
        self._headers = request_id_headers(self._shown_id)
        self._job: Job | None = None
        self._stream: SseOutlet | None = None
        self.outcome = "client_gone"  # what remains if the handler is cancelled

    async def run(self) -> Reply | ReplyStream:
        try:
            deadline = self._started + timeout_s(self._request, self._service.limits)
            with self._service.admission.until(deadline, self._loop):
                call = with_hints(self._request, self._dialect.parse(self._request.body))
                model = await self._service.models.get(call.model)
                self._job = job = await prepare(call, model, self._request_id, self._started)
                reply = await (self._send_stream if call.stream else self._send_whole)(job, deadline)
            self.outcome = "ok"
            return reply
        except Exception as error:
            return await self._fail(as_failure(error, self._request_id))

    async def _send_whole(self, job: Job, deadline: float) -> Reply:
        answers = WholeOutlet(job)
        await run(job, self._service.generator, answers, deadline)
        body = self._dialect.whole(job, answers.finished(), job.counts())
        return Reply(body, headers=self._reply_headers(job))

    async def _send_stream(self, job: Job, deadline: float) -> ReplyStream:
        """Headers go out with the first token, so that a failure before it gets a status of its own."""
        headers = _SSE_HEADERS | self._headers
        self._stream = outlet = SseOutlet(self._request, job, self._dialect.writer(job), headers)
        await run(job, self._service.generator, outlet, deadline)
        return outlet.end()

    def _reply_headers(self, job: Job) -> dict[str, str]:
        """With where it ran, if the caller wants to know."""
        return self._headers | (placement_headers(job.branches[0].trace) if job.call.hints.explain else {})

    def refuse(self, error: MeshError) -> Reply:
        """A reply for a failure before the headers."""
        self.outcome = outcome(error)
        return refusal(error, self._dialect.error_body(error, self._shown_id), self._headers)

    async def _fail(self, error: MeshError) -> Reply | ReplyStream:
        """After the headers a failure can only be the stream's last event."""
        if self._stream is None or self._stream.reply is None:
            return self.refuse(error)
        self.outcome = outcome(error)
        log.warning("request %s broke off: %s", self._request_id, error)
        return await self._stream.break_off(error, self._shown_id)

    def count(self) -> None:
        """Tell the metrics how it ended."""
        counters = metrics.of_endpoint(self._dialect.endpoint)
        counters.requests(self.outcome).inc()
        counters.duration.observe(self._loop.time() - self._started)
        if self._job is not None:
            counts = self._job.counts()
            count_tokens(counters, self._job, counts)
            self._request.log_fields = {
                "model": self._job.call.model,
                "isl_tokens": counts.prompt,
                "osl_tokens": counts.completion,
                "cached_tokens": counts.cached,
            }


class WholeOutlet:
    """Keeps all parts until their answers are complete."""

    is_full = False
    has_lanes = False

    __slots__ = ("_answers", "_job")

    def __init__(self, job: Job) -> None:
        self._job = job
        self._answers = [Whole(branch.index) for branch in job.branches]

    def put(self, branch: Branch, part: Part) -> bool:
        self._answers[branch.index].add(part)
        return True

    def lane(self, branch: Branch, now: Callable[[], float]) -> None:
        return None

    async def until_ready(self) -> None:
        return

    def finished(self) -> list[Whole]:
        for branch, answer in zip(self._job.branches, self._answers, strict=True):
            assert branch.answer.finish_reason is not None, "the answer is over"
            answer.finish_reason = branch.answer.finish_reason
        return self._answers


class SseOutlet:
    """Writes parts to the client in the call that brings them. The last of several waits, to go out with the end."""

    has_lanes = True

    __slots__ = ("_headers", "_job", "_request", "_rest", "_unfinished", "_writer", "reply")

    def __init__(self, request: Request, job: Job, writer: StreamWriter, headers: dict[str, str]) -> None:
        self._request = request
        self._job = job
        self._writer = writer
        self._headers = headers
        self._unfinished = len(job.branches)
        self._rest = b""  # the end of the last answer
        self.reply: ReplyStream | None = None  # once its headers are on their way

    def put(self, branch: Branch, part: Part) -> bool:
        chunk = self._writer.part(branch.index, part)
        if (reason := branch.answer.finish_reason) is not None:
            chunk += self._writer.finish(branch.index, reason)
            self._unfinished -= 1
        reply = self.reply
        if reply is None:  # nobody waits for the first token longer than it takes, even where it is the last
            reply = self._open()
            reply.write(self._writer.opening() + chunk)
        elif not self._unfinished:
            self._rest = chunk
        elif chunk:
            reply.write(chunk)
        return not reply.is_full

    def lane(self, branch: Branch, now: Callable[[], float]) -> TokenLane | None:
        if self.reply is None or (frame := self._writer.frame(branch.index)) is None:
            return None
        return TokenLane(now, self.reply.write, *frame)

    def _open(self) -> ReplyStream:
        explained = placement_headers(self._job.branches[0].trace) if self._job.call.hints.explain else {}
        self.reply = self._request.open_stream(self._headers | explained)
        return self.reply

    @property
    def is_full(self) -> bool:
        return self.reply is not None and self.reply.is_full

    async def until_ready(self) -> None:
        if self.reply is not None:
            await self.reply.until_writable()

    def end(self) -> ReplyStream:
        assert self.reply is not None, "an answer has at least one part"
        self.reply.end(self._rest + self._writer.end(self._job.counts()))
        return self.reply

    async def break_off(self, error: MeshError, request_id: str) -> ReplyStream:
        assert self.reply is not None
        self.reply.end(self._writer.error(error, request_id))
        try:
            async with asyncio.timeout(ERROR_WRITE_S):
                await self.reply.until_writable()
        except TimeoutError:  # it does not read: nothing but the end of the connection can tell it
            self.reply.abort()
        return self.reply


def identified(handler: Handler, prefix: str, error_body: Callable[[MeshError, str], bytes] | None = None) -> Handler:
    """For endpoints that run nothing: every reply tells the request's id, and failures are replies too."""

    async def answer(request: Request) -> Reply | ReplyStream:
        shown_id = client_request_id(request) or new_request_id(prefix)
        try:
            reply = await handler(request)
        except Exception as error:
            failure = as_failure(error, shown_id)
            reply = refusal(failure, error_body(failure, shown_id) if error_body is not None else None)
        reply.headers = request_id_headers(shown_id) | dict(reply.headers)
        return reply

    return answer


def as_failure(error: Exception, request_id: str) -> MeshError:
    """What the client is told. A bug met by one request must not end as something like an answer."""
    if isinstance(error, MeshError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return MeshError("the frontend failed", hint="see its log")


def count_tokens(counters: metrics.EndpointMetrics, job: Job, counts: TokenCounts) -> None:
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


def with_hints(request: Request, call: Call) -> Call:
    """With what the headers ask for; the tenant of an API key is not theirs to say, and shares no cache with others.

    Raises InvalidRequestError.
    """
    hints = with_headers(call.hints, request.headers)
    if tenant := request.tenant:
        own = f"{tenant} {call.cache_salt or ''}"  # no tenant's name has a space: none can take another's
        return msgspec.structs.replace(call, hints=msgspec.structs.replace(hints, tenant=tenant), cache_salt=own)
    return call if hints is call.hints else msgspec.structs.replace(call, hints=hints)


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


def client_request_id(request: Request) -> str | None:
    """The client's own id, if it is sane enough for logs and headers."""
    text = request.header(REQUEST_ID_HEADER)
    return text if text is not None and _SANE_ID.fullmatch(text) else None


def new_id(prefix: str, theirs: str | None) -> RequestId:
    """Unique here; ends with the client's own id where there is one, so that logs can be joined."""
    own = new_request_id(prefix)
    return own if theirs is None else RequestId(f"{own}-{theirs}")
