"""Ask a router that runs by itself. Offers the same `book` as the router in this process."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

import msgspec

from mesh.discovery import Deleted, Discovery, Put
from mesh.plane.client import PlaneClient, Stream
from protocol.errors import DrainingError, FeedLostError, MeshError, NoWorkerError, PeerLostError, WireError
from protocol.ids import RequestId
from protocol.messages import Placed, Progress, RouterCard, RouteRequest, decode, encode
from router.service import Booking

log = logging.getLogger(__name__)

STILL_WAITING = encode(None)  # what a router says while a request waits in its queue

ANSWER_TIMEOUT_S = 3.0  # a router answers in well under a millisecond; one that hangs must not hold requests up


class Router(Protocol):
    def book(self, request: RouteRequest, timeout_s: float) -> AbstractAsyncContextManager[Booking]:
        """Place a request; its load counts until the block is left. Raises NoWorkerError."""


class RemoteRouter:
    """Routers found through discovery; the first by name is asked, the next if it is gone."""

    def __init__(self, plane: PlaneClient) -> None:
        self._plane = plane
        self._routers: dict[str, RouterCard] = {}

    def is_ready(self) -> bool:
        return bool(self._routers)

    async def run(self, discovery: Discovery) -> None:
        """Until cancelled. Raises FeedLostError if the feed ends."""
        async for change in discovery.watch("routers/"):
            match change:
                case Put():
                    self._join(change.key, change.value)
                case Deleted():
                    self._routers.pop(change.key, None)
        raise FeedLostError("the discovery watch ended", hint="check --discovery")

    def _join(self, key: str, value: bytes) -> None:
        try:
            self._routers[key] = decode(value, RouterCard)
        except WireError as error:
            log.warning("ignoring %s: %s", key, error)

    @asynccontextmanager
    async def book(self, request: RouteRequest, timeout_s: float) -> AsyncIterator[Booking]:
        """Raises NoWorkerError also if no router answers: that passes, and the request may wait or come again."""
        problem = "there is none"
        for _, card in sorted(self._routers.items()):
            async with AsyncExitStack() as call:
                try:
                    stream = await call.enter_async_context(self._plane.open(card.address, "place", request, timeout_s))
                    placed = await _first(stream, card)
                except (PeerLostError, DrainingError) as error:
                    problem = str(error)
                    continue
                booking = _RemoteBooking(self._plane, card.address, request.request_id, placed)
                call.push_async_callback(booking.settle)
                yield booking
                return
        raise NoWorkerError(f"no router is ready ({problem})", hint="start one: `python -m router`")


class _RemoteBooking:
    """Tells the router of progress, one message at a time: the latest of what is to be told."""

    def __init__(self, plane: PlaneClient, address: str, request_id: RequestId, placed: Placed) -> None:
        self._plane = plane
        self._address = address
        self._news = Progress(request_id=request_id)
        self._began = False
        self._to_tell = False
        self._telling: asyncio.Task[None] | None = None
        self.placed = placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        if not self._began:
            self._began = True
            self._tell_soon(msgspec.structs.replace(self._news, reused_tokens=reused_tokens))

    def progress(self, osl_tokens: int) -> None:
        self._tell_soon(msgspec.structs.replace(self._news, osl_tokens=osl_tokens))

    async def settle(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])

    def _tell_soon(self, news: Progress) -> None:
        self._news, self._to_tell = news, True
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell(), name=f"progress of {news.request_id}")

    async def _tell(self) -> None:
        while self._to_tell:
            self._to_tell = False
            try:
                await self._plane.tell(self._address, "progress", self._news, 5.0)
            except MeshError as error:  # the booking's end will free what this would have
                log.debug("the router was not told of progress: %s", error)


async def _first(stream: Stream, card: RouterCard) -> Placed:
    """The placement; before it a router that lets the request wait says so again and again."""
    while True:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                raw = await stream.next()
        except TimeoutError:
            raise PeerLostError(f"router {card.name} did not answer in {ANSWER_TIMEOUT_S} s") from None
        if raw is None:
            raise PeerLostError(f"router {card.name} ended without an answer")
        if raw != STILL_WAITING:
            return decode(raw, Placed)
