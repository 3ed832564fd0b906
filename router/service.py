"""The shell around the router's core: it follows workers and their KV events and hands out bookings."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

from kvevents.subscriber import KvEventSubscriber
from kvevents.transport import KvSource, Snapshot
from mesh.discovery import Deleted, Discovery, Put, open_discovery
from mesh.http.server import listening
from mesh.lifecycle import watch_parent
from mesh.plane.client import PlaneClient
from mesh.plane.server import Call, Handler, PlaneServer
from mesh.telemetry import serve_metrics
from protocol.errors import ConfigError, FeedLostError, InvalidRequestError, MeshError, WireError
from protocol.events import Digest
from protocol.ids import RequestId, WorkerId
from protocol.messages import (
    KvDigest,
    KvRank,
    KvSnapshot,
    Placed,
    Progress,
    Resume,
    RouterCard,
    RouteRequest,
    WorkerCard,
    decode,
    encode,
)
from router.config import RouterConfig, rules_of
from router.core import Outcome, RouterState
from router.gossip_link import Gossip
from router.http import RouterApi
from router.load import ActiveLoad
from router.members import Members
from router.metrics import (
    EVENTS,
    EXPIRED,
    FAILURES,
    IN_FLIGHT,
    INDEX_BLOCKS,
    ORPHAN_BLOCKS,
    PEERS,
    PLACE_SECONDS,
    PREDICTED_TOKENS,
    PROMPT_TOKENS,
    RESUMED,
    REUSED_TOKENS,
    WAIT_SECONDS,
    WAITING,
    WORKERS,
    count_placement,
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
        """It lives, and has so many tokens. To be told every few seconds: a booking of which nothing is heard ends."""


class LocalBooking:
    """It counts until `end`, or until its lease passes or its worker leaves."""

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
        """None: it lives, and that is all that is known."""
        if osl_tokens is not None:
            self._osl_tokens = osl_tokens
        self._router.on_progress(self, self._osl_tokens)

    def end(self, *, ok: bool) -> None:
        """A second call does nothing."""
        self._router.on_end(self, ok=ok)


class _Placing:
    """The block for which a booking counts."""

    __slots__ = ("_booking", "_placing")

    def __init__(self, placing: Coroutine[None, None, LocalBooking]) -> None:
        self._placing = placing

    async def __aenter__(self) -> LocalBooking:
        self._booking = await self._placing
        return self._booking

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._booking.end(ok=kind is None)


class WorkerFeed:
    """Follows the workers of the mesh and tells everybody in this process who wants to know.

    A worker that left without having joined is told too; listeners take that for nothing.
    """

    def __init__(self) -> None:
        self._members = Members()
        self._joined: list[Callable[[WorkerCard], object]] = []
        self._left: list[Callable[[WorkerId], object]] = []
        self.seen = asyncio.Event()  # discovery has told of workers

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None:
        self._joined.append(joined)
        self._left.append(left)

    async def run(self, discovery: Discovery) -> None:
        """Until cancelled. Raises FeedLostError if the feed ends: stale routing would go wrong in silence."""
        async for change in discovery.watch("workers/"):
            self.seen.set()
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
    """The router in this process. Its place in the world: a WorkerFeed, the workers' KV events, and other routers.

    Raises ConfigError if it cannot listen for gossip.
    """

    def __init__(self, config: RouterConfig, plane: PlaneClient, workers: WorkerFeed) -> None:
        self.name = config.name
        self.state = RouterState(rules_of(config))
        self.lease_s = config.lease_s
        self.gossip = open_gossip(config, self.state.load, self._wake) if config.gossip else None
        self._plane = plane
        self._loop = asyncio.get_running_loop()
        self._subscriber = KvEventSubscriber(KvSink(self.state))
        self._unfollowed: set[WorkerId] = set()
        self._placing: dict[RequestId, asyncio.Future[Placed]] = {}
        self._bookings: dict[RequestId, LocalBooking] = {}
        self._dispatching: asyncio.Handle | None = None
        self._next_deadline: asyncio.TimerHandle | None = None
        self._next_sweep: asyncio.TimerHandle | None = None
        workers.listen(self._join, self._leave)
        observe(self)

    async def place(self, request: RouteRequest, timeout_s: float) -> LocalBooking:
        """Place a request; it counts until the booking's `end`. One of the same name that was placed before has ended.

        Waits while every worker is saturated, at most `timeout_s`. Raises NoWorkerError, OverloadedError if the queue
        is full, DeadlineExceededError, InvalidRequestError if a request of this name waits already.
        """
        if request.request_id in self._placing:
            raise InvalidRequestError(f"request {request.request_id} waits in the queue already")
        if (before := self._bookings.get(request.request_id)) is not None:
            before.end(ok=False)
        started = time.monotonic()
        try:
            if (placed := self.state.try_place(request, started)) is not None:
                return self._placed_at_once(request, placed, started)
            displaced = self.state.submit(request, started, started + timeout_s)
        except MeshError as error:
            FAILURES.labels(error.code).inc()
            raise
        placing = self._placing[request.request_id] = self._loop.create_future()
        self._settle(displaced)
        self._wake()
        try:
            return self._booked(request, await placing)
        except BaseException:  # it may have been placed when its caller left
            self.state.free(request.request_id, time.monotonic(), ok=False)
            self._on_change()
            raise
        finally:
            del self._placing[request.request_id]
            WAIT_SECONDS.observe(time.monotonic() - started)

    def _placed_at_once(self, request: RouteRequest, placed: Placed, started: float) -> LocalBooking:
        PLACE_SECONDS.observe(time.monotonic() - started)
        WAIT_SECONDS.observe(0.0)
        count_placement(placed)
        if self._next_sweep is None:
            self._schedule()
        if self.gossip is not None:
            self.gossip.on_change()
        return self._booked(request, placed)

    def book(self, request: RouteRequest, timeout_s: float) -> "_Placing":
        """The same; it counts until the block is left."""
        return _Placing(self.place(request, timeout_s))

    async def preview(self, request: RouteRequest, timeout_s: float) -> Placed:
        """Where it would run if it came now, with the explanation. Raises NoWorkerError."""
        return self.state.preview(request, time.monotonic())

    def resume(self, request: RouteRequest, placed: Placed, progress: Progress) -> LocalBooking:
        """Take over a booking from a router that is gone. Raises NoWorkerError if its workers are not known yet."""
        self.state.resume(request, placed, time.monotonic(), is_prefilling=not progress.has_begun)
        RESUMED.inc()
        booking = self._booked(request, placed)
        booking.has_begun = progress.has_begun
        booking.progress(progress.osl_tokens)
        self._on_change()
        self._schedule()
        return booking

    def booking(self, request_id: RequestId) -> LocalBooking | None:
        """None once its lease has passed, its worker has left or it has ended."""
        return self._bookings.get(request_id) if request_id in self.state.load else None

    def feed_of(self, card: WorkerCard) -> str:
        """How the worker's KV events are followed."""
        if not card.kv_events:
            return "none"
        if card.worker_id in self._unfollowed:
            return "broken"
        ranks = range(1 + min(len(card.rank_kv_events), card.dp_size - 1))
        return "live" if all(self._subscriber.is_live(card.worker_id, rank) for rank in ranks) else "recovering"

    def card(self, address: str = "", http_url: str = "") -> RouterCard:
        """`address`: where placements are asked for; "": nowhere."""
        gossip = self.gossip.endpoint if self.gossip is not None else ""
        return RouterCard(name=self.name, address=address, gossip=gossip, http_url=http_url, pid=os.getpid())

    async def close(self) -> None:
        for handle in (self._dispatching, self._next_deadline, self._next_sweep):
            if handle is not None:
                handle.cancel()
        if self.gossip is not None:
            self.gossip.close()
        await self._subscriber.close()

    # --- bookings ------------------------------------------------------------------------------------

    def _booked(self, request: RouteRequest, placed: Placed) -> LocalBooking:
        booking = self._bookings[request.request_id] = LocalBooking(self, request, placed)
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

    def on_end(self, booking: LocalBooking, *, ok: bool) -> None:
        if self._bookings.get(booking.request_id) is booking:  # else: another one has taken its place
            del self._bookings[booking.request_id]
            self.state.free(booking.request_id, time.monotonic(), ok=ok)
            self._on_change()

    # --- the queue -----------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """The load has changed: somebody may fit now, and others will want to know."""
        self._wake()
        if self.gossip is not None:
            self.gossip.on_change()

    def _wake(self) -> None:
        """Dispatch in the next turn of the loop: what arrives in one turn is placed together."""
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
        if outcomes and self.gossip is not None:
            self.gossip.on_change()

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        for request_id, result in outcomes:
            placing = self._placing.get(request_id)
            if isinstance(result, Placed):
                if placing is None or placing.done():  # its caller has left in this very turn
                    self.state.free(request_id, time.monotonic(), ok=False)
                    continue
                count_placement(result)
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
            self._next_sweep = self._loop.call_later(min(SWEEP_S, self.lease_s / 4), self._sweep)

    def _sweep(self) -> None:
        self._next_sweep = None
        if expired := self.state.sweep(time.monotonic()):
            log.warning("%d bookings ended because nothing was heard of them", len(expired))
        for request_id in [name for name in self._bookings if name not in self.state.load]:
            del self._bookings[request_id]
        self._on_change()
        self._schedule()

    # --- workers -------------------------------------------------------------------------------------

    def _join(self, card: WorkerCard) -> None:
        self.state.add_worker(card, time.monotonic())
        self._wake()
        if card.kv_events:
            self._follow_events(card)

    def _follow_events(self, card: WorkerCard) -> None:
        endpoints = ((card.kv_events, card.kv_replay), *card.rank_kv_events)[: card.dp_size]
        try:
            for dp_rank, (live, replay) in enumerate(endpoints):
                source = KvSource(
                    worker_id=card.worker_id,
                    endpoint=live,
                    replay_endpoint=replay,
                    dp_rank=dp_rank,
                    snapshot=partial(self._snapshot, card, dp_rank),
                    digest=partial(self._digest, card, dp_rank),
                )
                self._subscriber.add(source)
        except ConfigError as error:  # one bad card must not end the router; it places there by load alone
            self._unfollowed.add(card.worker_id)
            log.warning("the KV events of worker %s are not followed: %s", card.worker_id, error)

    def _leave(self, worker_id: WorkerId) -> None:
        self._subscriber.remove(worker_id)
        self._unfollowed.discard(worker_id)
        self.state.remove_worker(worker_id, time.monotonic())
        self._on_change()

    async def _snapshot(self, card: WorkerCard, dp_rank: int) -> Snapshot:
        """What a worker's cache holds, asked for when its event ring does not reach back far enough."""
        seq, payloads = -1, list[bytes]()
        rank = KvRank(dp_rank=dp_rank)
        async with self._plane.open(card.address, "kv_snapshot", rank, SNAPSHOT_TIMEOUT_S) as stream:
            async for part in stream.messages(KvSnapshot):
                seq = part.seq
                payloads.append(part.payload)
        return Snapshot(seq, payloads)

    async def _digest(self, card: WorkerCard, dp_rank: int) -> KvDigest:
        rank = KvRank(dp_rank=dp_rank)
        return await self._plane.ask(card.address, "kv_digest", rank, KvDigest, SNAPSHOT_TIMEOUT_S)


