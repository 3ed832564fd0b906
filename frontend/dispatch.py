"""Carry one request through the mesh: place it, prefill, hand the KV over, decode; go on elsewhere on a failure.

A stream that loses its worker migrates: what was generated becomes part of the prompt for the next worker, and
since a draw depends on the seed and the token's number alone, the answer goes on as it would have.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import msgspec

from frontend.generator import Hints, Trace
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
    GenerateRequest,
    Placed,
    ReleaseOffer,
    RouteRequest,
    Target,
    Ticket,
    pack_tokens,
)
from router.client import Router
from router.service import Booking

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
MAX_ENGINE_FAILURES = 2  # a request that breaks engines shall not go round the mesh
REPLACEMENT_S = 15.0  # a request that lost its worker waits so long for another one to appear
RETRY_S = 0.2
RELEASE_TIMEOUT_S = 5.0
PROGRESS_S = 2.0  # between reports on an answer to the router
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

    async def generate(
        self, request: GenerateRequest, hints: Hints, trace: Trace, deadline: float
    ) -> AsyncGenerator[Delta, None]:
        failed: list[WorkerId] = []
        problem: MeshError | None = None
        generated = list(request.generated)
        patience_ends = deadline
        attempts = engine_failures = 0
        while attempts < MAX_ATTEMPTS and engine_failures < MAX_ENGINE_FAILURES:
            try:
                attempt = msgspec.structs.replace(request, generated=tuple(generated))
                route = await self._route(attempt, hints, failed)
                async with aclosing(self._attempt(attempt, route, trace, deadline)) as deltas:
                    async for delta in deltas:
                        generated += delta.token_ids
                        yield delta
                        if delta.finish_reason is not None:
                            return
            except _LegFailedError as failure:
                log.warning("worker %s failed a request: %s", failure.worker_id, failure.reason)
                failed.append(failure.worker_id)
                problem = failure.reason
                attempts += not isinstance(problem, NOT_BEGUN)
                engine_failures += isinstance(problem, EngineError)
                trace.migrations += 1
                patience_ends = asyncio.get_running_loop().time() + REPLACEMENT_S
            except (NoWorkerError, OverloadedError) as refusal:  # of the router
                if problem is None:
                    raise
                for error in (problem, refusal):
                    if isinstance(error, OverloadedError) and not generated:
                        raise error from None  # refused early: the caller may come back, nothing was begun
                if asyncio.get_running_loop().time() > min(patience_ends, deadline):
                    raise problem from None
                await asyncio.sleep(RETRY_S)
        assert problem is not None
        raise problem

    async def preview(self, request: GenerateRequest, hints: Hints, deadline: float) -> Placed:
        """Implements frontend.generator.Generator."""
        route = await self._route(request, replace(hints, explain=True), [])
        return await self._router.preview(route, _left(deadline))

    async def close(self) -> None:
        """Wait for the releases that are on their way."""
        if self._releasing:
            await asyncio.wait(self._releasing)

    async def _route(self, request: GenerateRequest, hints: Hints, failed: list[WorkerId]) -> RouteRequest:
        tokens = request.prompt + pack_tokens(request.generated)
        block_size = self._block_size_of(request.model)
        return RouteRequest(
            request_id=request.request_id,
            model=request.model,
            isl_tokens=len(tokens) // 4,
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
        self, request: GenerateRequest, route: RouteRequest, trace: Trace, deadline: float
    ) -> AsyncGenerator[Delta, None]:
        """One placement, carried out. Ends early, with _LegFailedError, if a worker fails it."""
        asked = asyncio.get_running_loop().time()
        async with self._router.book(route, _left(deadline)) as booking:
            placed = booking.placed
            is_first = not request.generated
            trace.waited_s += asyncio.get_running_loop().time() - asked
            _note_placement(trace, placed, is_first, route.isl_tokens, self._block_size_of(request.model))
            news = _News(booking)
            ticket: Ticket | None = None
            try:
                if placed.prefill is not None:
                    delta = await self._prefill(placed.prefill, request, deadline)
                    trace.prefill_worker = placed.prefill.name
                    news.on_delta(delta)
                    _note(trace, delta, is_first)
                    ticket = delta.ticket
                    yield msgspec.structs.replace(delta, ticket=None)
                    if ticket is None:
                        return
                    request = msgspec.structs.replace(
                        request, generated=request.generated + delta.token_ids, ticket=ticket
                    )
                trace.decode_worker = placed.decode.name
                async with aclosing(self._decode(placed.decode, request, deadline)) as deltas:
                    async for delta in deltas:
                        news.on_delta(delta)
                        if ticket is not None:  # with its first delta the decode worker is done with the offer
                            self._release(ticket)
                            ticket = None
                            delta = msgspec.structs.replace(delta, cached_tokens=None)  # what prefill said counts
                        _note(trace, delta, is_first)
                        yield delta
            finally:
                news.close()
                if ticket is not None:
                    self._release(ticket)

    async def _prefill(self, target: Target, request: GenerateRequest, deadline: float) -> Delta:
        """The first token, and the ticket for the prompt's KV unless the answer ends there."""
        leg = msgspec.structs.replace(request, offer_kv=True)
        try:
            async with self._plane.open(target.address, "generate", leg, _left(deadline)) as stream:
                async for delta in stream.messages(Delta):
                    if delta.ticket is not None or delta.finish_reason is not None:
                        return delta
            raise PeerLostError(f"prefill worker {target.name} ended without a ticket")
        except ELSEWHERE as error:
            raise _LegFailedError(target.worker_id, error) from error

    async def _decode(self, target: Target, request: GenerateRequest, deadline: float) -> AsyncGenerator[Delta, None]:
        try:
            async with self._plane.open(target.address, "generate", request, _left(deadline)) as stream:
                async for delta in stream.messages(Delta):
                    yield delta
                    if delta.finish_reason is not None:
                        return
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


