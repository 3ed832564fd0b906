"""The router in this process: it follows the mesh, places requests, and keeps a booking for each while it runs."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Sequence

from kvmesh.kvevents.door import new_keys
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import InvalidRequestError, MeshError, OverloadedError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Placed, Progress, RouterCard, RouteRequest, WorkerCard
from kvmesh.router.admission import RefusedError
from kvmesh.router.config import RouterConfig, rules_of
from kvmesh.router.core import Outcome, RouterState
from kvmesh.router.feeds import KvFeed, WorkerNews
from kvmesh.router.gossip_link import Gossip
from kvmesh.router.load_feed import LoadFeed
from kvmesh.router.metrics import (
    ESTIMATE_ERROR,
    FAILURES,
    PLACE_SECONDS,
    PREDICTED_TOKENS,
    PROMPT_TOKENS,
    REFUSALS,
    RESUMED,
    REUSED_TOKENS,
    WAIT_SECONDS,
    count_placement,
    watch_state,
)

log = logging.getLogger(__name__)

SWEEP_S = 10.0


class LocalBooking:
    """A booking that counts until `end`, or until its lease passes or its worker leaves."""

    __slots__ = ("__weakref__", "_osl_tokens", "_router", "has_begun", "isl_tokens", "model", "placed", "request_id")

    def __init__(self, router: "LocalRouter", request: RouteRequest, placed: Placed) -> None:
        self._router = router
        self._osl_tokens = 0
        self.request_id = request.request_id
        self.model = request.model
        self.isl_tokens = request.isl_tokens
        self.has_begun = False
        self.placed = placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._router.on_prefill_done(self, reused_tokens)

    def progress(self, osl_tokens: int | None = None) -> None:
        """Report that the request lives, and how many tokens it has if that is known."""
        if osl_tokens is not None:
            self._osl_tokens = osl_tokens
        self._router.on_progress(self, self._osl_tokens)

    def finished(self, osl_tokens: int) -> None:
        """Report that the answer is complete: the estimates learn from it."""
        self._router.on_finished(self, osl_tokens)

    def end(self, *, ok: bool) -> None:
        """End the booking; `ok`: the request ended well. A second call does nothing."""
        self._router.on_end(self, ok=ok)


class _BookedBlock:
    """The block of code for which a booking counts."""

    __slots__ = ("_booking", "_placing")

    def __init__(self, placing: Coroutine[None, None, LocalBooking]) -> None:
        self._placing = placing

    async def __aenter__(self) -> LocalBooking:
        self._booking = await self._placing
        return self._booking

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._booking.end(ok=kind is None)


class LocalRouter:
    """Drives the router's core. It hears of workers from `workers`, of caches by KV events, of load from other routers.

    Raises ConfigError if it cannot listen for gossip, or for a bad --nats-url.
    """

    def __init__(self, config: RouterConfig, plane: PlaneClient, workers: WorkerNews) -> None:
        self.name = config.name
        self.lease_s = config.lease_s
        self.state = RouterState(rules_of(config))
        keys = None if plane.credentials is None else new_keys()  # a closed mesh: its KV events are closed
        self.kv_feed = KvFeed(self.state.fleet, plane, config.nats_url, keys=keys)
        self.load_feed = LoadFeed(self.state.reported, plane, self._wake)
        self.gossip: Gossip | None = None
        if config.gossip:
            bind, host = f"tcp://{config.host}:{config.gossip_port or '*'}", config.advertise_host or config.host
            self.gossip = Gossip(
                self.state.load, config.name, self._wake, bind=bind, advertise_host=host, is_closed=keys is not None
            )
        self._loop = asyncio.get_running_loop()
        self._placing: dict[RequestId, asyncio.Future[Placed]] = {}  # of requests that wait in the queue
        self._bookings: dict[RequestId, LocalBooking] = {}
        self._dispatching: asyncio.Handle | None = None
        self._next_deadline: asyncio.TimerHandle | None = None
        self._next_sweep: asyncio.TimerHandle | None = None
        workers.listen(self._join, self._leave)
        self.state.admission.on_error = lambda what, ratio: ESTIMATE_ERROR.labels(what).observe(ratio)
        observe(self)

    async def place(self, request: RouteRequest, timeout_s: float) -> LocalBooking:
        """Place a request. It counts until the booking's `end`; an earlier booking of the same name ends now.

        It waits while every worker is full, at most `timeout_s`. Raises NoWorkerError, OverloadedError if the queue is
        full, DeadlineExceededError, InvalidRequestError if a request of this name waits already.
        """
        if request.request_id in self._placing:
            raise InvalidRequestError(f"request {request.request_id} waits in the queue already")
        if (earlier := self._bookings.get(request.request_id)) is not None:
            earlier.end(ok=False)
        started, waited_s = time.monotonic(), 0.0
        try:
            placed = self.state.try_place(request, started, started + timeout_s)
            if placed is not None:
                PLACE_SECONDS.observe(time.monotonic() - started)
            else:
                placed = await self._wait_for_room(request, started, started + timeout_s)
                waited_s = time.monotonic() - started
        except MeshError as error:
            count_failure(error)
            raise
        count_placement(placed, request.model)
        WAIT_SECONDS.observe(waited_s)
        return self._booked(request, placed)

    def book(self, request: RouteRequest, timeout_s: float) -> _BookedBlock:
        """Place a request; it counts until the block is left. Raises what `place` raises."""
        return _BookedBlock(self.place(request, timeout_s))

    def check(self, request: RouteRequest, timeout_s: float) -> None:
        """Raise RefusedError if a request of this kind would be refused now, whatever its prompt is."""
        now = time.monotonic()
        try:
            self.state.check(request, now, now + timeout_s)
        except MeshError as error:
            count_failure(error)
            raise

    async def preview(self, request: RouteRequest, timeout_s: float) -> Placed:
        """Return where the request would run if it came now, with the explanation. Raises NoWorkerError."""
        return self.state.preview(request, time.monotonic())

    def resume(self, request: RouteRequest, placed: Placed, progress: Progress) -> LocalBooking:
        """Take over a booking from a router that is gone. Raises NoWorkerError if its workers are not known yet."""
        self.state.resume(request, placed, time.monotonic(), is_prefilling=not progress.has_begun)
        RESUMED.inc()
        booking = self._booked(request, placed)
        booking.has_begun = progress.has_begun
        booking.progress(progress.osl_tokens)
        return booking

    def booking(self, request_id: RequestId) -> LocalBooking | None:
        """Return a booking; None once its lease has passed, its worker has left or it has ended."""
        return self._bookings.get(request_id) if request_id in self.state.load else None

    def card(self, address: str = "", http_url: str = "") -> RouterCard:
        """Return this router's card. `address`: where it is asked for placements; "": nowhere."""
        gossip, key = ("", "") if self.gossip is None else (self.gossip.endpoint, self.gossip.key)
        return RouterCard(
            name=self.name, address=address, gossip=gossip, gossip_key=key, http_url=http_url, pid=os.getpid()
        )

    async def close(self) -> None:
        for handle in (self._dispatching, self._next_deadline, self._next_sweep):
            if handle is not None:
                handle.cancel()
        if self.gossip is not None:
            await self.gossip.close()
        await self.kv_feed.close()
        await self.load_feed.close()

    # --- bookings --------------------------------------------------------------------------------------------------

    def _booked(self, request: RouteRequest, placed: Placed) -> LocalBooking:
        booking = self._bookings[request.request_id] = LocalBooking(self, request, placed)
        if self._next_sweep is None:
            self._schedule()
        if self.gossip is not None:
            self.gossip.on_change()
        return booking

    def on_prefill_done(self, booking: LocalBooking, reused_tokens: int | None) -> None:
        if self.booking(booking.request_id) is booking:
            self.state.prefill_done(booking.request_id, time.monotonic())
            self._on_change()
        if reused_tokens is not None:
            count_reuse(booking, reused_tokens, self.state.fleet.block_size_of(booking.model))

    def on_progress(self, booking: LocalBooking, osl_tokens: int) -> None:
        if self.booking(booking.request_id) is booking:
            self.state.progress(booking.request_id, osl_tokens, time.monotonic())
            self._on_change()

    def on_finished(self, booking: LocalBooking, osl_tokens: int) -> None:
        if self.booking(booking.request_id) is booking:
            self.state.admission.finished(booking.request_id, osl_tokens)

    def on_end(self, booking: LocalBooking, *, ok: bool) -> None:
        if self._bookings.get(booking.request_id) is booking:  # otherwise another booking has taken its place
            del self._bookings[booking.request_id]
            self.state.free(booking.request_id, time.monotonic(), ok=ok)
            self._on_change()

    # --- the queue -------------------------------------------------------------------------------------------------

    async def _wait_for_room(self, request: RouteRequest, now: float, deadline_s: float) -> Placed:
        displaced = self.state.submit(request, now, deadline_s)
        placing: asyncio.Future[Placed] = self._loop.create_future()
        self._placing[request.request_id] = placing
        self._settle(displaced)
        self._wake()
        try:
            return await placing
        except BaseException:  # it may have been placed when its caller left
            self.state.free(request.request_id, time.monotonic(), ok=False)
            self._on_change()
            raise
        finally:
            del self._placing[request.request_id]

    def _on_change(self) -> None:
        """The load has changed: a request that waits may have room now, and other routers want to know."""
        self._wake()
        if self.gossip is not None:
            self.gossip.on_change()

    def _wake(self) -> None:
        """Dispatch in the next turn of the loop: requests that arrive in one turn are placed together."""
        if self._dispatching is None and self._placing:
            self._dispatching = self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = None
        started = time.perf_counter()
        outcomes = self.state.dispatch(time.monotonic())
        if outcomes:
            PLACE_SECONDS.observe((time.perf_counter() - started) / len(outcomes))
        self._settle(outcomes)
        self._schedule()

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        """Answer the callers of `place` that wait."""
        for request_id, result in outcomes:
            placing = self._placing.get(request_id)
            if placing is None or placing.done():  # its caller has left in this very turn
                self.state.free(request_id, time.monotonic(), ok=False)
            elif isinstance(result, Placed):
                placing.set_result(result)
            else:
                placing.set_exception(result)

    def _schedule(self) -> None:
        """Come back for the next deadline in the queue, and for bookings that nobody ends."""
        if self._next_deadline is not None:
            self._next_deadline.cancel()
            self._next_deadline = None
        if (deadline_s := self.state.next_deadline()) is not None:
            self._next_deadline = self._loop.call_later(max(0.0, deadline_s - time.monotonic()), self._dispatch)
        if self._next_sweep is None and len(self.state.load):
            self._next_sweep = self._loop.call_later(min(SWEEP_S, self.lease_s / 4), self._sweep)

    def _sweep(self) -> None:
        self._next_sweep = None
        if expired := self.state.sweep(time.monotonic()):
            log.warning("%d bookings ended because nothing was heard of them", len(expired))
        for request_id in [name for name in self._bookings if name not in self.state.load]:
            del self._bookings[request_id]
        self._on_change()
        self._schedule()

    # --- workers ---------------------------------------------------------------------------------------------------

    def _join(self, card: WorkerCard) -> None:
        self.state.add_worker(card, time.monotonic())
        self._wake()
        self.kv_feed.follow(card)
        self.load_feed.follow(card)

    def _leave(self, worker_id: WorkerId) -> None:
        self.kv_feed.leave(worker_id)
        self.load_feed.leave(worker_id)
        self.state.remove_worker(worker_id, time.monotonic())
        self._on_change()


def count_failure(error: MeshError) -> None:
    FAILURES.labels(error.code).inc()
    if isinstance(error, OverloadedError):
        REFUSALS.labels(error.reason if isinstance(error, RefusedError) else "full").inc()


def count_reuse(booking: LocalBooking, reused_tokens: int, block_size: int) -> None:
    """Count what the router believed the worker to have cached, and what the worker then found."""
    computes = booking.placed.prefill or booking.placed.decode
    PROMPT_TOKENS.inc(booking.isl_tokens)
    PREDICTED_TOKENS.inc(min(booking.isl_tokens, computes.overlap_blocks * block_size))
    REUSED_TOKENS.inc(min(booking.isl_tokens, reused_tokens))


def observe(router: LocalRouter) -> None:
    """Let Prometheus read the router's state when it asks."""
    gossip = router.gossip
    watch_state(router.state, router.kv_feed.facts, lambda: gossip.peers if gossip is not None else 0)
