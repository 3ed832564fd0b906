"""Ask routers that run by themselves, with the same `book` and `preview` as the router in this process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from kvmesh.mesh.discovery import Deleted, Discovery, Put
from kvmesh.mesh.lapsed import Lapsed
from kvmesh.mesh.plane.client import PlaneClient, Stream
from kvmesh.protocol.errors import DrainingError, FeedLostError, MeshError, NoWorkerError, PeerLostError, WireError
from kvmesh.protocol.messages import (
    Placed,
    Progress,
    Resume,
    RouterCard,
    RouteRequest,
    RouterIdentity,
    decode,
    decode_card,
    encode,
)
from kvmesh.protocol.version import VersionError
from kvmesh.router.booking import Booking
from kvmesh.router.fallback import FallbackRouter
from kvmesh.router.metrics import FALLBACKS

log = logging.getLogger(__name__)

STILL_WAITING = encode(None)  # sent by a router while a request waits in its queue

ANSWER_TIMEOUT_S = 2.0  # a router answers in well under a millisecond; one that hangs must not hold requests up
IDENTIFY_TIMEOUT_S = 1.0
ASK_AGAIN_S = 0.5  # between questions to a router that did not answer
TELL_TIMEOUT_S = 5.0
TELL_END_S = 0.05  # between reports of ends of answers, which cost a round trip each
RESUME_S = 0.5  # between tries to find another router for a booking
MAX_REFUSED = 4  # routers that an error names
ELSEWHERE = (PeerLostError, DrainingError)  # another router may do it
NO_ROUTER = "no router answers: requests are placed by this frontend's own load alone"


class RemoteRouter:
    """Asks the routers found through discovery: the first by name, and the next one if that router is gone.

    A router that did not answer gets no request before it has answered a question. While none answers, `fallback`
    places requests, and their bookings are offered to routers that come back.
    """

    def __init__(self, plane: PlaneClient, fallback: FallbackRouter | None = None) -> None:
        self._plane = plane
        self._fallback = fallback
        self._is_falling_back = False
        self._silent: dict[str, asyncio.Task[None]] = {}  # routers that did not answer, by key
        self._routers: dict[str, RouterCard] = {}
        self._lapsed = Lapsed(self._is_there, self._forget)
        self._refused: dict[str, str] = {}  # why routers of other versions are not asked
        self._told_end_s = 0.0

    def is_ready(self) -> bool:
        return bool(self._routers) or (self._fallback is not None and self._fallback.is_ready)

    def note(self) -> str:
        """Return what operators should know of the routers, "" for nothing."""
        return NO_ROUTER if self._fallback is not None and not self.routers() else ""

    def routers(self) -> Sequence[RouterCard]:
        """Return the routers that answer, in the order in which they are asked."""
        return [card for key, card in sorted(self._routers.items()) if key not in self._silent]

    async def run(self, discovery: Discovery) -> None:
        """Follow routers until cancelled. Raises FeedLostError if the feed ends."""
        try:
            async for change in discovery.watch("routers/"):
                match change:
                    case Put():
                        self._lapsed.discard(change.key)
                        self._join(change.key, change.value)
                    case Deleted() if change.has_lapsed and change.key in self._routers:
                        self._lapsed.add(change.key)
                    case Deleted():
                        self._lapsed.discard(change.key)
                        self._forget(change.key)
        finally:
            await self._lapsed.close()
            asking = list(self._silent.values())
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise FeedLostError("the discovery watch ended", hint="check --discovery")

    async def _is_there(self, key: str) -> bool:
        """Return whether a router answers at its address, and under its name."""
        card = self._routers[key]
        try:
            found = await self._plane.ask(card.address, "identify", None, RouterIdentity, IDENTIFY_TIMEOUT_S)
        except MeshError:
            return False
        return found.name == card.name

    def _leave_out(self, card: RouterCard) -> None:
        """Ask a router for nothing before it has answered a question: each request would wait for it again."""
        key = f"routers/{card.name}"
        if self._routers.get(key) == card and key not in self._silent:
            self._silent[key] = asyncio.create_task(self._until_there(key), name=f"ask {key}")

    async def _until_there(self, key: str) -> None:
        try:
            while True:
                if key not in self._routers or await self._is_there(key):
                    return
                await asyncio.sleep(ASK_AGAIN_S)
        finally:
            del self._silent[key]

    def _forget(self, key: str) -> None:
        if (gone := self._routers.pop(key, None)) is not None:
            self._plane.expect(gone.address, ())
        self._refused.pop(key, None)

    def _join(self, key: str, value: bytes) -> None:
        self._forget(key)
        try:
            card = decode_card(value, RouterCard)
        except WireError as error:
            log.warning("ignoring %s: %s", key, error)
            if isinstance(error, VersionError) and len(self._refused) < MAX_REFUSED:
                self._refused[key] = str(error)
            return
        if card.address:  # otherwise it is inside a frontend, or takes no more requests
            self._routers[key] = card
            self._plane.expect(card.address, (card.name,))

    def _missing(self) -> str:
        """Return why there is nobody to ask."""
        reasons = [f"{key}: {why}" for key, why in self._refused.items()]
        return "; ".join(reasons) or "there is none"

    @asynccontextmanager
    async def book(self, request: RouteRequest, timeout_s: float) -> AsyncIterator[Booking]:
        """Place a request. Raises what Router.book does, and NoWorkerError if nobody can place: a retry may help."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        problem = self._missing()
        for card in self.routers():
            async with AsyncExitStack() as call:
                try:
                    opening = self._plane.open(card.address, "place", request, _left(deadline), hasty=True)
                    stream = await call.enter_async_context(opening)
                    placed = await _first(stream, card)
                except ELSEWHERE as error:
                    problem = str(error)
                    self._note_lost(card, error)
                    continue
                booking = _RemoteBooking(self, self._plane, request, placed, deadline)
                booking.hold(stream, card.address)
                call.push_async_callback(booking.settle)
                self._note_fallback(problem, is_needed=False)
                if self._fallback is not None:
                    call.enter_context(self._fallback.counted(placed))
                yield booking
                return
        if self._fallback is None:
            raise _no_router(problem)
        self._note_fallback(problem, is_needed=True)
        placed = self._fallback.place(request)
        FALLBACKS.inc()
        booking = _RemoteBooking(self, self._plane, request, placed, deadline)
        booking.hold(None)
        try:
            with self._fallback.counted(placed):
                yield booking
        finally:
            await booking.settle()

    def check(self, request: RouteRequest, timeout_s: float) -> None:
        """Do nothing: the queues are in another process, which refuses when it is asked for a place."""

    def may_tell_end(self) -> bool:
        """Return whether the end of an answer is to be reported: a sample of them is enough to learn from."""
        now = asyncio.get_running_loop().time()
        if now - self._told_end_s < TELL_END_S:
            return False
        self._told_end_s = now
        return True

    async def preview(self, request: RouteRequest, timeout_s: float) -> Placed:
        deadline = asyncio.get_running_loop().time() + timeout_s
        problem = self._missing()
        for card in self.routers():
            try:
                opening = self._plane.open(card.address, "preview", request, _left(deadline), hasty=True)
                async with opening as stream:
                    return await _first(stream, card)
            except ELSEWHERE as error:
                problem = str(error)
                self._note_lost(card, error)
        if self._fallback is None:
            raise _no_router(problem)
        return self._fallback.place(request)

    def _note_lost(self, card: RouterCard, error: MeshError) -> None:
        if isinstance(error, PeerLostError):
            self._leave_out(card)

    def _note_fallback(self, problem: str, *, is_needed: bool) -> None:
        """Say in the log, once each time, that requests are placed without a router, and that they no longer are."""
        if is_needed and not self._is_falling_back:
            log.warning("no router answers (%s): this frontend places requests itself, by its own load alone", problem)
        elif self._is_falling_back and not is_needed:
            log.warning("a router answers again, and places the requests")
        self._is_falling_back = is_needed


