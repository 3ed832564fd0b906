"""Carry one request through the mesh: place it, prefill, hand the KV over, decode; continue elsewhere on a failure.

A stream that loses its worker migrates: the tokens so far become part of the prompt for the next worker. A draw
depends only on the seed and the token's number, so the answer continues with the same tokens.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from kvmesh.frontend.generator import DeltaConsumer, Hints, PlacingNotes, Trace
from kvmesh.frontend.lane import TokenLane
from kvmesh.frontend.metrics import SUSPECTS
from kvmesh.frontend.presence import NEVER, FailedWorker, NobodyReturns, Presence, is_silent
from kvmesh.frontend.rebuilt import note_failed, times_in
from kvmesh.frontend.route_requests import route_request, sequence_hashes_of
from kvmesh.frontend.suspects import MAX_ENDED, Condemned, Trial, Trials, fingerprint, has_ended
from kvmesh.frontend.timeline import AnswerRecord, Attempt, LegRecord
from kvmesh.frontend.timeline import now as clock
from kvmesh.mesh.plane.client import PlaneClient, is_refused
from kvmesh.mesh.safeguards import is_off
from kvmesh.protocol.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    DrainingError,
    EngineError,
    IdentityError,
    MeshError,
    NoWorkerError,
    OtherWeightsError,
    OverloadedError,
    PeerLostError,
    StaleCardError,
    UnreachableError,
)
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.kv_content import UNKNOWN
from kvmesh.protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    Placed,
    ReleaseOffer,
    RouteRequest,
    Target,
    Ticket,
    TimedDelta,
    decode,
    pack_tokens,
)
from kvmesh.router.booking import Booking, Router

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_AVOIDS = not is_off("avoidance")
MAX_ATTEMPTS = 1 if is_off("migration") else 4
MAX_ENGINE_FAILURES = 2  # a request that breaks engines must not reach every worker
RETRY_S = 0.5  # between two looks for a worker while there is no news
LOST_AGAIN_S = 0.5  # between two tries of lost workers: with a prefill leg, each of them computes something
RELEASE_TIMEOUT_S = 5.0
PROGRESS_S = 2.0  # between reports on one answer to the router
PROGRESS_TURNS = 20  # the reports are spread over these turns: 10,000 at once would block the event loop for 50 ms
# No token of a server has more bytes than that, and no byte becomes more than one token.
MAX_RETOKENIZED = 256  # of ours for one of a server
SEE_HEALTH = "try again later; GET /health says why"
NOT_BEGUN = (UnreachableError, DrainingError, OverloadedError)  # the worker took no part: not an attempt
MAY_RETURN = (PeerLostError, StaleCardError)
ELSEWHERE = (PeerLostError, DrainingError, EngineError, CancelledByPeerError, OverloadedError)


class _LegFailedError(Exception):
    """Raised when a worker has failed its part; another worker may do it."""

    def __init__(self, target: Target, reason: MeshError, *, has_progressed: bool = False) -> None:
        super().__init__(str(reason))
        self.target = target
        self.worker_id = target.worker_id
        self.reason = reason
        self.has_progressed = has_progressed  # the worker has computed the prompt and given tokens


class Dispatcher:
    """Implements kvmesh.frontend.generator.Generator over the workers of the mesh."""

    def __init__(
        self,
        router: Router,
        plane: PlaneClient,
        block_size_of: Callable[[str], int],
        presence: Presence | None = None,
    ) -> None:
        """Take `presence`, which knows whether workers that failed come back; without it none does."""
        self._presence = presence or NobodyReturns()
        self._router = router
        self._plane = plane
        self._block_size_of = block_size_of
        self._releasing: set[asyncio.Task[None]] = set()
        self._reports = _Reports()
        self._trials = Trials()
        self._condemned = Condemned()
        self.wants_reasons: Callable[[], bool] | None = None  # somebody looks: should this placement be explained?
        self.on_failure: Callable[[str, str], object] = lambda worker, reason: None

    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float, consumer: DeltaConsumer
    ) -> None:
        """Implements kvmesh.frontend.generator.Generator."""
        task = _Generation(request, hints, trace, deadline, consumer, list(request.generated))
        if trace.record is not None:
            trace.record.generated = task.generated
        failures = task.failures = _Failures(request.model, hints.pin, task.generated, deadline, self._presence)
        try:
            await self._elsewhere(request, lambda failed: self._generate(task, failed), failures)
        finally:
            trace.migrations += len(failures.workers)

    async def preview(self, request: GenerateRequest, hints: Hints, deadline: float) -> Placed:
        """Implements kvmesh.frontend.generator.Generator."""
        route = await self._route(request, request.prompt, msgspec.structs.replace(hints, explain=True), ())
        return await self._router.preview(route, _left(deadline))

    def check(self, model: str, hints: Hints, max_tokens: int, deadline: float) -> None:
        """Implements kvmesh.frontend.generator.Generator."""
        route = route_request(RequestId(""), model, None, 1, b"", hints, max_tokens=max_tokens)
        self._router.check(route, _left(deadline))

    async def embed(
        self, request: EmbedRequest, hints: Hints, deadline: float, record: AnswerRecord | None = None
    ) -> Embedding:
        """Implements kvmesh.frontend.generator.Generator."""
        failures = _Failures(request.model, hints.pin, (), deadline, self._presence)
        if record is not None and record.is_sampled:
            hints = msgspec.structs.replace(hints, explain=True)
        return await self._elsewhere(
            request, lambda failed: self._embed(request, hints, deadline, failed, record), failures
        )

    async def _elsewhere(
        self,
        request: GenerateRequest | EmbedRequest,
        attempt: Callable[[Sequence[WorkerId]], Awaitable[ResultT]],
        failures: "_Failures",
    ) -> ResultT:
        """Make attempts until one succeeds; each is given the workers to leave out. Raise MeshError."""
        if len(self._condemned):
            self._check_not_condemned(request)
        while True:
            try:
                if not failures.ended:
                    return await attempt(failures.excluded)
                failures.trial = await self._trials.begin()
                return await attempt(failures.excluded)
            except _LegFailedError as failure:
                if failures.may_be_the_cause(failure) and await has_ended(self._plane, failure.target):
                    self._suspect(request, failures)
                self.on_failure(failure.target.name, str(failure.reason))
                failures.note(failure)
            except (NoWorkerError, OverloadedError) as refusal:  # of the router
                failures.end_trial()  # not to keep the others waiting
                failures.weigh(refusal)
                await self._presence.news(RETRY_S)
            finally:
                failures.end_trial()

    def _suspect(self, request: GenerateRequest | EmbedRequest, failures: "_Failures") -> None:
        """Count a process that ended under a request. A request that did it alone is remembered."""
        failures.ended += 1
        SUSPECTS.labels("tried" if failures.ended < MAX_ENDED else "stopped").inc()
        if failures.ended >= MAX_ENDED and failures.trial is not None and failures.trial.is_alone:
            self._condemned.add(fingerprint(request), asyncio.get_running_loop().time())

    def _check_not_condemned(self, request: GenerateRequest | EmbedRequest) -> None:
        """Raise EngineError if the same request has ended workers a short time ago."""
        left_s = self._condemned.left_s(fingerprint(request), asyncio.get_running_loop().time())
        if left_s:
            SUSPECTS.labels("refused").inc()
            raise EngineError(
                f"the same request has ended the processes of {MAX_ENDED} workers",
                hint="change the request; see the logs of the workers",
                retry_after_s=left_s,
            )

    async def _embed(
        self,
        request: EmbedRequest,
        hints: Hints,
        deadline: float,
        failed: Sequence[WorkerId],
        record: AnswerRecord | None,
    ) -> Embedding:
        route = await self._route(request, request.prompt, hints, failed)
        attempt = leg = None
        if record is not None:
            attempt = record.begin(route.isl_tokens, self._block_size_of(request.model), route.sequence_hashes)
        async with self._router.book(route, _left(deadline)) as booking:
            target = booking.placed.decode
            if attempt is not None and record is not None:
                attempt.on_placed(booking.placed)
                leg = attempt.begin_leg(target, record, is_prefill=False)
            request = msgspec.structs.replace(
                request, dp_rank=target.dp_rank, worker_id=target.worker_id, traceparent=_traceparent(request, leg)
            )
            try:
                left_s = _left(deadline)
                vector = await self._plane.ask(target.address, "embed", request, Embedding, left_s, hasty=True)
            except ELSEWHERE as error:
                if attempt is not None:
                    attempt.error = error.code
                raise _LegFailedError(target, error) from error
            finally:
                if attempt is not None and leg is not None:
                    leg.ended = attempt.ended = clock()
            booking.prefill_done()
            return vector

    async def close(self) -> None:
        """Wait for the releases that are on their way."""
        self._reports.close()
        if self._releasing:
            await asyncio.wait(self._releasing)

    async def _route(
        self,
        request: GenerateRequest | EmbedRequest,
        tokens: bytes,
        hints: Hints,
        failed: Sequence[WorkerId],
        content: str = UNKNOWN,
    ) -> RouteRequest:
        """Return what the router is asked; `tokens`: all that a worker has to compute before its first new token."""
        salt = request.request_id if _wants_prompt_logprobs(request) else request.cache_salt
        hashes = await sequence_hashes_of(tokens, self._block_size_of(request.model), request.lora, salt)
        most = generated = 0
        if isinstance(request, GenerateRequest):
            generated = len(request.generated)
            most = request.stop.max_tokens - generated
        return route_request(
            request.request_id, request.model, request.lora, len(tokens) // 4, hashes, hints, failed=failed,
            max_tokens=max(0, most), is_continued=bool(failed or generated), content=content,
        )  # fmt: skip

    async def _generate(self, task: "_Generation", failed: Sequence[WorkerId]) -> None:
        """Have one placement carried out. Raise _LegFailedError if a worker fails its part."""
        request = task.continued() if task.generated or failed else task.request
        tokens = request.prompt + pack_tokens(request.generated) if request.generated else request.prompt
        route = await self._route(request, tokens, _hints(task), failed, task.content if task.generated else UNKNOWN)
        if self.wants_reasons is not None and self.wants_reasons():
            route = msgspec.structs.replace(route, explain=True)
        now = asyncio.get_running_loop().time
        asked, trace = now(), task.trace
        block_size, attempt, notes = self._block_size_of(request.model), None, None
        if (record := trace.record) is not None:
            attempt = record.begin(route.isl_tokens, block_size, route.sequence_hashes)
        elif request.traceparent:  # its trace may be wanted after all
            notes = _notes(trace, route, block_size, asked)
        async with self._router.book(route, task.deadline - asked) as booking:
            placed, placed_at = booking.placed, now()
            trace.waited_s += placed_at - asked
            is_first = not request.generated
            if not task.generated:
                task.content = _content(placed)
            _note_placement(trace, placed, is_first, route.isl_tokens, block_size)
            if attempt is not None:
                attempt.placed, attempt.placed_at = placed, clock()
            elif notes is not None:
                notes.placed_at = placed_at
            leg = _Leg(task, booking, attempt, notes, is_first=is_first)
            self._reports.add(leg)
            try:
                if placed.prefill is not None:
                    ticket = await self._prefill(placed, request, task.deadline, leg)
                    if ticket is None or leg.is_done:
                        return
                    request = msgspec.structs.replace(task.continued(), ticket=ticket)
                    if notes is not None:
                        notes.handed_over = clock()
                elif placed.source is not None:
                    request = msgspec.structs.replace(request, source=placed.source)
                trace.decode_worker = placed.decode.name
                await self._decode(placed.decode, request, task.deadline - now(), leg)
            finally:
                self._reports.discard(leg)
                leg.report_end()
                if attempt is not None:
                    attempt.end()
                if leg.ticket is not None:
                    self._release(leg.ticket)

    async def _prefill(self, placed: Placed, request: GenerateRequest, deadline: float, leg: "_Leg") -> Ticket | None:
        """The first token, and the ticket for the prompt's KV unless the answer ends there.

        An engine whose halves meet while the prompt is computed gives the ticket at once, and no token.
        """
        target = placed.prefill
        assert target is not None
        record = leg.begin(target, is_prefill=True)
        body = msgspec.structs.replace(
            request,
            offer_kv=True,
            kv_for=placed.decode.name,
            source=placed.source,
            dp_rank=target.dp_rank,
            worker_id=target.worker_id,
            content=target.content,
            traceparent=_traceparent(request, record),
        )
        try:
            async with self._plane.open(target.address, "generate", body, _left(deadline), hasty=True) as stream:
                stream.on_unread = self._release_unread
                async for told in stream.messages(TimedDelta):
                    leg.ticket = told.ticket
                    if record is not None and record.first is None:
                        record.first = clock()
                    while told.logprobs and leg.is_full:
                        await leg.until_ready()
                    delta = leg.on_prompt(told)
                    if delta.ticket is not None or delta.finish_reason is not None:
                        leg.trace.prefill_worker = target.name
                        if leg.notes is not None:
                            leg.notes.prefilled = told
                        if not delta.token_ids and delta.finish_reason is None:
                            return delta.ticket  # it has only begun: the decode worker fetches what it computes
                        while leg.is_full:
                            await leg.until_ready()
                        leg.on_first(delta)
                        return delta.ticket
            raise PeerLostError(f"prefill worker {target.name} ended without a ticket")
        except ELSEWHERE as error:
            leg.note_failure(error)
            raise _LegFailedError(target, error) from error
        finally:
            if record is not None:
                record.ended = clock()

    async def _decode(self, target: Target, request: GenerateRequest, timeout_s: float, leg: "_Leg") -> None:
        leg.on_offer_taken = self._release
        record = leg.begin(target, is_prefill=False)
        request = msgspec.structs.replace(
            request,
            dp_rank=target.dp_rank,
            worker_id=target.worker_id,
            content=target.content,
            traceparent=_traceparent(request, record),
        )
        try:
            async with self._plane.open(target.address, "generate", request, timeout_s, hasty=True) as stream:
                await stream.feed(TimedDelta, leg)
            if not leg.is_done:
                raise PeerLostError(f"worker {target.name} ended without a finish reason")
        except ELSEWHERE as error:
            leg.note_failure(error)
            raise _LegFailedError(target, error, has_progressed=leg.is_steady) from error
        finally:
            if record is not None:
                record.ended = clock()

    def _release_unread(self, raw: msgspec.Raw) -> bool:
        """Release the offer of a ticket that arrives after its request was cancelled. Return False after the ticket."""
        try:
            ticket = decode(raw, TimedDelta).ticket
        except MeshError:
            return False
        if ticket is not None:
            self._release(ticket)
        return ticket is None

    def _release(self, ticket: Ticket) -> None:
        """Tell the prefill worker, without waiting for it: its lease is the fallback."""
        task = asyncio.create_task(self._tell_release(ticket), name=f"release offer {ticket.offer_id}")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _tell_release(self, ticket: Ticket) -> None:
        offer = ReleaseOffer(offer_id=ticket.offer_id, nonce=ticket.nonce, secret=ticket.secret)
        try:
            await self._plane.tell(ticket.address, "release", offer, RELEASE_TIMEOUT_S)
        except MeshError as error:
            log.info("a KV offer of %s was left to its lease: %s", ticket.worker_id, error)


class _Generation(msgspec.Struct):
    """Holds one request for an answer, over all its attempts."""

    request: GenerateRequest
    hints: Hints
    trace: Trace
    deadline: float
    consumer: DeltaConsumer
    generated: list[int]  # all tokens so far
    content: str = UNKNOWN  # with which they were computed; "": any worker may go on

    failures: "_Failures | None" = None
    num_prompt_logprobs: int = 0  # that the consumer has

    def continued(self) -> GenerateRequest:
        """Return the request with the tokens so far as part of its prompt, and without what its consumer has."""
        has_all = self.num_prompt_logprobs >= len(self.request.prompt) // 4 - 1
        request = without_prompt_logprobs(self.request) if self.generated or has_all else self.request
        return msgspec.structs.replace(request, generated=tuple(self.generated)) if self.generated else request


class _Failures:
    """Counts what has failed a request, and decides whether it may be tried again."""

    __slots__ = ("_attempts", "_deadline", "_engine_failures", "_failed", "_generated", "_lost_again", "_model",
        "_pin", "_presence", "ended", "excluded", "problem", "trial", "workers")  # fmt: skip

    def __init__(
        self, model: str, pin: str | None, generated: Sequence[int], deadline: float, presence: Presence
    ) -> None:
        """Begin without failures. `generated` grows with the answer."""
        self._model = model
        self._pin = pin
        self._generated = generated
        self._deadline = deadline
        self._presence = presence
        self._attempts = self._engine_failures = 0
        self._failed: dict[WorkerId, FailedWorker] = {}
        self._lost_again = 0.0  # when workers that were lost may be tried again
        self.workers: list[WorkerId] = []
        self.excluded: list[WorkerId] = []  # from the next attempt
        self.problem: MeshError | None = None  # the last one
        self.ended = 0  # processes of workers that ended before they gave a token, one after the other
        self.trial: Trial | None = None  # this attempt, as one of a suspect

    def may_be_the_cause(self, failure: _LegFailedError) -> bool:
        """Return whether the request is suspected if the worker's process has ended."""
        is_lost = isinstance(failure.reason, PeerLostError) and not isinstance(failure.reason, NOT_BEGUN)
        return is_lost and not failure.has_progressed

    def on_progress(self) -> None:
        """Clear the request of suspicion: a worker has computed its prompt."""
        self.ended = 0
        self.end_trial()

    def end_trial(self) -> None:
        if self.trial is not None:
            self.trial.end()
            self.trial = None

    def note(self, failure: _LegFailedError) -> None:
        """Raise what the client is told if this was one failure too many."""
        now = asyncio.get_running_loop().time()
        if (earlier := self._failed.get(failure.worker_id)) is None:
            earlier = FailedWorker(failure.worker_id, failure.target.name, failure.reason, now)
            log.warning("worker %s failed a request: %s", failure.worker_id, failure.reason)
            self.workers.append(failure.worker_id)
        if _AVOIDS:
            self.excluded.append(failure.worker_id)
        self._failed[failure.worker_id] = earlier.failed_again(failure.reason, now)
        self.problem = failure.reason
        self._attempts += not isinstance(failure.reason, NOT_BEGUN)
        self._engine_failures += isinstance(failure.reason, EngineError)
        if self.ended >= MAX_ENDED:
            raise EngineError(
                f"the processes of {self.ended} workers ended while they computed this request",
                hint="see the logs of the workers",
            ) from failure
        if self._attempts >= MAX_ATTEMPTS or self._engine_failures >= MAX_ENGINE_FAILURES:
            raise self._told(failure.reason) from failure

    def weigh(self, refusal: MeshError) -> None:
        """Raise what the client is told, unless a worker is known to come back before the deadline.

        Workers that were lost may be tried again then: perhaps only the network was away.
        """
        for error in (self.problem, refusal):
            if isinstance(error, OverloadedError) and not self._generated:
                raise error from None  # refused early: the caller may come back, nothing was begun
        now = asyncio.get_running_loop().time()
        if now >= self._waits_until():
            is_last = self.problem is None or isinstance(refusal, OtherWeightsError)
            raise (refusal if is_last else self._nobody_left()) from None
        if now >= self._deadline:
            raise DeadlineExceededError(f"no worker of the model {self._model!r} came back in time") from None
        if isinstance(refusal, NoWorkerError) and now >= self._lost_again:
            self._lost_again = now + LOST_AGAIN_S
            lost = {one.worker_id for one in self._failed.values() if isinstance(one.reason, MAY_RETURN)}
            self.excluded = [worker_id for worker_id in self.excluded if worker_id not in lost]

    def _waits_until(self) -> float:
        returns = [self._presence.waits_until(failed) for failed in self._failed.values()]
        if self._pin is None:  # else only the pinned worker helps
            returns.append(self._presence.waits_for_model(self._model))
        return max(returns, default=NEVER)

    def _nobody_left(self) -> MeshError:
        if isinstance(self.problem, EngineError):
            return self.problem
        if isinstance(self.problem, IdentityError):  # the log has this worker's address, and what to do
            what = f"this frontend cannot connect to a worker of the model {self._model!r}"
            return NoWorkerError(f"{what}: a certificate has expired, or is refused", hint=SEE_HEALTH)
        if isinstance(self.problem, UnreachableError) and is_silent(self.problem) and not is_refused(self.problem):
            what = "the worker of this request cannot be reached"
        elif isinstance(self.problem, PeerLostError):
            what = "the worker of this request is gone"
        else:
            what = "the worker of this request takes no more requests"
        return NoWorkerError(f"{what}, and no other one of the model {self._model!r} is ready", hint=SEE_HEALTH)

    def _told(self, reason: MeshError) -> MeshError:
        """Return a failure in words for clients: the addresses of workers are for the log."""
        if not isinstance(reason, PeerLostError):
            return reason
        return PeerLostError(f"{len(self.workers)} workers were lost while they computed this request")


