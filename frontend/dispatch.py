"""Carry one request through the mesh: place it, prefill, hand the KV over, decode; go on elsewhere on a failure.

A stream that loses its worker migrates: what was generated becomes part of the prompt for the next worker, and
since a draw depends on the seed and the token's number alone, the answer goes on as it would have.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from frontend.generator import DeltaConsumer, Hints, Trace
from frontend.lane import TokenLane
from mesh.plane.client import PlaneClient
from protocol.errors import (
    CancelledByPeerError,
    DrainingError,
    EngineError,
    MeshError,
    NoWorkerError,
    OverloadedError,
    PeerLostError,
    UnreachableError,
)
from protocol.hashing import hash_seed, plain_sequence_hash_bytes, sequence_hash_bytes
from protocol.ids import WorkerId
from protocol.messages import (
    Delta,
    Embedding,
    EmbedRequest,
    GenerateRequest,
    Placed,
    ReleaseOffer,
    RouteRequest,
    Target,
    Ticket,
    pack_tokens,
)
from router.booking import Booking, Router

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
MAX_ENGINE_FAILURES = 2  # a request that breaks engines shall not go round the mesh
REPLACEMENT_S = 15.0  # a request that lost its worker waits so long for another one to appear
RETRY_S = 0.2
RELEASE_TIMEOUT_S = 5.0
PROGRESS_S = 2.0  # between reports on one answer to the router
PROGRESS_TURNS = 20  # in which those on all answers are made: 10,000 at once would hold up the event loop for 50 ms
SLOW_HASH_BYTES = 4 * 32_768  # of prompt; without native code a longer one would hold up the event loop for over 1 ms
NOT_BEGUN = (UnreachableError, DrainingError, OverloadedError)  # the worker took no part: not an attempt
ELSEWHERE = (PeerLostError, DrainingError, EngineError, CancelledByPeerError, OverloadedError)


class _LegFailedError(Exception):
    """A worker failed its part; another may do it."""

    def __init__(self, worker_id: WorkerId, reason: MeshError) -> None:
        super().__init__(str(reason))
        self.worker_id = worker_id
        self.reason = reason


class Dispatcher:
    """Implements frontend.generator.Generator over the workers of the mesh."""

    def __init__(self, router: Router, plane: PlaneClient, block_size_of: Callable[[str], int]) -> None:
        self._router = router
        self._plane = plane
        self._block_size_of = block_size_of
        self._releasing: set[asyncio.Task[None]] = set()
        self._reports = _Reports()

    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float, consumer: DeltaConsumer
    ) -> None:
        """Implements frontend.generator.Generator."""
        failed: list[WorkerId] = []
        problem: MeshError | None = None
        course = _Course(consumer, request.generated)
        now = asyncio.get_running_loop().time
        patience_ends = deadline
        attempts = engine_failures = 0
        while attempts < MAX_ATTEMPTS and engine_failures < MAX_ENGINE_FAILURES:
            try:
                attempt = request if not failed else msgspec.structs.replace(request, generated=tuple(course.generated))
                route = await self._route(attempt, hints, failed)
                await self._attempt(attempt, route, trace, deadline, course, now)
                return
            except _LegFailedError as failure:
                log.warning("worker %s failed a request: %s", failure.worker_id, failure.reason)
                failed.append(failure.worker_id)
                problem = failure.reason
                attempts += not isinstance(problem, NOT_BEGUN)
                engine_failures += isinstance(problem, EngineError)
                trace.migrations += 1
                patience_ends = now() + REPLACEMENT_S
            except (NoWorkerError, OverloadedError) as refusal:  # of the router
                if problem is None:
                    raise
                for error in (problem, refusal):
                    if isinstance(error, OverloadedError) and not course.generated:
                        raise error from None  # refused early: the caller may come back, nothing was begun
                if now() > min(patience_ends, deadline):
                    raise problem from None
                await asyncio.sleep(RETRY_S)
        assert problem is not None
        raise problem

    async def preview(self, request: GenerateRequest, hints: Hints, deadline: float) -> Placed:
        """Implements frontend.generator.Generator."""
        route = await self._route(request, msgspec.structs.replace(hints, explain=True), [])
        return await self._router.preview(route, _left(deadline))

    async def embed(self, request: EmbedRequest, hints: Hints, deadline: float) -> Embedding:
        """Implements frontend.generator.Generator: nothing is begun twice by trying again elsewhere."""
        failed: list[WorkerId] = []
        problem: MeshError | None = None
        attempts = engine_failures = 0
        asked = GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            prompt=request.prompt,
            lora=request.lora,
            cache_salt=request.cache_salt,
        )
        while attempts < MAX_ATTEMPTS and engine_failures < MAX_ENGINE_FAILURES:
            route = await self._route(asked, hints, failed)
            try:
                return await self._embed(request, route, deadline)
            except _LegFailedError as failure:
                log.warning("worker %s failed an embedding: %s", failure.worker_id, failure.reason)
                failed.append(failure.worker_id)
                problem = failure.reason
                attempts += not isinstance(problem, NOT_BEGUN)
                engine_failures += isinstance(problem, EngineError)
            except NoWorkerError:
                if problem is None:
                    raise
                break  # what the last worker said tells more
        assert problem is not None
        raise problem

    async def _embed(self, request: EmbedRequest, route: RouteRequest, deadline: float) -> Embedding:
        async with self._router.book(route, _left(deadline)) as booking:
            target = booking.placed.decode
            if target.dp_rank:
                request = msgspec.structs.replace(request, dp_rank=target.dp_rank)
            try:
                vector = await self._plane.ask(target.address, "embed", request, Embedding, _left(deadline))
            except ELSEWHERE as error:
                raise _LegFailedError(target.worker_id, error) from error
            booking.prefill_done()
            return vector

    async def close(self) -> None:
        """Wait for the releases that are on their way."""
        self._reports.close()
        if self._releasing:
            await asyncio.wait(self._releasing)

    async def _route(self, request: GenerateRequest, hints: Hints, failed: list[WorkerId]) -> RouteRequest:
        tokens = request.prompt + pack_tokens(request.generated) if request.generated else request.prompt
        block_size = self._block_size_of(request.model)
        return RouteRequest(
            request_id=request.request_id,
            model=request.model,
            isl_tokens=len(tokens) // 4,
            lora=request.lora,
            sequence_hashes=await _hashes(tokens, block_size, hash_seed(request.lora, request.cache_salt)),
            exclude=tuple(failed),
            disaggregate=hints.disaggregate,
            pin=None if hints.pin is None else WorkerId(hints.pin),
            pin_rank=hints.pin_rank,
            pin_prefill=None if hints.pin_prefill is None else WorkerId(hints.pin_prefill),
            session=hints.session,
            tenant=hints.tenant,
            priority=hints.priority,
            explain=hints.explain,
        )

    async def _attempt(
        self,
        request: GenerateRequest,
        route: RouteRequest,
        trace: Trace,
        deadline: float,
        course: "_Course",
        now: Callable[[], float],
    ) -> None:
        """One placement, carried out. Ends early, with _LegFailedError, if a worker fails it."""
        asked = now()
        async with self._router.book(route, deadline - asked) as booking:
            placed = booking.placed
            trace.waited_s += now() - asked
            is_first = not request.generated
            _note_placement(trace, placed, is_first, route.isl_tokens, self._block_size_of(request.model))
            leg = _Leg(course, booking, trace, is_first=is_first)
            self._reports.add(leg)
            try:
                if placed.prefill is not None:
                    ticket = await self._prefill(placed.prefill, request, deadline, leg)
                    if ticket is None or course.is_done:
                        return
                    request = msgspec.structs.replace(request, generated=tuple(course.generated), ticket=ticket)
                trace.decode_worker = placed.decode.name
                await self._decode(placed.decode, request, deadline - now(), leg)
            finally:
                self._reports.discard(leg)
                if leg.ticket is not None:
                    self._release(leg.ticket)

    async def _prefill(self, target: Target, request: GenerateRequest, deadline: float, leg: "_Leg") -> Ticket | None:
        """The first token, and the ticket for the prompt's KV unless the answer ends there.

        An engine whose halves meet while the prompt is computed gives the ticket at once, and no token.
        """
        body = msgspec.structs.replace(request, offer_kv=True, dp_rank=target.dp_rank)
        try:
            async with self._plane.open(target.address, "generate", body, _left(deadline)) as stream:
                async for delta in stream.messages(Delta):
                    if delta.ticket is not None or delta.finish_reason is not None:
                        leg.trace.prefill_worker = target.name
                        leg.ticket = delta.ticket
                        if not delta.token_ids and delta.finish_reason is None:
                            return delta.ticket  # it has only begun: the decode worker fetches what it computes
                        while leg.is_full:
                            await leg.until_ready()
                        leg.on_first(delta)
                        return delta.ticket
            raise PeerLostError(f"prefill worker {target.name} ended without a ticket")
        except ELSEWHERE as error:
            raise _LegFailedError(target.worker_id, error) from error

    async def _decode(self, target: Target, request: GenerateRequest, timeout_s: float, leg: "_Leg") -> None:
        leg.on_offer_taken = self._release
        if target.dp_rank:
            request = msgspec.structs.replace(request, dp_rank=target.dp_rank)
        try:
            async with self._plane.open(target.address, "generate", request, timeout_s) as stream:
                await stream.feed(Delta, leg)
            if not leg.is_done:
                raise PeerLostError(f"worker {target.name} ended without a finish reason")
        except ELSEWHERE as error:
            raise _LegFailedError(target.worker_id, error) from error

    def _release(self, ticket: Ticket) -> None:
        """Tell the prefill worker, without waiting for it: its lease is the fallback."""
        task = asyncio.create_task(self._tell_release(ticket), name=f"release offer {ticket.offer_id}")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _tell_release(self, ticket: Ticket) -> None:
        offer = ReleaseOffer(offer_id=ticket.offer_id, nonce=ticket.nonce)
        try:
            await self._plane.tell(ticket.address, "release", offer, RELEASE_TIMEOUT_S)
        except MeshError as error:
            log.info("a KV offer of %s was left to its lease: %s", ticket.worker_id, error)


class _Course:
    """An answer over all its attempts."""

    __slots__ = ("_has_ended", "consumer", "generated")

    def __init__(self, consumer: DeltaConsumer, generated: Sequence[int]) -> None:
        self.consumer = consumer
        self.generated = list(generated)
        self._has_ended = False  # by itself

    def take(self, delta: Delta) -> bool:
        self.generated += delta.token_ids
        self._has_ended = delta.finish_reason is not None
        return self.consumer.take(delta) and not self._has_ended

    @property
    def is_done(self) -> bool:
        return self._has_ended or self.consumer.is_done


class _Leg:
    """Takes the deltas of one placement: tells the booking, the trace, and the one who asked."""

    __slots__ = (
        "_before",
        "_booking",
        "_course",
        "_generated",
        "_give",
        "_has_begun",
        "_is_first",
        "_is_steady",
        "on_offer_taken",
        "shortcut",
        "ticket",
        "trace",
    )

    def __init__(self, course: _Course, booking: Booking, trace: Trace, *, is_first: bool) -> None:
        self.trace = trace
        self.ticket: Ticket | None = None  # an offer that stands
        self.on_offer_taken: Callable[[Ticket], None] | None = None
        self._course = course
        self._booking = booking
        self._is_first = is_first  # no worker before has computed the prompt for this answer
        self._has_begun = False
        self._is_steady = False  # its decode worker has sent a first delta
        self.shortcut: TokenLane | None = None
        self._give = course.consumer.take
        self._generated = course.generated
        self._before = len(course.generated)  # part of the prompt

    def on_first(self, delta: Delta) -> None:
        """The delta of a prefill leg; the consumer has no use for its ticket."""
        self._note(delta)
        self._course.take(msgspec.structs.replace(delta, ticket=None))

    def take(self, delta: Delta) -> bool:
        if self._is_steady and delta.finish_reason is None and delta.pull is None:  # nearly all: in one step
            self._generated += delta.token_ids
            wants_more = self._give(delta)
            if self.shortcut is None and (lane := self._course.consumer.lane) is not None:
                self._open(lane)
            return wants_more
        if self.ticket is not None:  # with its first delta the decode worker is done with the offer
            assert self.on_offer_taken is not None
            self.on_offer_taken(self.ticket)
            self.ticket = None
            delta = msgspec.structs.replace(delta, cached_tokens=None)  # what prefill said counts
        if not self._has_begun or delta.pull is not None:
            self._note(delta)
        wants_more = self._course.take(delta)
        self._is_steady = True
        if (lane := self._course.consumer.lane) is not None:
            self._open(lane)
        return wants_more

    def _open(self, lane: TokenLane) -> None:
        lane.generated = self._generated
        self.shortcut = lane

    @property
    def is_done(self) -> bool:
        return self._course.is_done

    @property
    def is_full(self) -> bool:
        return self._course.consumer.is_full

    async def until_ready(self) -> None:
        await self._course.consumer.until_ready()

    def report(self) -> None:
        """Told now and then, before the first token as well: a long prompt may take longer than the booking's lease."""
        self._booking.progress(len(self._generated) - self._before)

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


class _Reports:
    """Tells the router, every PROGRESS_S, how all running answers get on: one timer for all, none when idle."""

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


async def _hashes(tokens: bytes, block_size: int, seed: int) -> bytes:
    if sequence_hash_bytes is plain_sequence_hash_bytes and len(tokens) > SLOW_HASH_BYTES:
        return await asyncio.to_thread(sequence_hash_bytes, tokens, block_size, seed)
    return sequence_hash_bytes(tokens, block_size, seed)


def _left(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _note_placement(trace: Trace, placed: Placed, is_first: bool, isl_tokens: int, block_size: int) -> None:
    trace.placed = placed
    if is_first:
        trace.overlap_tokens = min(isl_tokens, (placed.prefill or placed.decode).overlap_blocks * block_size)
    if placed.explanation is not None:
        trace.explanations.append(placed.explanation)