class _RemoteBooking:
    """A booking at a router. If that router is gone, the booking is reported to the next one: the request still runs.

    Progress is reported one message at a time, always the latest.
    """

    def __init__(
        self, routers: RemoteRouter, plane: PlaneClient, request: RouteRequest, placed: Placed, deadline: float
    ) -> None:
        self._routers = routers
        self._plane = plane
        self._request = request
        self._deadline = deadline
        self._news = Progress(request_id=request.request_id)
        self._address = ""  # of the router that has the booking; "": none, just now
        self._to_tell = False
        self._telling: asyncio.Task[None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self.placed = placed

    def prefill_done(self, reused_tokens: int | None = None) -> None:
        if not self._news.has_begun:
            self._tell_soon(msgspec.structs.replace(self._news, has_begun=True, reused_tokens=reused_tokens))

    def progress(self, osl_tokens: int) -> None:
        self._tell_soon(msgspec.structs.replace(self._news, osl_tokens=osl_tokens))

    def finished(self, osl_tokens: int) -> None:
        self._news = msgspec.structs.replace(self._news, osl_tokens=osl_tokens, has_finished=True)

    def hold(self, stream: Stream | None, address: str = "") -> None:
        """Hold the booking. `stream` is its lease at the router at `address`; None: no router has it yet."""
        self._address = address
        self._holding = asyncio.create_task(self._hold(stream), name=f"hold {self._request.request_id}")

    async def settle(self) -> None:
        tasks = [task for task in (self._telling, self._holding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._news.has_finished and self._address and self._routers.may_tell_end():
            self._to_tell = True
            await self._tell()

    async def _hold(self, stream: Stream | None) -> None:
        if stream is not None:
            await _ended(stream)
        else:
            await asyncio.sleep(RESUME_S)  # most requests end before a router is back
        while _left(self._deadline) > 0:
            for card in self._routers.routers():
                await self._resume_at(card)
            await asyncio.sleep(RESUME_S)

    async def _resume_at(self, card: RouterCard) -> None:
        """Offer the booking to a router; return when the router does not hold it or holds it no longer."""
        self._address = ""
        held = Resume(request=self._request, placed=self.placed, progress=self._news)
        try:
            async with self._plane.open(card.address, "resume", held, _left(self._deadline), hasty=True) as stream:
                await _first(stream, card)
                self._address = card.address
                if self._news != held.progress:
                    self._tell_soon(self._news)
                await _ended(stream)
        except MeshError as error:  # the request does without
            log.debug("router %s did not take a booking over: %s", card.name, error)
        self._address = ""

    def _tell_soon(self, news: Progress) -> None:
        self._news, self._to_tell = news, True
        if self._address and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell(), name=f"progress of {news.request_id}")

    async def _tell(self) -> None:
        while self._to_tell and self._address:
            self._to_tell = False
            try:
                await self._plane.tell(self._address, "progress", self._news, TELL_TIMEOUT_S)
            except MeshError as error:  # the booking's end will free what this would have
                log.debug("the router was not told of progress: %s", error)


async def _first(stream: Stream, card: RouterCard) -> Placed:
    """Return the placement. A router that lets the request wait says so again and again before it."""
    while True:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                raw = await stream.next()
        except TimeoutError:
            raise PeerLostError(f"router {card.name} did not answer in {ANSWER_TIMEOUT_S} s") from None
        if raw is None:
            raise PeerLostError(f"router {card.name} ended without an answer")
        if bytes(raw) != STILL_WAITING:
            return decode(raw, Placed)


async def _ended(stream: Stream) -> None:
    """Wait until the stream has ended, in whatever way."""
    try:
        while await stream.next() is not None:
            pass
    except MeshError:
        pass


def _left(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _no_router(problem: str) -> NoWorkerError:
    return NoWorkerError(f"no router is ready ({problem})", hint="start one: `kvmesh router`")