class _Leg:
    """Takes the deltas of one placement: reports to the booking and the trace, and gives them to the consumer."""

    __slots__ = (
        "_before",
        "_booking",
        "_consumer",
        "_generated",
        "_give",
        "_has_begun",
        "_has_ended",
        "_is_first",
        "_most_tokens",
        "_prompt_logprobs",
        "_task",
        "attempt",
        "is_steady",
        "notes",
        "on_offer_taken",
        "record",
        "shortcut",
        "ticket",
        "trace",
        "until_ready",
    )

    def __init__(
        self,
        task: _Generation,
        booking: Booking,
        attempt: Attempt | None,
        notes: PlacingNotes | None,
        *,
        is_first: bool,
    ) -> None:
        consumer = task.consumer
        self.notes = notes  # while traces alone look
        self.attempt = attempt  # while somebody looks
        self.record: LegRecord | None = None  # of the worker that has the request now, in `attempt`
        self.trace = task.trace
        self.ticket: Ticket | None = None  # an offer that stands
        self.on_offer_taken: Callable[[Ticket], None] | None = None
        self.shortcut: TokenLane | None = None
        self.until_ready = consumer.until_ready
        self._booking = booking
        self._consumer = consumer
        self._give = consumer.take
        self._generated = task.generated
        self._before = len(task.generated)  # part of the prompt
        self._most_tokens = _most_tokens(task.request, booking.placed)
        self._is_first = is_first  # no worker before has computed the prompt for this answer
        self._task = task
        self._prompt_logprobs = 0  # that have come from the workers of this placement
        self._has_begun = False
        self._has_ended = False  # the answer, by itself
        self.is_steady = False  # its decode worker has sent a first delta

    def begin(self, target: Target, *, is_prefill: bool) -> LegRecord | None:
        """Note that a worker is asked; return the record of its part while somebody looks."""
        if (attempt := self.attempt) is None or (answer := self.trace.record) is None:
            return None
        self.record = record = attempt.begin_leg(target, answer, is_prefill=is_prefill)
        return record

    def note_failure(self, error: MeshError) -> None:
        if self.attempt is not None:
            self.attempt.error = error.code
        else:
            note_failed(self.trace, clock(), error.code)

    def on_first(self, delta: Delta) -> None:
        """Take the delta of a prefill leg; the consumer has no use for its ticket."""
        self._note(delta)
        self._forward(msgspec.structs.replace(delta, ticket=None))

    def on_prompt(self, delta: Delta) -> Delta:
        """Give the consumer the logprobs of the prompt, without those that it has from a worker before; return the
        rest."""
        logprobs = delta.logprobs or ()
        if (count := len(logprobs) - len(delta.token_ids)) <= 0:
            return delta
        task, end = self._task, self._prompt_logprobs + count
        if end > task.num_prompt_logprobs:
            self._consumer.take_prompt_logprobs(logprobs[count - (end - task.num_prompt_logprobs) : count])
            task.num_prompt_logprobs = end
        self._prompt_logprobs = end
        return msgspec.structs.replace(delta, logprobs=logprobs[count:] or None)

    def _cut(self, delta: Delta) -> Delta:
        """Return the part of the delta with which the answer is as long as it may be, and ends."""
        left = max(0, self._most_tokens - len(self._generated))  # another worker may have been free to give more
        log.warning("a worker sends more than the %d tokens that were asked for", self._task.request.stop.max_tokens)
        return msgspec.structs.replace(
            delta,
            token_ids=delta.token_ids[:left],
            finish_reason=FinishReason.LENGTH,
            logprobs=None if delta.logprobs is None else delta.logprobs[:left],
            stop_token=None,
        )

    def take(self, delta: Delta) -> bool:
        if self.is_steady and delta.finish_reason is None and delta.pull is None:  # nearly all: in one step
            if len(self._generated) + len(delta.token_ids) > self._most_tokens:
                return self._forward(self._cut(delta))
            self._generated += delta.token_ids
            wants_more = self._give(delta)
            if self.shortcut is None and (lane := self._consumer.lane) is not None:
                self._open(lane)
            return wants_more
        if delta.logprobs is not None:
            delta = self.on_prompt(delta)
            if not delta.token_ids and delta.finish_reason is None and delta.logprobs is None:
                return not self.is_full
        if self.ticket is not None:  # with its first delta the decode worker is done with the offer
            assert self.on_offer_taken is not None
            self.on_offer_taken(self.ticket)
            self.ticket = None
            delta = msgspec.structs.replace(delta, cached_tokens=None)  # what prefill said counts
        if not self._has_begun or delta.pull is not None or delta.cached_tokens is not None:
            self._note(delta)
        wants_more = self._forward(delta)
        if not self.is_steady:
            self.is_steady = True
            if self.notes is not None:
                self.notes.first = clock()
        if (failures := self._task.failures) is not None and failures.ended:
            failures.on_progress()
        if (lane := self._consumer.lane) is not None:
            self._open(lane)
        return wants_more

    def _forward(self, delta: Delta) -> bool:
        if len(self._generated) + len(delta.token_ids) > self._most_tokens:
            delta = self._cut(delta)
        self._generated += delta.token_ids
        self._has_ended = delta.finish_reason is not None
        if self.record is not None:
            self._note_times(self.record, delta)
        elif self.notes is not None and self._has_ended:
            self.notes.last = delta
        return self._give(delta) and not self._has_ended

    def _note_times(self, record: LegRecord, delta: Delta) -> None:
        now = clock()
        if record.first is None:
            record.first = now
        if (answer := self.trace.record) is not None:
            if answer.first_token is None and self._generated:
                answer.first_token = now
            if self._has_ended:
                answer.last_token = now
        record.times = times_in(delta) or record.times

    def _open(self, lane: TokenLane) -> None:
        lane.generated, lane.limit = self._generated, self._most_tokens
        self.shortcut = lane

    @property
    def is_done(self) -> bool:
        return self._has_ended or self._consumer.is_done

    @property
    def is_full(self) -> bool:
        return self._consumer.is_full

    def report(self) -> None:
        """Report progress, also before the first token: a long prompt may take longer than the booking's lease."""
        self._booking.progress(len(self._generated) - self._before)

    def report_end(self) -> None:
        count = len(self._generated) - self._before
        if self.is_done:
            self._booking.finished(count)
        elif count:
            self._booking.progress(count)

    def _note(self, delta: Delta) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._booking.prefill_done(delta.cached_tokens)
        if delta.cached_tokens is not None and self._is_first:
            self.trace.cached_tokens = delta.cached_tokens
        if delta.pull is not None:
            self.trace.transfer = delta.pull.backend
            self.trace.kv_bytes_pulled += delta.pull.num_bytes
            self.trace.pull_error = delta.pull.error
            if self.notes is not None:
                self.notes.pull = delta.pull
            if self.record is not None:
                self.record.pull = delta.pull