class _News:
    """What a booking is told of its request: the first token, once, and every PROGRESS_S that it lives.

    That it lives is told before the first token as well: a long prompt may take longer than the booking's lease.
    """

    def __init__(self, booking: Booking) -> None:
        self._booking = booking
        self._began = False
        self._osl_tokens = 0  # since the placement: what was generated before is part of the prompt
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PROGRESS_S, self._tell)

    def on_delta(self, delta: Delta) -> None:
        if not self._began:
            self._began = True
            self._booking.prefill_done(delta.cached_tokens)
        self._osl_tokens += len(delta.token_ids)

    def close(self) -> None:
        self._timer.cancel()

    def _tell(self) -> None:
        self._booking.progress(self._osl_tokens)
        self._timer = self._loop.call_later(PROGRESS_S, self._tell)


async def _hashes(tokens: bytes, block_size: int, seed: int) -> bytes:
    if sequence_hash_bytes is plain_sequence_hash_bytes and len(tokens) > SLOW_HASH_BYTES:
        return await asyncio.to_thread(sequence_hash_bytes, tokens, block_size, seed)
    return sequence_hash_bytes(tokens, block_size, seed)


def _left(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _note_placement(trace: Trace, placed: Placed, is_first: bool, isl_tokens: int, block_size: int) -> None:
    """`is_first`: as for `_note`."""
    trace.placed = placed
    if is_first:
        trace.overlap_tokens = min(isl_tokens, (placed.prefill or placed.decode).overlap_blocks * block_size)
    if placed.explanation is not None:
        trace.explanations.append(placed.explanation)


def _note(trace: Trace, delta: Delta, is_first: bool) -> None:
    """`is_first`: no worker before has computed the prompt for this answer."""
    if delta.cached_tokens is not None and is_first:
        trace.cached_tokens = delta.cached_tokens
    if delta.pull is not None:
        trace.transfer = delta.pull.backend
        trace.kv_bytes_pulled += delta.pull.num_bytes
        trace.pull_error = delta.pull.error
