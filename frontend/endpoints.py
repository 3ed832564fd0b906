"""The completion endpoints: run one request and send its answer, whole or as a stream."""

import asyncio
import logging
import math
import re
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from frontend import metrics
from frontend.admission import Admission
from frontend.answer import PlacedLogprob
from frontend.chunks import DONE, ChunkWriter, logprobs_of, whole_body
from frontend.errors import error_event, outcome
from frontend.generator import Generator
from frontend.hints import with_headers
from frontend.models import ModelRegistry
from frontend.parameters import Call, Endpoint, parse_either
from frontend.pipeline import Job, Timing, parts, placement_headers, prepare, trace_report
from mesh.http import error_reply, json_reply, read_body
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
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx must not collect chunks
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

    async def answer(
        self, request: web.Request, endpoint: Endpoint, parse: Callable[[bytes], Call]
    ) -> web.StreamResponse:
        """Answer one request and count how it ended. Failures are answers too; only cancellation is raised."""
        exchange = Exchange(self, request, endpoint)
        try:
            with self.admission.enter():
                return await exchange.run(parse)
        except MeshError as error:
            return exchange.refuse(error)
        finally:
            exchange.count()

    async def preview(self, request: web.Request) -> web.Response:
        """Say where a request would run. Raises MeshError."""
        deadline = asyncio.get_running_loop().time() + timeout_s(request, self.limits)
        with self.admission.enter():
            async with self.admission.until(deadline):
                call = await read_call(request, parse_either)
                model = await self.models.get(call.model)
                job = await prepare(call, model, new_id(request, call.endpoint))
                placed = await self.generator.preview(job.request, call.hints, deadline)
        route = RouteRequest(request_id=job.request.request_id, model=model.name, isl_tokens=job.prompt_tokens)
        return json_reply(place_reply(route, placed, model.block_size, None))