class _Reports:
    """Reports the progress of all running answers to the router every PROGRESS_S: one timer for all, none when idle."""

    def __init__(self) -> None:
        self._legs: set[_Leg] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._round: list[_Leg] = []  # that are reported on in these PROGRESS_TURNS
        self._turn = 0

    def add(self, leg: _Leg) -> None:
        self._legs.add(leg)
        if self._timer is None:
            self._plan()

    def _plan(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_S / PROGRESS_TURNS, self._tell)

    def discard(self, leg: _Leg) -> None:
        self._legs.discard(leg)

    def _tell(self) -> None:
        if self._turn == 0:
            self._round = list(self._legs)
        for leg in self._round[self._turn :: PROGRESS_TURNS]:
            if leg in self._legs:
                leg.report()
        self._turn = (self._turn + 1) % PROGRESS_TURNS
        if self._legs:
            self._plan()
        else:
            self._timer, self._round, self._turn = None, [], 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _wants_prompt_logprobs(request: GenerateRequest | EmbedRequest) -> bool:
    """Return whether the whole prompt has to be computed: no worker holds any of it, as far as routers can know."""
    return isinstance(request, GenerateRequest) and request.sampling.prompt_logprobs is not None


def without_prompt_logprobs(request: GenerateRequest) -> GenerateRequest:
    """Return the request of a worker that is not asked for the logprobs of the prompt any more."""
    if request.sampling.prompt_logprobs is None:
        return request
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=sampling)


