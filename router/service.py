"""The shell around the router's core: it follows workers and their KV events and hands out bookings."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from kvevents.formats import decode_payload
from kvevents.subscriber import KvEventSubscriber, KvSource, Snapshot
from mesh.discovery import Deleted, Discovery, Put, open_discovery
from mesh.lifecycle import watch_parent
from mesh.plane.client import PlaneClient
from mesh.plane.server import Call, Handler, PlaneServer
from mesh.telemetry import serve_metrics
from protocol.errors import ConfigError, FeedLostError, MeshError, WireError
from protocol.events import KvEvent
from protocol.ids import RequestId, WorkerId
from protocol.messages import KvSnapshot, Placed, RouterCard, RouteRequest, WorkerCard, decode, encode
from router.config import RouterConfig, rules_of
from router.core import RouterState
from router.members import Members
from router.metrics import (
    EVENTS,
    FAILURES,
    IN_FLIGHT,
    INDEX_BLOCKS,
    ORPHAN_BLOCKS,
    OVERLAP_BLOCKS,
    PLACE_SECONDS,
    PLACEMENTS,
    PROMPT_BLOCKS,
    WORKERS,
)

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0


class Booking(Protocol):
    """A placement that counts as load until its context is left."""

    placed: Placed

    def prefill_done(self) -> None:
        """The first token has arrived."""


class LocalBooking:
    def __init__(self, state: RouterState, request_id: RequestId, placed: Placed) -> None:
        self._state = state
        self._request_id = request_id
        self.placed = placed

    def prefill_done(self) -> None:
        self._state.prefill_done(self._request_id)


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
        self._subscriber = KvEventSubscriber(self._take_events)
        workers.listen(self._join, self._leave)
        observe(self.state)

    @asynccontextmanager
    async def book(self, request: RouteRequest, timeout_s: float) -> AsyncIterator[Booking]:
        """Place a request; its load counts until the block is left. Raises NoWorkerError."""
        booking = LocalBooking(self.state, request.request_id, self.place(request))
        try:
            yield booking
        finally:
            self.state.free(request.request_id)

    def place(self, request: RouteRequest) -> Placed:
        started = time.perf_counter()
        try:
            placed = self.state.place(request, time.monotonic())
        except MeshError as error:
            FAILURES.labels(error.code).inc()
            raise
        PLACE_SECONDS.observe(time.perf_counter() - started)
        PLACEMENTS.labels("disaggregated" if placed.prefill else "aggregated").inc()
        PROMPT_BLOCKS.inc(len(request.sequence_hashes))
        OVERLAP_BLOCKS.inc((placed.prefill or placed.decode).overlap_blocks)
        return placed

    async def close(self) -> None:
        await self._subscriber.close()

    def _take_events(self, worker_id: WorkerId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        EVENTS.inc(len(events))
        self.state.on_kv_events(worker_id, dp_rank, events)

    def _join(self, card: WorkerCard) -> None:
        self.state.add_worker(card)
        if card.kv_events:
            self._follow_events(card)

    def _follow_events(self, card: WorkerCard) -> None:
        source = KvSource(
            worker_id=card.worker_id,
            endpoint=card.kv_events,
            replay_endpoint=card.kv_replay,
            snapshot=lambda: self._snapshot(card),
        )
        try:
            self._subscriber.add(source)
        except ConfigError as error:  # one bad card must not end the router; it places there by load alone
            log.warning("the KV events of worker %s are not followed: %s", card.worker_id, error)

    def _leave(self, worker_id: WorkerId) -> None:
        self._subscriber.remove(worker_id)
        self.state.remove_worker(worker_id)

    async def _snapshot(self, card: WorkerCard) -> Snapshot:
        """What a worker's cache holds, asked for when its event ring does not reach back far enough."""
        seq, events = -1, list[KvEvent]()
        async with self._plane.open(card.address, "kv_snapshot", None, SNAPSHOT_TIMEOUT_S) as stream:
            async for part in stream.messages(KvSnapshot):
                seq = part.seq
                events += decode_payload(part.payload).events
        return Snapshot(seq, events)


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
        server = PlaneServer(handlers(router), always={"prefill_done"})
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
        """The answer stays open: it is the booking's lease, and ends with the caller."""
        async with router.book(decode(call.body, RouteRequest), call.timeout_s) as booking:
            await call.send(booking.placed)
            await asyncio.Event().wait()

    async def prefill_done(call: Call) -> None:
        router.state.prefill_done(decode(call.body, RequestId))

    return {"place": place, "prefill_done": prefill_done}


def observe(state: RouterState) -> None:
    """The gauges read the state when they are scraped."""
    IN_FLIGHT.set_function(lambda: len(state.load))
    INDEX_BLOCKS.set_function(lambda: state.index.num_blocks)
    ORPHAN_BLOCKS.set_function(lambda: state.index.stats.orphan_blocks)
    WORKERS.set_function(lambda: len(state.cards))
