"""The shell around the router's core: it follows workers and their KV events and hands out bookings."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from kvevents.subscriber import KvEventSubscriber
from kvevents.transport import KvSource, Snapshot
from mesh.discovery import Deleted, Discovery, Put, open_discovery
from mesh.lifecycle import watch_parent
from mesh.plane.client import PlaneClient
from mesh.plane.server import Call, Handler, PlaneServer
from mesh.telemetry import serve_metrics
from protocol.errors import ConfigError, FeedLostError, MeshError, WireError
from protocol.events import Digest
from protocol.ids import RequestId, WorkerId
from protocol.messages import (
    KvDigest,
    KvSnapshot,
    Placed,
    Progress,
    RouterCard,
    RouteRequest,
    WorkerCard,
    decode,
    encode,
)
from router.config import RouterConfig, rules_of
from router.core import Outcome, RouterState
from router.members import Members
from router.metrics import (
    EVENTS,
    EXPIRED,
    FAILURES,
    IN_FLIGHT,
    INDEX_BLOCKS,
    ORPHAN_BLOCKS,
    PLACE_SECONDS,
    PLACEMENTS,
    PREDICTED_TOKENS,
    PROMPT_TOKENS,
    REUSED_TOKENS,
    WAIT_SECONDS,
    WAITING,
    WORKERS,
)

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0
SWEEP_S = 10.0
STILL_WAITING_S = 1.0


class Booking(Protocol):
    """A placement that counts as load until its context is left."""

    placed: Placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        """The first token has arrived; so many tokens of the prompt were in the worker's cache, if it says so."""

    def progress(self, osl_tokens: int) -> None:
        """The answer goes on. To be told every few seconds: a booking of which nothing is heard ends."""


class LocalBooking:
    def __init__(self, router: "LocalRouter", request: RouteRequest, placed: Placed) -> None:
        self._router = router
        self._request = request
        self._began = False
        self.placed = placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        if not self._began:
            self._began = True
            self._router.prefill_done(self._request, self.placed, reused_tokens)

    def progress(self, osl_tokens: int) -> None:
        self._router.state.progress(self._request.request_id, osl_tokens, time.monotonic())


class WorkerFeed:
    """Follows the workers of the mesh and tells everybody in this process who wants to know.

    A worker that left without having joined is told too; listeners take that for nothing.
    """

    def __init__(self) -> None:
        self._members = Members()
        self._joined: list[Callable[[WorkerCard], object]] = []
        self._left: list[Callable[[WorkerId], object]] = []

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None:
        self._joined.append(joined)
        self._left.append(left)

    async def run(self, discovery: Discovery) -> None:
        """Until cancelled. Raises FeedLostError if the feed ends: stale routing would go wrong in silence."""
        async for change in discovery.watch("workers/"):
            match change:
                case Put():
                    self._join(change.key, change.value)
                case Deleted():
                    self._leave(WorkerId(change.key.removeprefix("workers/")))
        raise FeedLostError("the discovery watch ended", hint="check --discovery")

    def _join(self, key: str, value: bytes) -> None:
        try:
            card = decode(value, WorkerCard)
        except WireError as error:
            log.warning("ignoring %s: %s", key, error)
            return
        if self._members.join(card):
            self._tell_joined(card)
            return
        self._tell_left(card.worker_id)
        log.warning(
            "worker %s waits: its block size %d or context %d is not that of the other workers of %s; "
            "start all with the same --block-size and model", card.worker_id, card.block_size, card.context_tokens,
            card.model,
        )  # fmt: skip

    def _leave(self, worker_id: WorkerId) -> None:
        log.info("worker left", extra={"worker": worker_id})
        self._tell_left(worker_id)
        for card in self._members.leave(worker_id):
            self._tell_joined(card)

    def _tell_joined(self, card: WorkerCard) -> None:
        log.info("worker joined", extra={"worker": card.worker_id, "role": card.role.value, "model": card.model})
        for joined in self._joined:
            joined(card)

    def _tell_left(self, worker_id: WorkerId) -> None:
        for left in self._left:
            left(worker_id)


class LinkWatch:
    """A worker whose lease has ended may hang: its open calls shall not wait for the keepalive to find out."""

    def __init__(self, plane: PlaneClient, workers: WorkerFeed) -> None:
        self._plane = plane
        self._addresses: dict[WorkerId, str] = {}
        workers.listen(self._join, self._leave)

    def _join(self, card: WorkerCard) -> None:
        self._addresses[card.worker_id] = card.address

    def _leave(self, worker_id: WorkerId) -> None:
        if (address := self._addresses.pop(worker_id, None)) is not None:
            self._plane.suspect(address, f"worker {worker_id} has left the mesh")


