"""Decide who gives way when memory or connections are short. Pure: the time is an argument.

Holders belong to peers. A peer is a certificate's name, or a host where there are no certificates. The peer with the
most gives way first, so that a peer with little is never harmed by a peer that hoards.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

H = TypeVar("H")
LEAST_AGE_S = 0.001  # what has just begun counts as so old


@dataclass(slots=True)
class Holding:
    peer: str
    held_bytes: int
    since_s: float


class Room(Generic[H]):
    """Share bytes between holders. When there are too many, one holder at a time is named that has to give way."""

    def __init__(self, limit_bytes: int, peer_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peer_limit_bytes = peer_limit_bytes
        self.held_bytes = 0  # by all
        self._holdings: dict[H, Holding] = {}
        self._peers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holdings)

    def hold(self, holder: H, peer: str, held_bytes: int, now: float, *, anew: bool) -> None:
        """Note how much a holder holds now. `anew`: it has let go of what it held, and holds something else."""
        if held_bytes == 0:
            self.release(holder)
            return
        if (known := self._holdings.get(holder)) is None:
            known = self._holdings[holder] = Holding(peer, 0, now)
        elif anew:
            known.since_s = now
        self._add(known, held_bytes - known.held_bytes)

    def release(self, holder: H) -> None:
        if (known := self._holdings.pop(holder, None)) is not None:
            self._add(known, -known.held_bytes)

    def _add(self, holding: Holding, more_bytes: int) -> None:
        holding.held_bytes += more_bytes
        self.held_bytes += more_bytes
        total = self._peers.get(holding.peer, 0) + more_bytes
        if total:
            self._peers[holding.peer] = total
        else:
            self._peers.pop(holding.peer, None)

    def who_gives_way(self, peer: str, now: float) -> H | None:
        """Return the holder that has to let go, after `peer` has taken more; None: all is within the limits.

        Of the peer with the most bytes it is the holder with the most bytes times seconds: a large frame that comes
        quickly is no hoard.
        """
        if self._peers.get(peer, 0) > self.peer_limit_bytes:
            largest = peer
        elif self.held_bytes > self.limit_bytes:
            largest = max(self._peers, key=self._peers.__getitem__)
        else:
            return None
        theirs = [(holder, holding) for holder, holding in self._holdings.items() if holding.peer == largest]
        return max(theirs, key=lambda one: one[1].held_bytes * max(now - one[1].since_s, LEAST_AGE_S))[0]

    def overdue(self, now: float, after_s: float) -> list[H]:
        """Return the holders that have held the same thing for longer than `after_s`."""
        return [holder for holder, holding in self._holdings.items() if now - holding.since_s > after_s]


@dataclass(frozen=True, slots=True)
class Seat(Generic[H]):
    """One connection, as it is seen when connections are short."""

    holder: H
    peer: str
    is_busy: bool  # it has streams
    is_greeted: bool
    idle_since_s: float


def who_leaves(seats: Collection[Seat[H]], newest: Seat[H], limit: int, peer_limit: int) -> H | None:
    """Return the connection that has to end because `newest`, one of `seats`, has come; None: there is room.

    It is the one of the peer with the most that has been idle for longest, first those that never said a Hello. A peer
    whose connections are all busy loses the newest.
    """
    counts: dict[str, int] = {}
    for seat in seats:
        counts[seat.peer] = counts.get(seat.peer, 0) + 1
    if counts[newest.peer] > peer_limit:
        largest = newest.peer
    elif len(seats) > limit:
        largest = max(counts, key=lambda peer: (counts[peer], peer == newest.peer))
    else:
        return None
    idle = [seat for seat in seats if seat.peer == largest and not seat.is_busy and seat.holder != newest.holder]
    if not idle:
        return newest.holder
    return min(idle, key=lambda seat: (seat.is_greeted, seat.idle_since_s)).holder
