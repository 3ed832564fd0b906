"""POST /v1/responses: answer at once, store the answer, or run it in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from kvmesh.frontend import metrics
from kvmesh.frontend.answer import Part
from kvmesh.frontend.callers import ApiCaller, Visit, caller_of
from kvmesh.frontend.endpoint import (
    SSE_HEADERS,
    TIMEOUT_HEADER,
    Endpoint,
    Exchange,
    Services,
    answer,
    as_failure,
    count_tokens,
    end_record,
    has_migrated,
    settle,
    timeout_s,
)
from kvmesh.frontend.errors import outcome
from kvmesh.frontend.job import Branch, Job
from kvmesh.frontend.operation import ASKED_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.outlet import SseOutlet, WholeOutlet
from kvmesh.frontend.responses import parse
from kvmesh.frontend.responses.background import BackgroundRun, EventLog
from kvmesh.frontend.responses.dialect import (
    BackgroundWriter,
    ResponsesDialect,
    ResponsesWriter,
    cancelled,
    failed,
    in_progress,
    parsed_of,
    queued,
    whole_response,
)
from kvmesh.frontend.responses.records import kept_items
from kvmesh.frontend.responses.shapes import (
    AllowedTools,
    ContentPart,
    Event,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    FunctionToolChoice,
    ItemReference,
    MessageItem,
    NamespaceTool,
    ReasoningConfig,
    ReasoningItem,
    Response,
    ResponsesRequest,
)
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.frontend.responses.store import StoredResponse
from kvmesh.frontend.running import run as run_job
from kvmesh.frontend.shapes import encode
from kvmesh.frontend.timeline import RequestTimeline
from kvmesh.mesh.http.request import Reply, ReplyStream, Request
from kvmesh.protocol.errors import MeshError

log = logging.getLogger(__name__)

_STATELESS = ResponsesDialect()


def respond(services: Services, request: Request) -> Awaitable[Reply | ReplyStream]:
    """Answer one request. Failures are answers too; only cancellation is raised."""
    if (kept := services.parts.find(KeptResponses)) is None:
        return answer(_STATELESS, services, request)
    return answer_and_store(services, request, kept)


async def answer_and_store(services: Services, request: Request, kept: KeptResponses) -> Reply | ReplyStream:
    dialect = ResponsesDialect(await kept.storage_for(request))
    reply = await answer(dialect, services, request, StoringExchange)
    if isinstance(reply, Reply) and dialect.started is not None and dialect.started.log is not None:
        return await send_events(request, dialect.started.log, reply.headers)
    return reply


async def send_events(request: Request, log: EventLog, headers: Mapping[str, str], after: int = -1) -> ReplyStream:
    """Send the events of a background response that come after number `after`, until it ends."""
    reply = request.open_stream({**SSE_HEADERS, **headers})
    async for events in log.follow(after):
        reply.write(events)
        if reply.is_full:
            await reply.until_writable()
    reply.end()
    return reply


class StoringExchange(Exchange):
    """Answers one request where responses are stored. What a client was told is stored already."""

    __slots__ = ()

    async def _send_whole(self, job: Job, deadline: float) -> Reply:
        settings = parsed_of(job).settings
        if settings.background:
            return await self._start(job)
        if not settings.store:
            return await super()._send_whole(job, deadline)
        answers = WholeOutlet(job)
        await run_job(job, self._services.generator, answers, deadline)
        response = whole_response(job, answers.finished(), job.counts())
        record = self._record(job, response)
        await self._kept.keep(record)
        return Reply(record.response, headers=self._reply_headers(job))

    async def _send_stream(self, job: Job, deadline: float) -> Reply | ReplyStream:
        settings = parsed_of(job).settings
        if settings.background:
            return await self._start(job)
        if not settings.store:
            return await super()._send_stream(job, deadline)
        writer = ResponsesWriter(job)
        self._stream = outlet = SseOutlet(self._request, job, writer, {**SSE_HEADERS, **self._headers})
        await run_job(job, self._services.generator, outlet, deadline)
        await self._kept.keep(self._record(job, writer.response(job.counts())))
        return outlet.end()

    @property
    def _kept(self) -> KeptResponses:
        kept = self._services.parts.find(KeptResponses)
        assert kept is not None, "responses are stored"
        return kept

    def _record(self, job: Job, response: Response) -> StoredResponse:
        return record_of(job, self._kept.owner(self._request), response)

    async def _start(self, job: Job) -> Reply:
        """Run the job in the background. Raise OverloadedError, StorageError."""
        run = BackgroundRun(self._record(job, queued(job)), is_stream=job.parsed.stream)
        runs = self._kept.runs
        runs.add(run)
        try:
            await self._kept.store.put(run.record)
        except BaseException:
            runs.remove(run)
            raise
        first = run.record.response
        visit, caller = self._visit, caller_of(self._request)
        ended = partial(end_background, self._services, caller, visit, self._timeline)
        background = BackgroundJob(self._services, self._kept, run, job, ended)
        self._timeline = None  # as its tokens
        runs.start(run, background.carry_out(self._timeout_s()))
        self._job = self._visit = None  # its tokens are counted when it ends
        assert isinstance(self._dialect, ResponsesDialect)
        self._dialect.started = run
        return Reply(first, headers=self._headers)

    def _timeout_s(self) -> float:
        """Return the timeout of a background response. Nobody waits for it, so it is the longest unless asked for."""
        limits = self._services.limits
        asked_s = timeout_s(self._request, limits)
        return limits.max_s if self._request.header(TIMEOUT_HEADER) is None else asked_s


def end_background(
    services: Services,
    caller: ApiCaller | None,
    visit: Visit | None,
    timeline: RequestTimeline | None,
    job: Job,
    result: str,
) -> None:
    """Count what a background response has used, and complete its record."""
    settle(caller, visit, job, job.counts())
    if timeline is not None:
        timeline.has_migrated = has_migrated(job)
        if services.slo.missed(result, None, 0.0) == "failed":
            timeline.slo_missed = "failed"
        end_record(services.timelines, timeline, job, result)


def record_of(job: Job, owner: str, response: Response) -> StoredResponse:
    parsed = parsed_of(job)
    return StoredResponse(
        id=response.id,
        owner=owner,
        status=response.status,
        response=encode(response),
        input=encode(kept_items(parsed.items, response.id)),
        previous=parsed.settings.previous_response_id,
        is_background=parsed.settings.background,
        is_stream=job.parsed.stream,
    )


class BackgroundJob:
    """Carries out one job without a client. Implements kvmesh.frontend.outlet.Outlet."""

    has_lanes = False
    is_full = False

    def __init__(
        self,
        services: Services,
        kept: KeptResponses,
        run: BackgroundRun,
        job: Job,
        on_end: Callable[[Job, str], None],
    ) -> None:
        """`on_end` is told how the job has ended."""
        self._on_end = on_end
        self._outcome = "client_gone"  # what remains if it is cancelled
        self._services = services
        self._kept = kept
        self._run = run
        self._job = job
        self._writer = BackgroundWriter(job)
        self._saving: asyncio.Task[None] | None = None  # of the news that it is in progress

    async def carry_out(self, limit_s: float) -> None:
        """Run to the end, and store how it ended."""
        self._tell(self._writer.opening())
        try:
            with self._services.admission.enter():
                await self._end(*await self._result(asyncio.get_running_loop().time() + limit_s))
        except MeshError as error:  # it came too late to begin
            await self._end(*self._failure(error))
        finally:
            self._on_end(self._job, self._outcome)
        counters = metrics.of_endpoint(ResponsesDialect.name, self._job.model.base)
        count_tokens(counters, self._job, self._job.counts(), self._services.gen_ai)

    async def _result(self, deadline: float) -> tuple[Response, bytes]:
        """Return the response as it ended, and the events that say so."""
        job = self._job
        try:
            with self._services.admission.until(deadline):
                await run_job(job, self._services.generator, self, deadline)
        except asyncio.CancelledError:
            if not self._run.is_cancelled:
                raise
            return cancelled(job, self._writer.so_far()), b""
        except Exception as error:
            return self._failure(as_failure(error, job.heading.id))
        self._outcome = "ok"
        return self._writer.response(job.counts()), self._writer.end(job.counts())

    def _failure(self, error: MeshError) -> tuple[Response, bytes]:
        log.warning("background response %s failed: %s", self._job.heading.id, error)
        self._outcome = outcome(error)
        events = self._writer.error(error, self._job.heading.id)
        return failed(self._job, self._writer.so_far(), error), events

    async def _end(self, response: Response, events: bytes) -> None:
        """Store how it ended, and only then tell: whoever knows of the end finds the response stored."""
        self._run.is_ending = True
        if self._saving is not None:
            await self._saving
        record = self._run.with_response(response.status, encode(response), events)
        await self._kept.keep(record, is_update=True)
        self._run.record = record
        self._tell(events)

    def _tell(self, events: bytes) -> None:
        if self._run.log is not None:
            self._run.log.append(events)

    # --- kvmesh.frontend.outlet.Outlet -------------------------------------------------------------------------

    def put(self, branch: Branch, part: Part) -> bool:
        if self._saving is None:
            self._begin()
        self._tell(self._writer.part(branch.index, part))
        if (reason := branch.answer.finish_reason) is not None:
            self._tell(self._writer.finish(branch.index, reason))
        return True

    def _begin(self) -> None:
        response = in_progress(self._job)
        self._run.record = self._run.with_response(response.status, encode(response))
        self._tell(self._writer.begun())
        saving = self._kept.keep(self._run.record, is_update=True)
        self._saving = asyncio.create_task(saving, name=f"store {response.id}")

    def lane(self, branch: Branch, now: Callable[[], float]) -> None:
        return None

    async def until_ready(self) -> None:
        return


_ASKING = "Tell me a story."
_NOTES = ShapeNotes(
    partly=(
        (ResponsesRequest, parse.DEFAULTS),
        (ReasoningConfig, parse.REASONING_DEFAULTS),
        (FunctionTool, parse.TOOL_DEFAULTS),
        (ContentPart, parse.PART_DEFAULTS),
    ),
    read_later={
        (ResponsesRequest, "input"): (
            MessageItem,
            FunctionCallItem,
            FunctionOutputItem,
            ReasoningItem,
            ItemReference,
        ),
        (ResponsesRequest, "tools"): (FunctionTool, NamespaceTool),
        (ResponsesRequest, "tool_choice"): (FunctionToolChoice, AllowedTools),
    },
    needed=((ContentPart, "text"),),
    token_id_keys=((ResponsesRequest, "logit_bias"),),
    examples={(ResponsesRequest, "input"): _ASKING, (ContentPart, "text"): _ASKING},
)
ENDPOINT = Endpoint(
    method="POST",
    path="/v1/responses",
    handler=respond,
    dialect=_STATELESS,
    operation=Operation(
        summary="Answer, in the shape of OpenAI's Responses API",
        request=(ResponsesRequest,),
        reply=Response,
        events=(Event,),
        failures=ASKED_FAILURES,
        is_asked=True,
        takes_hints=True,
        notes=_NOTES,
    ),
)