class LocalRouter:
    """The router in this process. Its place in the world: a WorkerFeed, and the workers' KV events."""

    def __init__(self, config: RouterConfig, plane: PlaneClient, workers: WorkerFeed) -> None:
        self.state = RouterState(rules_of(config))
        self._plane = plane
        self._loop = asyncio.get_running_loop()
        self._subscriber = KvEventSubscriber(KvSink(self.state))
        self._placing: dict[RequestId, asyncio.Future[Placed]] = {}
        self._dispatching: asyncio.Handle | None = None
        self._next_deadline: asyncio.TimerHandle | None = None
        self._next_sweep: asyncio.TimerHandle | None = None
        workers.listen(self._join, self._leave)
        observe(self.state)

    @asynccontextmanager
    async def book(self, request: RouteRequest, timeout_s: float) -> AsyncIterator[Booking]:
        """Place a request; its load counts until the block is left.

        Waits while every worker is saturated, at most `timeout_s`. Raises NoWorkerError, OverloadedError if the queue
        is full, DeadlineExceededError.
        """
        ok = False
        try:
            placed = await self._placed(request, timeout_s)
            yield LocalBooking(self, request, placed)
            ok = True
        finally:
            self._placing.pop(request.request_id, None)
            self.state.free(request.request_id, time.monotonic(), ok=ok)
            self._wake()

    def prefill_done(self, request: RouteRequest, placed: Placed, reused_tokens: int | None) -> None:
        self.state.prefill_done(request.request_id, time.monotonic())
        self._wake()
        if reused_tokens is not None:
            count_reuse(request, placed, reused_tokens, self.state.block_size_of(request.model))

    async def close(self) -> None:
        for handle in (self._dispatching, self._next_deadline, self._next_sweep):
            if handle is not None:
                handle.cancel()
        await self._subscriber.close()

    # --- the queue -----------------------------------------------------------------------------------

    async def _placed(self, request: RouteRequest, timeout_s: float) -> Placed:
        now = time.monotonic()
        placing = self._placing[request.request_id] = self._loop.create_future()
        try:
            displaced = self.state.submit(request, now, now + timeout_s)
        except MeshError as error:
            FAILURES.labels(error.code).inc()
            raise
        self._settle(displaced)
        self._wake()
        try:
            placed: Placed = await placing
            return placed
        finally:
            WAIT_SECONDS.observe(time.monotonic() - now)

    def _wake(self) -> None:
        """Dispatch in the next turn of the loop: what arrives in one turn is placed together."""
        if self._dispatching is None and self.state.waiting:
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
        for request_id, result in outcomes:
            placing = self._placing.get(request_id)
            if isinstance(result, Placed):
                if placing is None or placing.done():  # its caller has left in this very turn
                    self.state.free(request_id, time.monotonic(), ok=False)
                    continue
                PLACEMENTS.labels("disaggregated" if result.prefill else "aggregated").inc()
                placing.set_result(result)
            elif placing is not None and not placing.done():
                FAILURES.labels(result.code).inc()
                placing.set_exception(result)

    def _schedule(self) -> None:
        """Come back for the next deadline in the queue, and for bookings that nobody ends."""
        if self._next_deadline is not None:
            self._next_deadline.cancel()
            self._next_deadline = None
        if (deadline_s := self.state.next_deadline()) is not None:
            self._next_deadline = self._loop.call_later(max(0.0, deadline_s - time.monotonic()), self._dispatch)
        if self._next_sweep is None and len(self.state.load):
            self._next_sweep = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._next_sweep = None
        if expired := self.state.expire(time.monotonic()):
            log.warning("%d bookings ended because nothing was heard of them", len(expired))
        self._wake()
        self._schedule()

    # --- workers -------------------------------------------------------------------------------------

    def _join(self, card: WorkerCard) -> None:
        self.state.add_worker(card, time.monotonic())
        self._wake()
        if card.kv_events:
            self._follow_events(card)

    def _follow_events(self, card: WorkerCard) -> None:
        source = KvSource(
            worker_id=card.worker_id,
            endpoint=card.kv_events,
            replay_endpoint=card.kv_replay,
            snapshot=lambda: self._snapshot(card),
            digest=lambda: self._digest(card),
        )
        try:
            self._subscriber.add(source)
        except ConfigError as error:  # one bad card must not end the router; it places there by load alone
            log.warning("the KV events of worker %s are not followed: %s", card.worker_id, error)

    def _leave(self, worker_id: WorkerId) -> None:
        self._subscriber.remove(worker_id)
        self.state.remove_worker(worker_id, time.monotonic())
        self._wake()

    async def _snapshot(self, card: WorkerCard) -> Snapshot:
        """What a worker's cache holds, asked for when its event ring does not reach back far enough."""
        seq, payloads = -1, list[bytes]()
        async with self._plane.open(card.address, "kv_snapshot", None, SNAPSHOT_TIMEOUT_S) as stream:
            async for part in stream.messages(KvSnapshot):
                seq = part.seq
                payloads.append(part.payload)
        return Snapshot(seq, payloads)

    async def _digest(self, card: WorkerCard) -> KvDigest:
        return await self._plane.ask(card.address, "kv_digest", None, KvDigest, SNAPSHOT_TIMEOUT_S)


