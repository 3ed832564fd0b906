"""Keep the memory that peers can take within limits, for all connections of one server or one client together."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvmesh.mesh.plane.frames import MAX_CALL_BYTES, MAX_FRAME_BYTES
from kvmesh.mesh.plane.metrics import ASSEMBLING_BYTES, CONNECTIONS, HANGUPS, UNSENT_BYTES
from kvmesh.mesh.room import Room, Seat, who_leaves
from kvmesh.protocol.errors import OverloadedError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """The limits of all peers together, and of one peer: a certificate's name, or else a host."""

    assembling_bytes: int  # of frames that are not complete
    peer_assembling_bytes: int
    frame_s: float = 30.0  # for a frame to arrive
    unsent_bytes: int  # that peers leave unread
    peer_unsent_bytes: int
    calls_bytes: int = 256 * MIB  # of the bodies of running calls; small bodies are bounded by the number of calls
    peer_calls_bytes: int = 128 * MIB
    waiting_bytes: int = 256 * MIB  # of messages that consumers have not taken
    links: int = 1024  # connections
    peer_links: int = 512
    hello_s: float = 10.0  # for the Hello of a connection


SERVER_LIMITS = PlaneLimits(
    assembling_bytes=24 * MIB,
    peer_assembling_bytes=MAX_CALL_BYTES,
    unsent_bytes=128 * MIB,
    peer_unsent_bytes=64 * MIB,
)
CLIENT_LIMITS = PlaneLimits(  # a client has chosen its peers, and has thousands of them
    assembling_bytes=256 * MIB,
    peer_assembling_bytes=MAX_FRAME_BYTES,
    unsent_bytes=256 * MIB,
    peer_unsent_bytes=64 * MIB,
)


class BoundedLink(Protocol):
    """The part of a connection that its limits use."""

    idle_since_s: float

    @property
    def peer_name(self) -> str: ...

    @property
    def is_greeted(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def hang_up(self, error: OverloadedError) -> None: ...


class Bounds:
    """The limits that connections share, and what they hold of them. Each connection reports what it holds."""

    def __init__(self, limits: PlaneLimits) -> None:
        self.limits = limits
        self._assembling: Room[BoundedLink] = Room(limits.assembling_bytes, limits.peer_assembling_bytes)
        self._unsent: Room[BoundedLink] = Room(limits.unsent_bytes, limits.peer_unsent_bytes)
        self._calls: Room[object] = Room(limits.calls_bytes, limits.peer_calls_bytes)
        self._waiting_bytes = 0
        self._seats: dict[BoundedLink, str] = {}
        self._peers: dict[str, int] = {}
        self._strangers: dict[BoundedLink, float] = {}  # without a Hello, since when
        self._sweep: asyncio.TimerHandle | None = None

    # connections

    def seat(self, link: BoundedLink, now: float) -> None:
        """Take a new connection of a caller. If there are too many, one ends: perhaps this one."""
        peer = link.peer_name
        self._seats[link] = peer
        self._peers[peer] = self._peers.get(peer, 0) + 1
        self._strangers[link] = now
        CONNECTIONS.labels().inc()
        self._plan_sweep(self.limits.hello_s)
        if len(self._seats) > self.limits.links or self._peers[peer] > self.limits.peer_links:
            seats = [_seat(one, name) for one, name in self._seats.items()]
            leaves = who_leaves(seats, _seat(link, peer), self.limits.links, self.limits.peer_links)
            if leaves is not None:
                self._end(leaves, "connections", f"{len(self._seats)} connections are too many")

    def greeted(self, link: BoundedLink) -> None:
        self._strangers.pop(link, None)

    def leave(self, link: BoundedLink) -> None:
        """Forget a connection that has ended."""
        self._strangers.pop(link, None)
        self.assemble(link, 0, 0.0, anew=False)
        self.unsent(link, 0, 0.0)
        if (peer := self._seats.pop(link, None)) is not None:
            CONNECTIONS.labels().inc(-1)
            if self._peers[peer] > 1:
                self._peers[peer] -= 1
            else:
                del self._peers[peer]

    # bytes

    def assemble(self, link: BoundedLink, held_bytes: int, now: float, *, anew: bool) -> None:
        """Note what has come of a connection's incomplete frame. `anew`: of another frame than the last time."""
        room, before = self._assembling, self._assembling.held_bytes
        room.hold(link, link.peer_name, held_bytes, now, anew=anew)
        ASSEMBLING_BYTES.labels().inc(room.held_bytes - before)
        if held_bytes:
            self._plan_sweep(self.limits.frame_s)
            if (leaves := room.who_gives_way(link.peer_name, now)) is not None:
                limit = f"{room.limit_bytes >> 20} MiB in all, {room.peer_limit_bytes >> 20} MiB for a peer"
                self._end(leaves, "assembling", f"incomplete frames hold more memory than they may ({limit})")

    def unsent(self, link: BoundedLink, held_bytes: int, now: float) -> None:
        """Note what a peer has left unread; 0: it keeps up again."""
        room, before = self._unsent, self._unsent.held_bytes
        room.hold(link, link.peer_name, held_bytes, now, anew=False)
        UNSENT_BYTES.labels().inc(room.held_bytes - before)
        if held_bytes and (leaves := room.who_gives_way(link.peer_name, now)) is not None:
            self._end(leaves, "unread", f"peers leave more than {room.limit_bytes >> 20} MiB unread")

    def begin_call(self, call: object, peer: str, body_bytes: int) -> OverloadedError | None:
        """Count the body of a call. Return the refusal if the running calls hold too much."""
        self._calls.hold(call, peer, body_bytes, 0.0, anew=False)
        if self._calls.who_gives_way(peer, 0.0) is None:
            return None
        self._calls.release(call)
        return OverloadedError(
            f"the calls that run hold {self._calls.held_bytes >> 20} MiB already", hint="ask again", retry_after_s=1
        )

    def end_call(self, call: object) -> None:
        self._calls.release(call)

    def wait(self, more_bytes: int) -> bool:
        """Count messages that wait for consumers. Return whether they fill the memory for them."""
        self._waiting_bytes += more_bytes
        return self._waiting_bytes > self.limits.waiting_bytes

    # time

    def _plan_sweep(self, after_s: float) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(after_s / 4, self._look)

    def _look(self) -> None:
        """End connections that are late with their Hello or with a frame. Runs while there are such."""
        self._sweep, now = None, asyncio.get_running_loop().time()
        for link in self._assembling.overdue(now, self.limits.frame_s):
            self._end(link, "slow", f"a frame was not complete after {self.limits.frame_s:g} s")
        late = [link for link, since in self._strangers.items() if now - since > self.limits.hello_s]
        for link in late:
            self._end(link, "no_hello", f"no Hello came in {self.limits.hello_s:g} s")
        if self._strangers:
            self._plan_sweep(self.limits.hello_s)
        elif len(self._assembling):
            self._plan_sweep(self.limits.frame_s)

    def _end(self, link: BoundedLink, reason: str, text: str) -> None:
        HANGUPS.labels(reason).inc()
        link.hang_up(OverloadedError(text, hint="connect again later"))
        self.leave(link)

    def close(self, links: Iterable[BoundedLink]) -> None:
        """Forget all, at the end of a server or a client."""
        for link in links:
            self.leave(link)
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None


def _seat(link: BoundedLink, peer: str) -> Seat[BoundedLink]:
    return Seat(link, peer, link.is_busy(), link.is_greeted, link.idle_since_s)