class KvSink:
    """Where the workers' KV events go."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    def on_batch(self, worker_id: WorkerId, dp_rank: int, payload: bytes) -> None:
        EVENTS.inc(self._state.fleet.on_kv_batch(worker_id, dp_rank, payload))

    def on_reset(self, worker_id: WorkerId, dp_rank: int, payloads: Sequence[bytes]) -> None:
        self._state.fleet.forget_kv(worker_id, dp_rank)
        for payload in payloads:
            self.on_batch(worker_id, dp_rank, payload)

    def digest(self, worker_id: WorkerId, dp_rank: int) -> Digest | None:
        return self._state.fleet.digest(worker_id, dp_rank)


def open_gossip(config: RouterConfig, load: ActiveLoad, on_news: Callable[[], None]) -> Gossip:
    bind = f"tcp://{config.host}:{config.gossip_port or '*'}"
    return Gossip(load, config.name, on_news, bind=bind, advertise_host=config.advertise_host or config.host)


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """A router by itself: frontends ask it over the request plane, gateways over HTTP."""
    watch_parent(stop)
    async with AsyncExitStack() as cleanup:
        if config.metrics_port is not None:
            _, close_metrics = serve_metrics(config.host, config.metrics_port, advertise_host=config.advertise_host)
            cleanup.push_async_callback(asyncio.to_thread, close_metrics)
        plane = PlaneClient()
        cleanup.push_async_callback(plane.close)
        workers = WorkerFeed()
        router = LocalRouter(config, plane, workers)
        cleanup.push_async_callback(router.close)
        server = PlaneServer(handlers(router), always={"progress"})
        cleanup.push_async_callback(server.close)
        address = await server.start(config.host, config.port, advertise_host=config.advertise_host)
        api = RouterApi(router, workers, int(config.max_body_mib * 2**20), config.max_bookings)
        url = await cleanup.enter_async_context(
            listening(api.app, config.host, config.http_port, advertise_host=config.advertise_host)
        )
        discovery = open_discovery(config.discovery)
        cleanup.push_async_callback(discovery.close)
        async with asyncio.TaskGroup() as feeds:
            follow = [feeds.create_task(workers.run(discovery), name="router: follow workers")]
            if router.gossip is not None:
                follow.append(feeds.create_task(router.gossip.run(discovery), name="router: follow routers"))
            await discovery.put(f"routers/{config.name}", encode(router.card(address, url)))
            log.info("ready", extra={"address": address, "url": url})
            await stop.wait()
            # no new placements; what runs still counts, and the others are to know of it
            await discovery.put(f"routers/{config.name}", encode(router.card()))
            await drain(server, api, config.drain_timeout_s)
            for feed in follow:
                feed.cancel()


async def drain(server: PlaneServer, api: RouterApi, timeout_s: float) -> None:
    log.info("draining")
    cut_off, _ = await asyncio.gather(server.drain(timeout_s), api.drain(timeout_s))
    if cut_off:
        log.warning("stopped with %d bookings open after %.1f s", cut_off, timeout_s)


def handlers(router: LocalRouter) -> dict[str, Handler]:
    async def place(call: Call) -> None:
        """The answer stays open: it is the booking's lease, and ends with the caller. It begins with one None for each
        STILL_WAITING_S that the request waits: a router that says nothing is taken for dead."""
        request = decode(call.body, RouteRequest)
        placing = asyncio.create_task(router.place(request, call.timeout_s), name=f"place {request.request_id}")
        try:
            while not (await asyncio.wait([placing], timeout=STILL_WAITING_S))[0]:
                await call.send(None)
        except BaseException:
            placing.add_done_callback(end_if_placed)
            placing.cancel()
            raise
        await hold(call, placing.result())

    async def resume(call: Call) -> None:
        held = decode(call.body, Resume)
        await hold(call, router.resume(held.request, held.placed, held.progress))

    async def hold(call: Call, booking: LocalBooking) -> None:
        """Until the caller leaves: how its request ended is not said. Once it has begun, its prompt was computed."""
        try:
            await call.send(booking.placed)
            await asyncio.Event().wait()
        finally:
            booking.end(ok=booking.has_begun)

    async def progress(call: Call) -> None:
        told = decode(call.body, Progress)
        if (booking := router.booking(told.request_id)) is not None:
            if told.has_begun:
                booking.prefill_done(told.reused_tokens)
            booking.progress(told.osl_tokens)

    async def preview(call: Call) -> None:
        await call.send(await router.preview(decode(call.body, RouteRequest), call.timeout_s))

    return {"place": place, "resume": resume, "progress": progress, "preview": preview}


def end_if_placed(placing: asyncio.Task[LocalBooking]) -> None:
    """Its caller left while it was placed."""
    if not placing.cancelled() and placing.exception() is None:
        placing.result().end(ok=False)


def count_reuse(booking: LocalBooking, reused_tokens: int, block_size: int) -> None:
    """What the router believed a worker to have cached, and what that worker then found."""
    computes = booking.placed.prefill or booking.placed.decode
    PROMPT_TOKENS.inc(booking.isl_tokens)
    PREDICTED_TOKENS.inc(min(booking.isl_tokens, computes.overlap_blocks * block_size))
    REUSED_TOKENS.inc(min(booking.isl_tokens, reused_tokens))


def observe(router: LocalRouter) -> None:
    """The gauges read the state when they are scraped."""
    state, gossip = router.state, router.gossip
    IN_FLIGHT.set_function(lambda: len(state.load))
    WAITING.set_function(lambda: state.waiting)
    INDEX_BLOCKS.set_function(lambda: sum(index.num_blocks for index in state.fleet.indexes.values()))
    ORPHAN_BLOCKS.set_function(lambda: sum(index.stats.orphan_blocks for index in state.fleet.indexes.values()))
    EXPIRED.set_function(lambda: state.stats["expired"])
    WORKERS.set_function(lambda: len(state.fleet.cards))
    PEERS.set_function(lambda: gossip.peers if gossip is not None else 0)