def _most_tokens(request: GenerateRequest, placed: Placed) -> int:
    """Return the length at which an answer is cut, whatever the workers send.

    Where a server speaks in texts, the server counts: its text must not be cut because it is more tokens of ours.
    """
    retokenizes = placed.decode.retokenizes or (placed.prefill is not None and placed.prefill.retokenizes)
    return request.stop.max_tokens * (MAX_RETOKENIZED if retokenizes else 1)


def _content(placed: Placed) -> str:
    """Return with which content the tokens of a placement are computed. Two workers of one are paired, or unknown."""
    return placed.decode.content or ("" if placed.prefill is None else placed.prefill.content)


def _hints(task: _Generation) -> Hints:
    """Return the hints of a request. The router is asked for its reasons where they go into a trace."""
    record = task.trace.record
    if record is None or not record.is_sampled or task.hints.explain:
        return task.hints
    return msgspec.structs.replace(task.hints, explain=True)


def _traceparent(request: GenerateRequest | EmbedRequest, record: LegRecord | None) -> str:
    """Return the trace that a leg belongs to: as its record says, or what the client has sent where there is none."""
    return request.traceparent if record is None else record.traceparent


def _notes(trace: Trace, route: RouteRequest, block_size: int, asked: float) -> PlacingNotes:
    """Return the notes on a new placement. One that found no worker goes on: the request still waits."""
    if (before := trace.placing) is not None and before.placed_at is None:
        asked = before.asked
    trace.placing = notes = PlacingNotes(route, block_size, asked)
    return notes


def _left(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _note_placement(trace: Trace, placed: Placed, is_first: bool, isl_tokens: int, block_size: int) -> None:
    trace.placed = placed
    if is_first:
        trace.overlap_tokens = min(isl_tokens, (placed.prefill or placed.decode).overlap_blocks * block_size)
    if placed.explanation is not None:
        trace.explanations.append(placed.explanation)
