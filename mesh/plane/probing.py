"""Answer questions about peers: can they be reached, how fast do they answer, what do their clocks show."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Call, Handler
from kvmesh.protocol.errors import MeshError, OverloadedError
from kvmesh.protocol.messages import Clock, PeerProbe, ProbePeer, decode

PROBE_S = 20.0  # that a whole probe may take
ANSWER_S = 3.0
PINGS = 5

TransferProbe = Callable[[PlaneClient, ProbePeer, PeerProbe], Awaitable[PeerProbe]]


class ClockReading(NamedTuple):
    """One question for a clock. `sent_s` and `received_s` are of our clock, `told_s` is of the peer's."""

    sent_s: float
    told_s: float
    received_s: float

    @property
    def round_trip_s(self) -> float:
        return self.received_s - self.sent_s

    @property
    def offset_s(self) -> float:
        """Return how far the peer's clock is ahead, right within half of the round trip."""
        return self.told_s - (self.sent_s + self.received_s) / 2


def quickest(pings: Sequence[ClockReading]) -> ClockReading:
    """Return the ping with the shortest round trip: what it says of the clock is the most exact."""
    return min(pings, key=lambda ping: ping.round_trip_s)


async def ping(plane: PlaneClient, address: str) -> ClockReading:
    """Ask a service for its clock several times; return the best answer. Raises MeshError."""
    pings = []
    await plane.ask(address, "clock", None, Clock, ANSWER_S)  # connects
    for _ in range(PINGS):
        wall_s, started_s = time.time(), time.perf_counter()
        told = await plane.ask(address, "clock", None, Clock, ANSWER_S)
        pings.append(ClockReading(wall_s, told.unix_s, wall_s + time.perf_counter() - started_s))
    return quickest(pings)


class PeerProbing:
    """Answers `clock` and `probe_peer`. A probe has connections of its own, so nothing else waits for it."""

    def __init__(self, transfer: TransferProbe | None = None, credentials: Credentials | None = None) -> None:
        self._transfer = transfer
        self._credentials = credentials
        self._is_busy = False

    def handlers(self) -> Mapping[str, Handler]:
        return {"clock": self.clock, "probe_peer": self.probe_peer}

    async def clock(self, call: Call) -> None:
        await call.send(Clock(unix_s=time.time()))

    async def probe_peer(self, call: Call) -> None:
        request = decode(call.body, ProbePeer)
        if self._is_busy:
            raise OverloadedError("a probe of a peer runs here already", hint="ask again", retry_after_s=1)
        self._is_busy = True
        plane = PlaneClient(self._credentials)
        try:
            async with asyncio.timeout(PROBE_S):
                found = await self._probe(plane, request)
        except TimeoutError:
            found = PeerProbe(problem=f"the probe did not end in {PROBE_S:.0f} s")
        finally:
            self._is_busy = False
            await plane.close()
        await call.send(found)

    async def _probe(self, plane: PlaneClient, request: ProbePeer) -> PeerProbe:
        try:
            best = await ping(plane, request.address)
        except MeshError as error:
            return PeerProbe(problem=str(error)[:1024])
        found = PeerProbe(round_trip_s=best.round_trip_s, clock_offset_s=best.offset_s)
        if not request.transfer:
            return found
        if self._transfer is None:
            return msgspec.structs.replace(found, transfer_problem="this service moves no KV")
        try:
            return await self._transfer(plane, request, found)
        except MeshError as error:
            return msgspec.structs.replace(found, transfer_problem=str(error)[:1024])