class KvSink:
    """Where the workers' KV events go."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        EVENTS.inc(self._state.on_kv_batch(worker_id, dp_rank, payload))

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self._state.forget_kv(worker_id, dp_rank)
        for payload in payloads:
            self.on_batch(worker_id, dp_rank, payload)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        return self._state.digest(worker_id, dp_rank)


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """A router by itself: frontends ask it over the request plane."""
    watch_parent(stop)
    async with AsyncExitStack() as cleanup:
        _, close_metrics = serve_metrics(config.host, config.metrics_port)
        cleanup.push_async_callback(asyncio.to_thread, close_metrics)
        plane = PlaneClient()
        cleanup.push_async_callback(plane.close)
        workers = WorkerFeed()
        router = LocalRouter(config, plane, workers)
        cleanup.push_async_callback(router.close)
        server = PlaneServer(handlers(router), always={"progress"})
        cleanup.push_async_callback(server.close)
        address = await server.start(config.host, config.port, advertise_host=config.advertise_host)
        discovery = open_discovery(config.discovery)
        cleanup.push_async_callback(discovery.close)
        async with asyncio.TaskGroup() as feeds:
            follow = feeds.create_task(workers.run(discovery), name="router: follow workers")
            card = RouterCard(name=config.name, address=address, pid=os.getpid())
            registration = await discovery.put(f"routers/{config.name}", encode(card))
            log.info("ready", extra={"address": address})
            await stop.wait()
            await registration.withdraw()
            if cut_off := await server.drain(config.drain_timeout_s):
                log.warning("stopped with %d bookings open after %.1f s", cut_off, config.drain_timeout_s)
            follow.cancel()


def handlers(router: LocalRouter) -> dict[str, Handler]:
    async def place(call: Call) -> None:
        """The answer stays open: it is the booking's lease, and ends with the caller. It begins with one None for each
        STILL_WAITING_S that the request waits: a router that says nothing is taken for dead."""
        request = decode(call.body, RouteRequest)
        async with AsyncExitStack() as lease:
            booked = asyncio.ensure_future(lease.enter_async_context(router.book(request, call.timeout_s)))
            try:
                while not (await asyncio.wait([booked], timeout=STILL_WAITING_S))[0]:
                    await call.send(None)
                bookings[request.request_id] = booking = booked.result()
            except BaseException:
                booked.cancel()
                await asyncio.wait([booked])
                raise
            lease.callback(bookings.pop, request.request_id, None)
            await call.send(booking.placed)
            await asyncio.Event().wait()

    async def progress(call: Call) -> None:
        told = decode(call.body, Progress)
        if (booking := bookings.get(told.request_id)) is not None:
            booking.prefill_done(told.reused_tokens)
            booking.progress(told.osl_tokens)

    bookings: dict[RequestId, Booking] = {}
    return {"place": place, "progress": progress}


def count_reuse(request: RouteRequest, placed: Placed, reused_tokens: int, block_size: int) -> None:
    """What the router believed a worker to have cached, and what that worker then found."""
    computes = placed.prefill or placed.decode
    PROMPT_TOKENS.inc(request.isl_tokens)
    PREDICTED_TOKENS.inc(min(request.isl_tokens, computes.overlap_blocks * block_size))
    REUSED_TOKENS.inc(min(request.isl_tokens, reused_tokens))


def observe(state: RouterState) -> None:
    """The gauges read the state when they are scraped."""
    IN_FLIGHT.set_function(lambda: len(state.load))
    WAITING.set_function(lambda: state.waiting)
    INDEX_BLOCKS.set_function(lambda: sum(index.num_blocks for index in state.indexes.values()))
    ORPHAN_BLOCKS.set_function(lambda: sum(index.stats.orphan_blocks for index in state.indexes.values()))
    EXPIRED.set_function(lambda: state.stats["expired"])
    WORKERS.set_function(lambda: len(state.cards))
