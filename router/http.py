"""The router's HTTP API, for gateways and people: placements, bookings, what the index holds, health and metrics."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from kvmesh.mesh.http.errors import NotFoundError
from kvmesh.mesh.http.request import Reply, Request, json_reply, live, show_metrics
from kvmesh.mesh.http.server import App, HttpLimits, Route
from kvmesh.protocol.errors import DrainingError, InvalidRequestError, NoWorkerError, OverloadedError
from kvmesh.protocol.ids import RequestId, new_request_id
from kvmesh.protocol.messages import WorkerCard
from kvmesh.router import api
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.findings import DiscoveryReport
from kvmesh.router.index import Holder
from kvmesh.router.local import LocalBooking, LocalRouter
from kvmesh.router.metrics import HTTP_BOOKINGS, HTTP_REQUESTS
from kvmesh.router.selection import NOWHERE

log = logging.getLogger(__name__)

_ID_PREFIX = "http"


class RouterApi:
    """Serves the API as `app`. Bookings made here end by `DELETE`, or with their lease."""

    def __init__(
        self,
        router: LocalRouter,
        workers: WorkerFeed,
        max_body_bytes: int = 2 << 20,
        max_bookings: int = 4096,
        search: Callable[[], DiscoveryReport] | None = None,
    ) -> None:
        """Build the API. `search` says what discovery has found, where that is more than the workers say."""
        self._search = search or workers.report
        self._router = router
        self._workers = workers
        self._max_bookings = max_bookings
        self._bookings: WeakSet[LocalBooking] = WeakSet()  # the router holds them until they end
        self._placing: set[asyncio.Task[Any]] = set()
        self._draining = False
        HTTP_BOOKINGS.set_function(lambda: len(self._bookings))
        self.app = App(
            [
                Route("POST", "/place", self.place),
                Route("POST", "/bookings/{id}", self.progress),
                Route("DELETE", "/bookings/{id}", self.end),
                Route("POST", "/overlap", self.overlap),
                Route("GET", "/workers", self.list_workers),
                Route("GET", "/snapshot", self.snapshot),
                Route("GET", "/health", self.health),
                Route("GET", "/live", live),
                Route("GET", "/metrics", show_metrics),
            ],
            HttpLimits(max_body_bytes=max_body_bytes),
            on_reply=lambda path, status: HTTP_REQUESTS.labels(path, str(status)).inc(),
        )

    async def drain(self, timeout_s: float) -> None:
        """Place nothing more. Requests that wait have `timeout_s`."""
        self._draining = True
        if self._placing:
            await asyncio.wait(self._placing, timeout=timeout_s)

    # --- placements ------------------------------------------------------------------------------------

    async def place(self, request: Request) -> Reply:
        body = api.read(request.body, api.PlaceBody)
        if self._draining:
            raise DrainingError("this router is shutting down", hint="ask another one")
        block_size = self._block_size(body.model)
        route = api.route_request(body, new_request_id(_ID_PREFIX), *api.prompt_of(body, block_size))
        if not body.book:
            placed = await self._router.preview(route, body.timeout_s)
            return json_reply(api.place_reply(route, placed, block_size, None))
        if len(self._bookings) + len(self._placing) >= self._max_bookings:
            raise OverloadedError(f"{self._max_bookings} bookings stand or wait here", hint="end some")
        task = asyncio.current_task()
        assert task is not None
        self._placing.add(task)
        try:
            booking = await self._router.place(route, body.timeout_s)
        finally:
            self._placing.discard(task)
        self._bookings.add(booking)
        return json_reply(api.place_reply(route, booking.placed, block_size, self._router.lease_s))

    async def progress(self, request: Request) -> Reply:
        body = api.read(request.body, api.ProgressBody)
        booking = self._booking(request)
        if body.first_token or body.reused_tokens is not None:
            booking.prefill_done(body.reused_tokens)
        booking.progress(body.osl_tokens)
        return json_reply({"booking": booking.request_id, "lease_s": self._router.lease_s})

    async def end(self, request: Request) -> Reply:
        """End a booking. `?failed=1`: the prompt is not in the worker's cache."""
        failed = {"": False, "0": False, "1": True}.get(request.query.get("failed", ""))
        if failed is None:
            raise InvalidRequestError("failed is neither 0 nor 1", param="failed")
        self._booking(request).end(ok=not failed)
        return Reply(status=204)

    def _booking(self, request: Request) -> LocalBooking:
        """Return the booking that the request names. Raises NotFoundError."""
        name = RequestId(request.params["id"])
        booking = self._router.booking(name)
        if booking is None or booking not in self._bookings:
            raise NotFoundError(
                f"there is no booking {name[:80]!r}", hint="its lease has passed, its worker has left, or it has ended"
            )
        return booking

    def _block_size(self, model: str) -> int:
        """Return the block size of a model. Raises NoWorkerError if no worker serves it."""
        if model not in self._router.state.fleet.indexes:
            served = ", ".join(self._router.state.fleet.indexes) or "none"
            raise NoWorkerError(f"no worker of the model {model!r} is known; there are: {served}")
        return self._router.state.fleet.block_size_of(model)

    # --- what is known ---------------------------------------------------------------------------------

    async def overlap(self, request: Request) -> Reply:
        body = api.read(request.body, api.OverlapBody)
        block_size = self._block_size(body.model)
        isl_tokens, hashes = api.prompt_of(body, block_size)
        state = self._router.state
        depths = state.fleet.overlaps(body.model, hashes, time.monotonic())
        rows = [
            api.overlap_row(card, holder, depths.get(holder, NOWHERE), state.load.of(holder))
            for card in state.fleet.cards
            if card.model == body.model
            for holder in holders_of(card)
        ]
        return json_reply(
            {
                "model": body.model,
                "block_size": block_size,
                "isl_tokens": isl_tokens,
                "prompt_blocks": len(hashes) // 8,
                "workers": rows,
            }
        )

    async def list_workers(self, request: Request) -> Reply:
        state = self._router.state
        rows = []
        for card in state.fleet.cards:
            index = state.fleet.indexes[card.model]
            ranks = [
                api.rank_row(holder.dp_rank, index.blocks_of(holder), state.load.of(holder))
                for holder in holders_of(card)
            ]
            rows.append(api.worker_row(card, self._router.kv_feed.status_of(card), ranks))
        return json_reply({"workers": rows})

    async def snapshot(self, request: Request) -> Reply:
        """Return the index of one model as bytes, for debugging. The router answers nothing else meanwhile."""
        indexes = self._router.state.fleet.indexes
        model = request.query.get("model", next(iter(indexes), "") if len(indexes) == 1 else "")
        if model not in indexes:
            raise NotFoundError(
                f"there is no index of the model {model!r}", hint=f"send ?model=; there are: {', '.join(indexes)}"
            )
        return Reply(indexes[model].dump(), content_type="application/octet-stream")

    async def health(self, request: Request) -> Reply:
        """Report whether placements can be asked for."""
        state = self._router.state
        feeds = [self._router.kv_feed.status_of(card) for card in state.fleet.cards]
        status = "draining" if self._draining else "ready" if self._workers.seen.is_set() else "no worker is known yet"
        report = {
            "status": status,
            "workers": len(feeds),
            "recovering": feeds.count("recovering"),  # workers whose caches are not fully known yet
            "waiting": state.waiting,
            "in_flight": len(state.load),
            "discovery": self._search(),
        }
        return json_reply(report, status=200 if status == "ready" else 503)


def holders_of(card: WorkerCard) -> list[Holder]:
    return [Holder(card.worker_id, dp_rank) for dp_rank in range(card.dp_size)]