class Exchange:
    """One request and its reply."""

    def __init__(self, service: CompletionService, request: web.Request, endpoint: Endpoint) -> None:
        self._service = service
        self._request = request
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._timing = Timing(self._loop.time())
        self._request_id = new_id(request, endpoint)
        self._headers = {REQUEST_ID_HEADER: client_request_id(request) or self._request_id}
        self._job: Job | None = None
        self._stream: web.StreamResponse | None = None  # once its headers are on their way
        self.outcome = "client_gone"  # what remains if the handler is cancelled or the connection breaks

    async def run(self, parse: Callable[[bytes], Call]) -> web.StreamResponse:
        try:
            deadline = self._timing.started + timeout_s(self._request, self._service.limits)
            async with self._service.admission.until(deadline):
                self._job = job = await self._prepare(parse)
                response = await (self._send_stream if job.call.stream else self._send_whole)(job, deadline)
            self.outcome = "ok"
            return response
        except MeshError as error:
            return await self._fail(error)
        except Exception as error:  # a bug met by one request must not end as something like an answer
            if isinstance(error, ConnectionError) and client_has_left(self._request):
                return self._stream or web.Response(status=499)  # nobody is left to read it
            log.exception("request %s failed", self._request_id)
            return await self._fail(MeshError("the frontend failed", hint="see its log"))

    async def _prepare(self, parse: Callable[[bytes], Call]) -> Job:
        call = await read_call(self._request, parse)
        model = await self._service.models.get(call.model)
        return await prepare(call, model, self._request_id)

    async def _send_whole(self, job: Job, deadline: float) -> web.StreamResponse:
        texts: list[str] = []
        placed: list[PlacedLogprob] = []
        async with aclosing(parts(job, self._service.generator, deadline)) as answer:
            async for part in answer:
                self._timing.on_tokens(self._loop.time())
                texts.append(part.text)
                placed.extend(part.logprobs)
        body = whole_body(
            self._endpoint,
            job.heading,
            "".join(texts),
            self._logprobs(job, placed),
            finish_reason(job),
            job.usage(),
            trace_report(job, self._timing),
        )
        return web.Response(body=body, content_type="application/json", headers=self._placement(job))

    def _placement(self, job: Job) -> dict[str, str]:
        """The reply's headers; with where it ran, if the caller wants to know."""
        return self._headers | (placement_headers(job.trace) if job.call.hints.explain else {})

    def _logprobs(self, job: Job, placed: list[PlacedLogprob]) -> Any:
        if job.call.sampling.top_logprobs is None:
            return None
        return logprobs_of(self._endpoint, job.model.tokenizer, placed)

    async def _send_stream(self, job: Job, deadline: float) -> web.StreamResponse:
        """Headers go out with the first token, so that a failure before it gets a status of its own."""
        chunks = ChunkWriter(self._endpoint, job.heading, job.model.tokenizer, include_usage=job.call.include_usage)
        stream: web.StreamResponse | None = None
        chunk = b""
        async with aclosing(parts(job, self._service.generator, deadline)) as answer:
            async for part in answer:
                self._timing.on_tokens(self._loop.time())
                chunk = chunks.part(part)
                if stream is None:
                    stream = await self._open_stream(job)
                    chunk = chunks.opening() + chunk
                if chunk and job.answer.finish_reason is None:
                    await stream.write(chunk)
        assert stream is not None, "an answer has at least one part"
        await stream.write(chunk + self._end_of_stream(job, chunks))  # the last part goes out with the end
        await stream.write_eof()
        return stream

    async def _open_stream(self, job: Job) -> web.StreamResponse:
        self._stream = stream = web.StreamResponse(headers=_SSE_HEADERS | self._placement(job))
        await stream.prepare(self._request)
        return stream

    def _end_of_stream(self, job: Job, chunks: ChunkWriter) -> bytes:
        trace = trace_report(job, self._timing)
        if not job.call.include_usage:
            return chunks.finish(finish_reason(job), trace) + DONE
        return chunks.finish(finish_reason(job), None) + chunks.usage(job.usage(), trace) + DONE

    def refuse(self, error: MeshError) -> web.Response:
        """A reply for a failure before the headers."""
        self.outcome = outcome(error)
        return error_reply(error, self._headers)

    async def _fail(self, error: MeshError) -> web.StreamResponse:
        """After the headers a failure can only be the stream's last event."""
        if self._stream is None:
            return self.refuse(error)
        self.outcome = outcome(error)
        log.warning("request %s broke off: %s", self._request_id, error)
        try:
            async with asyncio.timeout(ERROR_WRITE_S):
                await self._stream.write(error_event(error))
                await self._stream.write_eof()
        except TimeoutError:  # it does not read: nothing but the end of the connection can tell it
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._stream

    def count(self) -> None:
        """Tell the metrics how it ended."""
        endpoint = self._endpoint
        metrics.REQUESTS.labels(endpoint, self.outcome).inc()
        metrics.DURATION.labels(endpoint).observe(self._loop.time() - self._timing.started)
        if (job := self._job) is None:
            return
        output_tokens = job.answer.completion_tokens
        metrics.INPUT_TOKENS.labels(endpoint).observe(job.prompt_tokens)
        metrics.OUTPUT_TOKENS.labels(endpoint).observe(output_tokens)
        metrics.CACHED_TOKENS.labels(endpoint).inc(job.trace.cached_tokens)
        metrics.MIGRATIONS.labels(endpoint).inc(job.trace.migrations)
        if (ttft_s := self._timing.ttft_s) is not None:
            metrics.TTFT.labels(endpoint).observe(ttft_s)
        if (itl_s := self._timing.itl_s(output_tokens)) is not None:
            metrics.ITL.labels(endpoint).observe(itl_s)


async def read_call(request: web.Request, parse: Callable[[bytes], Call]) -> Call:
    """What body and headers ask for. Raises InvalidRequestError."""
    call = parse(await read_body(request))
    return replace(call, hints=with_headers(call.hints, request.headers.items()))


def timeout_s(request: web.Request, limits: TimeLimits) -> float:
    """Raises InvalidRequestError."""
    text = request.headers.get(TIMEOUT_HEADER)
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


def client_has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def client_request_id(request: web.Request) -> str | None:
    """The client's own id, if it is sane enough for logs and headers."""
    text = request.headers.get(REQUEST_ID_HEADER, "")
    return text if _SANE_ID.fullmatch(text) else None


def new_id(request: web.Request, endpoint: Endpoint) -> RequestId:
    """Unique here; ends with the client's own id where there is one, so that logs can be joined."""
    own = new_request_id("chatcmpl" if endpoint is Endpoint.CHAT else "cmpl")
    theirs = client_request_id(request)
    return own if theirs is None else RequestId(f"{own}-{theirs}")


def finish_reason(job: Job) -> str:
    assert job.answer.finish_reason is not None, "the answer is over"
    return job.answer.finish_reason.value
